"""Signals that ask a run to end."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """Notes SIGTERM and the first Ctrl-C instead of dying of them; a second Ctrl-C interrupts.

    Launchers repeat SIGTERM, so every further one changes nothing.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
