"""Small folders of shards with images that can be told apart."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece

WORDS = ("red", "green", "blue", "dog", "cat", "house", "left", "runs")


def caption(number: int, which: int = 0) -> str:
    first, second = WORDS[number % 8], WORDS[(number // 8 + which) % 8]
    return f"a {first} {second} number {number} {'again ' * which}".strip()


def encoded(number: int, size: tuple[int, int] = (20, 16), kind: str = "png") -> bytes:
    rng = np.random.default_rng(number)
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    stream = BytesIO()
    image.save(stream, "jpeg" if kind == "jpg" else kind)
    return stream.getvalue()


@pytest.fixture
def make_shards(tmp_path: Path) -> Callable[..., Path]:
    def make(
        name: str = "shards",
        count: int = 23,
        per_shard: int = 5,
        captions: int = 2,
        kind: str = "png",
    ) -> Path:
        with ShardWriter(tmp_path / name, per_shard) as writer:
            for number in range(count):
                writer.write(
                    f"{name}_{number:04d}",
                    encoded(number, kind=kind),
                    kind,
                    Annotation(
                        captions=[caption(number, which) for which in range(captions)],
                        source=name,
                        image_id=str(number),
                    ),
                )
        return tmp_path / name

    return make


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    captions = [caption(number, which) for number in range(64) for which in range(2)]
    TextProcessor(train_wordpiece(captions, 90), 12).save(folder)
    return folder
