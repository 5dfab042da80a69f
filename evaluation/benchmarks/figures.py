"""How every benchmark ends: one JSON line per figure, naming the device it was measured on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

import torch


class Measurement(NamedTuple):
    """One measured number.

    `target` is what the project must reach and `stretch` what it would be proud of, both in `unit`
    and None where nothing was promised.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    stretch: float | None = None


def device_name(device: torch.device) -> str:
    """The device and the CPU threads PyTorch may use: `cpu, 2 threads`."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{kind}, {torch.get_num_threads()} threads"


def print_figures(figures: Iterable[Measurement], device: torch.device | None = None) -> None:
    """One line of JSON per figure: name, value, unit, target, stretch, device.

    Without `device` the figures are taken to be the first GPU's or, where there is none, the CPU's.
    """
    name = device_name(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for figure in figures:
        print(json.dumps(figure._asdict() | {"device": name}))
