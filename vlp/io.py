"""What must be there after a crash: files, and the names in a folder, brought to the disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def sync(file: Any) -> None:
    """Have what was written to an open file on the disk, before it gets its name."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have a folder's names on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
