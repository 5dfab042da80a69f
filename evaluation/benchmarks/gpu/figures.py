"""Figures of `vlp check gpu`: measured beside promised."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from vlp.config import Precision
from vlp.training.config import PretrainConfig


class Setting(NamedTuple):
    """What the parts of a check share.

    config: of a pretraining; rows: pairs of its timed steps; dry: go through every part on the CPU
    at tiny sizes; out: folder of the results.
    """

    config: PretrainConfig
    rows: tuple[int, ...]
    device: torch.device
    dry: bool
    out: Path

    @property
    def middle(self) -> int:
        """Pairs of the timed steps that the promises are of."""
        return self.rows[len(self.rows) // 2]

    @property
    def precision(self) -> Precision:
        """Number format of timed work."""
        return "float32" if self.dry else "bf16"

    @property
    def backend(self) -> str:
        """Backend of `torch.compile`; a dry run captures graphs and compiles none."""
        return "eager" if self.dry else "inductor"


class CheckedFigure(NamedTuple):
    """One measured figure, and what was promised of it.

    at_least, at_most: the promise, if any; correctness: a figure that breaks it fails the check.
    """

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    correctness: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the promise is kept; NaN keeps none."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    def cells(self) -> list[str]:
        """Lay out a row of the table: name, promised, measured, whether it holds."""
        promised = "-"
        if self.at_least is not None:
            promised = f"at least {self.at_least:g}"
        elif self.at_most is not None:
            promised = f"at most {self.at_most:g}"
        verdict = "" if promised == "-" else "yes" if self.holds else "NO"
        return [self.name, promised, f"{self.value:.4g} {self.unit}".strip(), verdict]
