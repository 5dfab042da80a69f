import numpy as np
import pytest
from made_shards import cut, encoded, jpeg, write, write_tar
from PIL import Image

from data_tools import peek
from data_tools.__main__ import main
from data_tools.peek import sample_card
from vlp.data.schema import Annotation, Expression
from vlp.data.shards.shard_reader import ShardIndex, ShardWriter

RED = (214, 39, 40)
"""The colour of the first frame."""
WIDTH = 240
"""Pixels of a card."""


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "shards", {f"k{number}": jpeg(number) for number in range(10)})


def sheet(folder, *options):
    out = folder.parent / "made" / "sheet.png"
    assert main(["peek", str(folder), "--out", str(out), *options]) == 0
    return Image.open(out).convert("RGB")


def test_first_and_random(folder, capsys):
    index = ShardIndex.open(folder).shards
    assert peek.choose_samples(index, 5, None) == [*((0, n) for n in range(4)), (1, 0)]
    drawn = {tuple(peek.choose_samples(index, 5, seed)) for seed in range(8)}
    assert len(drawn) > 4
    assert all(len(set(each)) == 5 for each in drawn)
    assert peek.choose_samples(index, 5, 3) == peek.choose_samples(index, 5, 3)
    everything = peek.choose_samples(index, 99, 0)
    assert everything == peek.choose_samples(index, 99, None)
    assert len(everything) == 10

    assert sheet(folder, "--count", "7", "--first").width // WIDTH == 6
    assert "7 of 10 samples\n" in capsys.readouterr().out
    assert sheet(folder, "--count", "2").width // WIDTH == 2


def test_damaged_samples_are_grey_cards(folder, tmp_path):
    files = [
        ("cut.jpg", jpeg(1)[:-200]),
        ("cut.txt", b"a caption"),
        ("alone.txt", b"no image"),
        ("bad.jpg", jpeg(2)),
        ("bad.json", b"{"),
        ("good.jpg", jpeg(3)),
        ("late.jpg", jpeg(4)),
    ]
    broken = tmp_path / "broken"
    write_tar(broken / "0.tar", files)
    assert main(["index", str(broken)]) == 0
    cut(broken / "0.tar")
    shards = ShardIndex.open(broken)
    cards = [sample_card(shards, 0, number) for number in range(5)]
    problems = ["unreadable image", "missing image", "bad annotation", "", "corrupt shard"]
    assert [card.problem for card in cards] == problems
    assert [card.image is None for card in cards] == [True, True, True, False, True]
    assert cards[0].title == "cut"
    assert "truncated" in cards[0].texts[0]
    assert cards[0].texts[1] == "a caption"
    sheet(broken)

    (folder / "shard-000001.tar").unlink()
    sheet(folder, "--first")


def test_boxes_lie_where_they_should(tmp_path):
    grey = encoded(Image.new("RGB", (200, 100), "grey"), "png")
    known = Annotation(expressions=[Expression(id="1", text="a box", box=[100, 25, 80, 50])])
    with ShardWriter(tmp_path / "shards") as writer:
        writer.write("a", grey, "png", known)
    plain = np.asarray(sheet(tmp_path / "shards"))
    assert not (plain == RED).all(-1).any()
    framed = np.asarray(sheet(tmp_path / "shards", "--boxes"))
    # The image is enlarged by 1.2; the text in the frame's colour stands below it.
    rows, columns = np.nonzero((framed[:120] == RED).all(-1))
    assert (columns.min(), columns.max()) == pytest.approx((120, 216), abs=2)
    assert (rows.min(), rows.max()) == pytest.approx((30, 90), abs=2)
    assert (abs(framed[120:].astype(int) - RED).max(-1) < 60).any()
