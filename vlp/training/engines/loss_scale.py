"""Loss scaling for float16, whose smallest numbers are larger than many gradients.

The policy is that of `torch.amp.GradScaler`, which itself asks an optimiser for whole gradients
and keeps its state on a device; ZeRO cuts gradients up, and a checkpoint wants two numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOSS_SCALE = "loss_scale"
"""Name of the state among the optimiser's in a checkpoint."""

START = 2.0**16
INTERVAL = 2000
"""Applied steps in a row after which the scale doubles."""


class LossScale:
    """Factor of the loss: halved by a step that is not finite, doubled after `INTERVAL` others.

    Args:
        precision: of the training; the factor is 1 for good unless it is "fp16".
    """

    def __init__(self, precision: str) -> None:
        self.enabled = precision == "fp16"
        self.value = START if self.enabled else 1.0
        self._applied = 0

    def update(self, applied: bool) -> float | None:
        """Follow an optimiser step; return the scale it had, None when it is not enabled."""
        if not self.enabled:
            return None
        before = self.value
        self._applied = self._applied + 1 if applied else 0
        if not applied:
            self.value = max(1.0, before / 2)
        elif self._applied == INTERVAL:
            self.value, self._applied = before * 2, 0
        return before

    def state(self) -> dict[str, Tensor]:
        """Return scale and count as one named float64 vector; nothing when it is not enabled."""
        numbers = torch.tensor([self.value, self._applied], dtype=torch.float64)
        return {LOSS_SCALE: numbers} if self.enabled else {}

    def load(self, state: Tensor) -> None:
        """Take back what `state` gave, (2,); another precision has no use for it."""
        if self.enabled:
            self.value, applied = state.tolist()
            self._applied = int(applied)
