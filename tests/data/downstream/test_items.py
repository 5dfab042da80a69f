"""A flat list of the samples, questions or expressions of shard folders."""

import numpy as np
import pytest
from pair_shards import annotated_shards
from PIL import Image

from vlp.data.schema import Annotation, Question
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_reader import Items
from vlp.scenes.render import encode_png

IMAGE = encode_png(Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)))


def questions(annotation):
    return len(annotation.questions or ())


@pytest.fixture
def folders(tmp_path):
    """Samples with 2, 0, 1, 3 and 1 questions."""
    asked = iter("abcdefg")
    annotations = [
        Annotation(questions=[Question(id=next(asked), question="what?") for _ in range(count)])
        for count in (2, 0, 1, 3, 1)
    ]
    first = annotated_shards(tmp_path / "first", annotations[:4], IMAGE)
    return [first, annotated_shards(tmp_path / "second", annotations[4:], IMAGE)]


def test_every_part_is_one_item_in_order(folders):
    items = Items(folders, questions)
    read = [items.read(number) for number in range(len(items))]
    assert "".join(one.raw.annotation.questions[one.part].id for one in read) == "abcdefg"
    assert read[2].raw.key == "0002"
    assert read[2].where.endswith("shard-000000.tar, 0002")


def test_without_parts_every_sample_is_an_item(folders):
    items = Items(folders)
    assert [items.read(number).raw.key for number in range(len(items))] == [
        *("0000", "0001", "0002", "0003", "0000")
    ]
    assert len(Items(folders, limit=2)) == 2
    with pytest.raises(IndexError, match="2 items, none at 2"):
        Items(folders, limit=2).read(2)


def test_a_sample_that_cannot_be_read_is_one_bad_item(folders):
    tar = folders[0] / "shard-000000.tar"
    data = tar.read_bytes()
    place = data.index(b'{"version"')
    tar.write_bytes(data[:place] + b"[" + data[place + 1 :])
    items = Items(folders, questions)
    assert len(items) == 6
    with pytest.raises(BadSample, match="bad annotation"):
        items.read(0)
