"""A range of a file as a file of its own."""

from __future__ import annotations

import io
import os
from typing import BinaryIO


def section(file: int, start: int, stop: int, zeros: int = 0) -> BinaryIO:
    """Return the bytes of an open file from `start` to `stop`, and so many zeros behind them.

    Reads carry their own offset: processes that inherited the same handle do not disturb each
    other. Closing it leaves `file` open.
    """
    return io.BufferedReader(_Section(file, start, stop, zeros), 4096)


class _Section(io.RawIOBase):
    def __init__(self, file: int, start: int, stop: int, zeros: int) -> None:
        self._file, self._start = file, start
        self._held, self._size = stop - start, stop - start + zeros
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        held = max(0, min(len(buffer), self._held - self._place))
        if held:
            data = os.pread(self._file, held, self._start + self._place)
        else:
            data = bytes(max(0, min(len(buffer), self._size - self._place)))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {0: 0, 1: self._place, 2: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place
