"""What tells data from other data, and a place to go on where both differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vlp.data.config import DataConfig
from vlp.data.pretrain import PretrainData
from vlp.data.shards.shard_reader import index_folder
from vlp.data.stream.batch import Inputs


@pytest.fixture
def data(vocabulary: Path) -> Callable[..., PretrainData]:
    def open_(*folders: Path, vocabulary: Path = vocabulary, **options: object) -> PretrainData:
        config = DataConfig.model_validate(
            {
                "sources": [{"path": str(folder)} for folder in folders],
                "vocabulary": str(vocabulary),
                "canonical_streams": 4,
                "workers": 0,
                **options,
            }
        )
        return PretrainData(config, Inputs(16, (4, 4), 10, 90), 8, 0)

    return open_


def changed(first: PretrainData, second: PretrainData) -> set[str]:
    return set(dict(first.fingerprint.items() ^ second.fingerprint.items()))


def test_every_part_is_told_wherever_it_lies(make_shards, data, vocabulary, tmp_path) -> None:
    one, two = make_shards(count=21, per_shard=5), make_shards("two", count=12, per_shard=4)
    before = data(one, two)
    assert set(before.fingerprint) == {"source 0", "source 1", "vocabulary"}
    moved = shutil.copytree(two, tmp_path / "moved")
    assert not changed(before, data(one, moved))

    last = sorted(moved.glob("*.tar"))[-1]
    last.unlink()
    index_folder(moved)
    assert changed(before, data(one, moved)) == {"source 1"}

    other = shutil.copytree(vocabulary, tmp_path / "vocabulary")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    pieces = tokenizer["model"]["vocab"]
    words = [word for word in pieces if word.isalpha()][:2]
    pieces[words[0]], pieces[words[1]] = pieces[words[1]], pieces[words[0]]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert changed(before, data(one, two, vocabulary=other)) == {"vocabulary"}


def test_listed_tars_are_told_by_their_names(make_shards, data, tmp_path) -> None:
    folder = make_shards(count=12, per_shard=4)
    more = {"epoch_samples": 24}
    before = data(folder, **more)
    assert not changed(before, data(shutil.copytree(folder, tmp_path / "moved"), **more))
    sorted(folder.glob("*.tar"))[0].unlink()
    assert changed(before, data(folder, **more)) == {"source 0"}
