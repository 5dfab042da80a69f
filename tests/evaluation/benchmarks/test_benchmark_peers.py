"""The loader's benchmark beside other libraries: what all sides share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evaluation.benchmarks.loader.__main__ import TOKENS, Settings
from evaluation.benchmarks.loader.peers import TRANSFORMS, Prepare, ratios, samples_of
from evaluation.benchmarks.loader.shards import make_shards, save_vocabulary
from evaluation.benchmarks.loader.turns import LoaderTurns, Turn
from vlp.data.image.jpeg import JpegImage


def test_the_ratio_is_that_of_cpu_time_by_rounds() -> None:
    found = {
        "ours": LoaderTurns(8, 0.0, [Turn(9.0, 1.0), Turn(9.0, 2.0)]),
        "other": LoaderTurns(8, 0.0, [Turn(1.0, 1.5), Turn(1.0, 2.0)]),
    }
    assert ratios(found, "other") == [1.5, 1.0]


@pytest.mark.parametrize("transforms", TRANSFORMS)
def test_sides_get_the_same_samples(tmp_path: Path, transforms: str) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    make_shards(shards, 8, images=1, per_shard=4)
    save_vocabulary(shards, tmp_path / "vocabulary", TOKENS)
    settings = Settings(shards, tmp_path / "vocabulary", 32, 2, 0)
    samples = list(samples_of(shards))
    assert len(samples) == 8
    prepare = Prepare(settings, transforms)
    image, ids, mask = prepare(samples[0])
    assert (image.shape, image.dtype) == ((3, 32, 32), torch.uint8)
    assert ids.shape == mask.shape == (TOKENS,)
    assert torch.equal(ids, prepare.text(samples[0]["txt"])[0])
    assert JpegImage(samples[0]["jpg"], "").size == (500, 375)
