"""Options that all evaluations share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vlp.config import Precision


@dataclass(frozen=True)
class EvalOptions:
    """Options for reading and computing.

    limit: number of items; None is all. batch: items of one encoder call. device: None is this
    rank's GPU, or the CPU. precision: None is bf16 on a GPU, else float32. workers: reading
    processes; None is this rank's cores up to 8 on a GPU, 0 on a CPU. resamples: bootstrap draws.
    progress: bars on the first rank.
    """

    limit: int | None = None
    batch: int = 64
    device: torch.device | str | None = None
    precision: Precision | None = None
    workers: int | None = None
    resamples: int = 1000
    progress: bool = False
