"""Batches of stored features: as without them, but for the pixels."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from made_shards import encoded, photo

from vlp.config import ConfigError, load_config
from vlp.data.features.store import FLIPPED, HEADER_NAME, StoredFeatures, TowerKey
from vlp.data.image.transforms import Preprocessing
from vlp.data.pretrain import PretrainData
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardIndex, ShardWriter
from vlp.data.stream.batch import Batch
from vlp.data.stream.rng import identity
from vlp.training.config import PretrainConfig


def data_of(config: Path, *overrides: str, seed: int = 0) -> PretrainData:
    settings = load_config(config, PretrainConfig, overrides)
    return PretrainData(settings.data, settings.inputs, settings.training.batch, seed)


@pytest.fixture
def shards(tmp_path):
    """Captions with and without a side, two images that cannot be read, and one without text."""
    with ShardWriter(tmp_path / "shards", 7) as writer:
        for number in range(33):
            image = os.urandom(99) if number == 3 else encoded(photo(number))
            image = image[: len(image) // 2] if number == 20 else image  # its header is good
            side = ["a dog left", "the right cat", "a cat"][number % 3]
            captions = [] if number == 11 else [f"{side} number {number}"]
            writer.write(f"k{number}", image, "jpg", Annotation(captions=captions))
    return tmp_path / "shards"


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_pixels_differ(shards, configuration, make_features, tmp_path, workers):
    config = configuration(shards, captions="all", workers=workers)
    out = make_features(config, tmp_path / "out", "--views", 3)
    plain, cached = data_of(config), data_of(config, f"data.features={out}")
    stored = StoredFeatures(out).require(Preprocessing(16), cached.sources)[0]
    seen, skipped = set(), []
    for (one, consumed), (other, also) in zip(plain.batches(stop_after=9), cached.batches()):
        assert consumed == also
        for name, left, right in zip(Batch._fields, one, other):
            if isinstance(left, torch.Tensor) and name != "pixels":
                assert torch.equal(left, right), name
        places = [
            [(skip.kind, skip.where.split(" (")[0]) for skip in batch.skipped]
            for batch in (one, other)
        ]
        assert places[0] == places[1]
        skipped += places[1]
        assert other.pixels.dtype == torch.float16
        assert other.pixels.shape == (8, 17, 16)
        assert not other.pixels[~other.valid].any()
        there = other.to("cpu")
        assert torch.equal(there.pixels, other.pixels.float())
        assert torch.equal(there.to("cpu").pixels, there.pixels)
        for row, number in zip(other.pixels[other.valid], other.sample_ids[other.valid].tolist()):
            seen.add((number, row.numpy().tobytes()))
    assert {kind for kind, _ in skipped} == {"unreadable image", "no text"}
    assert len({where for _, where in skipped}) == 3
    known = {
        stored.read(shard, sample, view).numpy().tobytes()
        for shard, entry in enumerate(cached.sources[0].shards)
        for sample in range(entry.samples)
        for view in range(3)
    }
    assert {row for _, row in seen} <= known
    assert len({number for number, _ in seen}) < len(seen)  # several views of an image came


def test_a_resumed_run_sees_the_same(shards, configuration, make_features, tmp_path):
    config = configuration(shards)
    out = make_features(config, tmp_path / "out", "--views", 4)
    data = data_of(config, f"data.features={out}")
    run = list(data.batches(stop_after=8))
    again = data_of(config, f"data.features={out}").batches(run[2][1], stop_after=5)
    for (batch, consumed), (other, also) in zip(run[3:], again, strict=True):
        assert consumed == also
        assert torch.equal(batch.pixels, other.pixels)
    halves = [list(data.batches(rank=rank, world_size=2, stop_after=4)) for rank in (0, 1)]
    for number, (batch, _) in enumerate(run[:4]):
        both = torch.cat([half[number][0].pixels for half in halves])
        assert torch.equal(both, batch.pixels)


def test_captions_with_a_side_meet_no_flipped_view(shards, configuration, make_features, tmp_path):
    config = configuration(shards)
    out = make_features(config, tmp_path / "out", "--views", 6)
    data = data_of(config, f"data.features={out}")
    [stored] = data.captioned.features
    codes = {}
    for shard, entry in enumerate(data.sources[0].shards):
        rows = np.load(out / "0" / entry.name.replace(".tar", ".views.npy"))
        for sample in range(entry.samples):
            for view in range(6):
                row = stored.read(shard, sample, view).numpy().tobytes()
                codes.setdefault(row, set()).add(int(rows[sample, view]))
    flipped = {True: 0, False: 0}
    places = ((f"shard-{number // 7:06d}.tar", f"k{number}") for number in range(33))
    numbers = [identity("place", 0, *place) for place in places]
    for batch, _ in data.batches(stop_after=40):
        for row, image in zip(batch.pixels[batch.valid], batch.image_ids[batch.valid].tolist()):
            has_side = numbers.index(image) % 3 != 2
            flipped[has_side] += codes[row.numpy().tobytes()] == {FLIPPED}
    assert flipped[True] == 0
    assert flipped[False] > 10


def test_images_that_are_not_augmented_have_their_plain_view(
    shards, configuration, make_features, tmp_path
):
    """As held-out losses ask for; the folder's other views were augmented."""
    config = configuration(shards, captions="all")
    out = make_features(config, tmp_path / "out", "--views", 3)
    augment = "data.augment={randaugment: false, crop_scale: [1, 1], hflip: false}"
    stored = StoredFeatures(out).require(Preprocessing(16), data_of(config).sources)[0]
    batch = next(data_of(config, f"data.features={out}", augment).batches())[0]
    plain = torch.stack([stored.read(shard, n, 0) for shard, n in places_of(stored)])
    found = batch.pixels[batch.valid]
    assert len(found)
    assert all((row == plain).flatten(1).all(1).any() for row in found)
    assert stored.views(0, 0, True, "") == [0]


def places_of(stored):
    return [(shard, n) for shard, (_, count) in enumerate(stored._shards) for n in range(count)]


def test_a_folder_that_does_not_fit_is_named(shards, configuration, make_features, tmp_path):
    config = configuration(shards)
    out = make_features(config, tmp_path / "out", "--views", 2)

    def refused(*overrides: str) -> str:
        with pytest.raises(ConfigError) as error:
            data_of(config, f"data.features={out}", *overrides)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "image_size is 16 there, 20 here" in refused("model.image.image_size=20")
    assert "augment.hflip is True there, False here" in refused("data.augment.hflip=false")
    other = tmp_path / "other"
    with ShardWriter(other, 4) as writer:
        writer.write("k", encoded(photo(0)), "jpg", Annotation(captions=["a dog"]))
    assert "holds no features of" in refused(f"data.sources=[{{path: {other}}}]")
    features = StoredFeatures(out)
    with pytest.raises(ConfigError, match=r"weights is '\w+' there, 'f+' here"):
        features.require_tower(TowerKey(features.header.tower, 64 * "f"))
    with pytest.raises(ConfigError, match=r"tower\.layers is 1 there, 2 here"):
        features.require_tower(TowerKey(features.header.tower | {"layers": 2}, "f"))


def test_features_that_are_missing_or_damaged_are_named(
    shards, configuration, make_features, tmp_path
):
    config = configuration(shards)
    out = make_features(config, tmp_path / "out")
    file = out / "0" / "shard-000001.npy"
    content = file.read_bytes()
    for damage in (lambda: file.unlink(), lambda: file.write_bytes(content[:-2])):
        damage()
        with pytest.raises(ConfigError, match=r"shard-000001\.npy: missing .* 1 of 5 files"):
            data_of(config, f"data.features={out}")
    file.write_bytes(content)
    header = out / HEADER_NAME
    good = json.loads(header.read_text())
    for text, said in (
        ("{", "Invalid JSON"),
        (json.dumps(good | {"weights": "x"}), "weights: String should match"),
        (json.dumps({k: v for k, v in good.items() if k != "views"}), "views: Field required"),
        (json.dumps(good | {"version": 2}), "version: Input should be 1"),
    ):
        header.write_text(text)
        with pytest.raises(ConfigError, match=said) as error:
            data_of(config, f"data.features={out}")
        assert "\n" not in str(error.value)
    header.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        data_of(config, f"data.features={out}")


def test_sources_may_be_fewer_and_in_another_order(
    make_shards, configuration, make_features, tmp_path
):
    first, second = make_shards("first"), make_shards("second", count=9)
    config = configuration(first, second)
    out = make_features(config, tmp_path / "out")
    features = StoredFeatures(out)
    here = [ShardIndex.open(folder) for folder in (second, first)]
    found = features.require(Preprocessing(16), here)
    assert [source.number for source in found] == [1, 0]
    assert [source.number for source in features.require(Preprocessing(16), here[:1])] == [1]
