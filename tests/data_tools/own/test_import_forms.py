"""Every form that own data comes in, to shards, through the data set of pretraining."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_forms
import pytest
from own_forms import COUNT, FORMS, TEN, captions_of, images

from data_tools.__main__ import main
from data_tools.own.content import SPLITS
from vlp.data.config import AugmentConfig, DataConfig, SourceConfig
from vlp.data.pretrain.loader import PretrainData
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.stream.batch import Inputs, PatchMasking
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece

INPUTS = Inputs(16, (4, 4), 10, 64, word_masking=0.15, patch_masking=PatchMasking(0.5, 2))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [text for name in images() for text in captions_of(name)]
    folder = tmp_path_factory.mktemp("vocabulary")
    TextProcessor(train_wordpiece(texts, 64), 10).save(folder)
    return folder


def stored(out: Path) -> dict[bytes, tuple[str, Annotation]]:
    """The split and annotation of each image in the shards, by the image's bytes."""
    found = {}
    for split in SPLITS:
        if not (out / split / "index.npz").exists():
            continue
        index = ShardIndex.open(out / split)
        for shard, entry in enumerate(index.shards):
            for number in range(entry.samples):
                sample = index.read(shard, number)
                assert sample.image not in found
                found[sample.image] = (split, sample.annotation)
    return found


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_to_shards_and_batches(
    form: Callable[[Path], list[str]],
    tmp_path: Path,
    vocabulary: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    out = tmp_path / "shards" / "mine"
    options = ["--name", "my photos", "--license", "CC0", "--processes", "1"]
    assert main(["import", *form(tmp_path), "--out", str(out), *options]) == 0
    printed = capsys.readouterr().out

    found = stored(out)
    assert {data: annotation.captions for data, (_, annotation) in found.items()} == {
        data: captions_of(name) for name, data in images().items()
    }
    assert {annotation.source for _, annotation in found.values()} == {"my photos"}
    assert len({annotation.image_id for _, annotation in found.values()}) == COUNT
    for split in SPLITS:
        if (out / split).exists():
            manifest = json.loads((out / split / "manifest.json").read_text())
            assert manifest["title"] == f"my photos, {split}"
            assert manifest["licence"] == "CC0"
            assert manifest["failures"] == {}
    assert f"{COUNT} images, {sum(len(captions_of(name)) for name in images())} captions" in printed
    assert printed.count("48 x 32: ") == 3
    assert "vlp train --config" in printed.splitlines()[-2]

    train = [data for data, (split, _) in found.items() if split == "train"]
    settings: dict[str, Any] = {
        "sources": (SourceConfig(path=str(out / "train")),),
        "vocabulary": str(vocabulary),
        "canonical_streams": 1,
        "workers": 0,
        "augment": AugmentConfig(randaugment=False, crop_scale=(1.0, 1.0), hflip=False),
    }
    data = PretrainData(DataConfig(**settings), INPUTS, 4, 0)
    batches = [batch for batch, _ in data.batches(stop_after=len(train) // 4)]
    assert len(batches) == len(train) // 4 > 1
    assert all(batch.valid.all() and not batch.skipped for batch in batches)


@pytest.mark.parametrize("form", TEN, ids=lambda form: form.__name__)
def test_300_images_of_a_form_are_split_and_none_is_lost(
    form: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_forms, "COUNT", 300)
    out = tmp_path / "shards"
    assert main(["import", *form(tmp_path), "--out", str(out), "--processes", "1"]) == 0
    found = stored(out)
    assert {data: annotation.captions for data, (_, annotation) in found.items()} == {
        data: captions_of(name) for name, data in images().items()
    }
    counts = [
        sum(split == side for side, _ in found.values()) for split in ("train", "val", "test")
    ]
    assert sum(counts) == 300
    assert counts[0] > 240
    assert min(counts[1:]) > 5
