"""Precisions that a processor has no instructions for."""

from __future__ import annotations

import sys

import torch

from vlp import distributed


def is_emulated(device: torch.device, precision: str) -> bool:
    """Return whether a CPU has no instructions for a precision, and takes ten times as long."""
    if (
        device.type != "cpu"
        or precision not in ("bf16", "fp16")
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    return not getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported")()


def advise(setting: str, precision: str) -> None:
    """Say on rank 0 that this machine computes the precision that a setting names slowly."""
    if distributed.rank() == 0 and is_emulated(distributed.default_device(), precision):
        print(
            f"{setting}: this CPU has no instructions for {precision}; float32 is several times as "
            "fast here",
            file=sys.stderr,
        )
