"""Images of raw data sets, made for tests, and what lies in a folder afterwards."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def raw_image(seed: int, size: tuple[int, int] = (24, 16), kind: str = "jpeg", **how: Any) -> bytes:
    """Noise, so that every seed has other bytes and a cut is noticed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **how)
    return stream.getvalue()


def files_of(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
