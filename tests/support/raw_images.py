"""Images of raw data sets, made for tests, and what lies in a folder afterwards."""

import io

import numpy as np
from PIL import Image


def raw_image(seed, size=(24, 16), kind="jpeg", **how):
    """Noise, so that every seed has other bytes and a cut is noticed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **how)
    return stream.getvalue()


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
