"""The ranks' common decision to stop: a look every few seconds, not at every step."""

from __future__ import annotations

import time

import torch

from vlp import distributed
from vlp.training.stop.signals import StopSignals

SECONDS = 4.0
"""About how long ranks train between two looks at each other's stop signals."""


class StopTogether:
    """Looks at the stop signals of all ranks at the same steps.

    The first looks are one step apart; then the slowest rank's pace says how many steps make
    `SECONDS`, and the number grows at most twofold from one look to the next. One rank alone looks
    at every step.

    Args:
        signals: of this rank.
        device: what the ranks compute on.
    """

    def __init__(self, signals: StopSignals, device: torch.device) -> None:
        self._signals, self._device = signals, device
        self._steps, self._left = 1, 0
        self._looked = time.monotonic()

    def look(self) -> bool:
        """Return, on every rank alike, whether the run is to end; called once before each step."""
        asked = self._signals.look()
        if distributed.world_size() == 1:
            return asked
        if self._left:
            self._left -= 1
            return False
        now = time.monotonic()
        pace = (now - self._looked) / self._steps
        stop, pace = distributed.largest([float(asked), pace], self._device)
        self._looked = time.monotonic()
        self._steps = max(1, min(2 * self._steps, int(SECONDS / max(pace, 1e-6))))
        self._left = self._steps - 1
        return bool(stop)
