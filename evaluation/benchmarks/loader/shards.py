"""Shards that the loaders' benchmark reads: made ones, and what any must have."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from vlp.config import ConfigError
from vlp.data.schema import captions_of
from vlp.data.shards.shard_index import ShardIndex, index_folder
from vlp.data.shards.tar import append_member, close_tar
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece


def make_shards(folder: Path, samples: int, images: int = 64, per_shard: int = 128) -> None:
    """Shards as img2dataset writes them, of `images` different images again and again."""
    rng = np.random.default_rng(0)
    words = np.array([f"{first}{last}" for first in "bdfgklmnprst" for last in ("a", "en", "ito")])
    encoded = [_photograph(rng, 500, 375) for _ in range(images)]
    for first in range(0, samples, per_shard):
        with open(folder / f"{first // per_shard:05d}.tar", "wb") as file:
            for number in range(first, min(first + per_shard, samples)):
                caption = " ".join(rng.choice(words, rng.integers(6, 16)))
                append_member(file, f"{number:09d}.jpg", encoded[number % images])
                append_member(file, f"{number:09d}.txt", caption.encode())
            close_tar(file)
    index_folder(folder)


def _photograph(rng: np.random.Generator, width: int, height: int) -> bytes:
    """Noise whose amplitude falls as 1/frequency, as in photographs; its channels are alike."""
    across, down = np.fft.rfftfreq(width), np.fft.fftfreq(height)[:, None]
    frequency = np.maximum(np.hypot(across, down), 1 / width)
    noise = np.fft.rfft2(rng.normal(size=(4, height, width))) / frequency
    grey, *colours = np.fft.irfft2(noise, s=(height, width))
    levels = np.stack([grey + 0.4 * colour for colour in colours], axis=-1)
    levels = 128 + 50 * (levels - levels.mean()) / levels.std()
    stream = BytesIO()
    Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(stream, "jpeg", quality=90)
    return stream.getvalue()


def check_shards(shards: Path, batch: int, workers: int) -> None:
    """Raises ConfigError where one of the loaders would never give a batch."""
    index = ShardIndex.open(shards)
    paths = sorted(shards.glob("*.tar"))
    if len(paths) < workers:
        raise ConfigError(f"{shards}: {workers} workers need as many shards")
    if len(index) < 2 * batch * workers:
        raise ConfigError(f"{shards}: {len(index)} samples are too few for batches of {batch}")
    with tarfile.open(paths[0]) as archive:
        if not any(name.endswith(".txt") for name in archive.getnames()):
            raise ConfigError(f"{paths[0]}: open_clip reads captions from KEY.txt, there is none")


def save_vocabulary(shards: Path, folder: Path, max_tokens: int) -> None:
    """Train a WordPiece vocabulary on the captions of the first shard."""
    index = ShardIndex.open(shards)
    captions = [
        caption
        for number in range(index.shards[0].samples)
        for caption in captions_of(index.read_annotation(0, number))
    ]
    TextProcessor(train_wordpiece(captions, 30_000), max_tokens).save(folder)
