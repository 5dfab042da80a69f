"""Indices of shards that somebody has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def index_columns(folder: Path) -> dict[str, np.ndarray]:
    """What `index.npz` holds, by name."""
    with np.load(folder / "index.npz") as found:
        return dict(found)


def change_index(folder: Path, **changed: Any) -> None:
    """Write an index again with other columns; None leaves one out."""
    columns = index_columns(folder) | changed
    kept = {name: column for name, column in columns.items() if column is not None}
    np.savez(folder / "index.npz", **kept)
