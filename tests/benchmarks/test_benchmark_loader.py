import json

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.loader import (
    TOKENS,
    TRANSFORMS,
    SampleTransform,
    Settings,
    make_shards,
    samples_of,
    save_vocabulary,
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    make_shards(folder, 40, images=2, per_shard=20)
    return folder


@pytest.mark.parametrize("transforms", TRANSFORMS)
def test_peers_get_the_same_samples(shards, tmp_path, transforms):
    save_vocabulary(shards, tmp_path, TOKENS)
    samples = list(samples_of(shards))
    assert len(samples) == 40
    prepare = SampleTransform(Settings(shards, tmp_path, 32, 2, 0), transforms)
    image, ids, mask = prepare(samples[0])
    assert (image.shape, image.dtype) == ((3, 32, 32), torch.uint8)
    assert ids.shape == mask.shape == (TOKENS,)
    assert torch.equal(ids, prepare.text(samples[0]["txt"])[0])


@pytest.mark.parametrize("row", ["equal", "best"])
def test_beside_open_clip(shards, row, capsys):
    pytest.importorskip("open_clip_train", reason="open_clip_torch is not installed")
    arguments = ["--size", "64", "--batch", "8", "--rounds", "1", "--row", row]
    assert main(["loader", "--shards", str(shards), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = [json.loads(line) for line in lines if line.startswith("{")]
    ratio = [one["value"] for one in result if one["name"].endswith("/ratio")]
    assert len(ratio) == (2 if row == "equal" else 3)
    assert all(value > 0.3 for value in ratio)
