"""Names of own images: what keys make of them, and names that are no text."""

from __future__ import annotations

from pathlib import Path

from made_shards import encoded, photo
from own_forms import Files, write

from data_tools.__main__ import main
from vlp.data.schema import Annotation
from vlp.data.shards.shard_index import ShardIndex

ALL_TRAIN = ["--split", "1", "0", "0"]


def imported(place: Path) -> dict[str, Annotation]:
    """The annotation of each key, all of them in train."""
    out = place.parent / "out"
    assert main(["import", str(place), "--out", str(out), "--processes", "1", *ALL_TRAIN]) == 0
    index = ShardIndex.open(out / "train")
    samples = [index.read(0, number) for number in range(index.shards.total)]
    return {sample.key: sample.annotation for sample in samples}


def test_signs_that_are_not_seen_are_replaced_in_keys(tmp_path: Path) -> None:
    """Joiners of emoji and of scripts, and a control character; equal keys get a number."""
    names = ["a\u200db", "a\u200cb", "c\x07d", "\U0001f469\u200d\U0001f373"]
    files: Files = {}
    for number, name in enumerate(names):
        files[f"{name}.jpg"] = encoded(photo(number))
        files[f"{name}.txt"] = f"picture {number}".encode()
    found = imported(write(tmp_path / "mine", files))
    assert {key: annotation.captions for key, annotation in found.items()} == {
        "a_b-2": ["picture 0"],
        "a_b-1": ["picture 1"],
        "c_d": ["picture 2"],
        "\U0001f469_\U0001f373": ["picture 3"],
    }
