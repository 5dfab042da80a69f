"""Options that all evaluations share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vlp.config import Precision


@dataclass(frozen=True)
class EvalOptions:
    """Options for reading and computing."""

    # Number of items; None: all.
    limit: int | None = None
    # Items of one encoder call.
    batch: int = 64
    # None: this rank's GPU, or the CPU.
    device: torch.device | str | None = None
    # None: bf16 on a GPU, else float32.
    precision: Precision | None = None
    # Worker processes; None: this rank's cores, at most 8, on a GPU and 0 on a CPU.
    workers: int | None = None
    # Bootstrap resamples.
    resamples: int = 1000
    # Show progress bars on the first rank.
    progress: bool = False
