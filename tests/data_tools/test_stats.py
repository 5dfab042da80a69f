import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_shards import cut, encoded, jpeg, photo, run, write, write_tar

from data_tools.stats import Tally, describe, round_to_2_digits
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece

CAPTIONS = {
    "a": ["A dog runs.", "The dog's ball, a red one"],
    "b": ["a cat"],
    "c": [],
    "d": ["a dog"],
}


@pytest.fixture
def folder(tmp_path):
    with ShardWriter(tmp_path / "shards", 2) as writer:
        for number, (key, captions) in enumerate(CAPTIONS.items()):
            known = Annotation(captions=captions, source=f"s{number % 2}", image_id="1")
            size = (100, 50) if number else (60, 90)
            kind = "png" if key == "b" else "jpeg"
            image = encoded(photo(number, size), kind)
            second = jpeg(7) if key == "d" else None
            writer.write(key, image, "jpg", known, second)
    return tmp_path / "shards"


def stats(*arguments):
    assert run("stats", *arguments) == 0
    out = Path(str(arguments[arguments.index("--out") + 1]))
    return json.loads(out.read_text())


def test_counts(folder, tmp_path, capsys):
    found = stats(folder, "--out", tmp_path / "stats.json", "--max-tokens", 3)
    assert (found["shards"], found["samples"], found["captions"], found["images"]) == (2, 4, 4, 5)
    assert found["samples without caption"] == 1
    assert found["captions that are too long"] == 1
    assert found["limit"] == "3 words"
    assert found["formats"] == {"JPEG": 4, "PNG": 1}
    assert found["sources"] == {"s0": 2, "s1": 2}
    assert found["bad samples"] == {}
    words = {"a", "dog", "runs", "the", "dog's", "ball", "red", "one", "cat"}
    assert found["vocabulary size"] == len(words)
    assert found["repeated"] == {"keys": 0, "named images": 2, "images": 2}
    quantities = found["quantities"]
    assert quantities["words per caption"]["histogram"] == [[2, 2], [3, 1], [6, 1]]
    assert quantities["captions per sample"]["histogram"] == [[0, 1], [1, 2], [2, 1]]
    assert quantities["width"]["histogram"] == [[60, 1], [96, 1], [100, 3]]
    assert quantities["shorter side"]["max"] == 72
    assert quantities["aspect ratio"]["min"] == round_to_2_digits(60 / 90)
    assert "tokens per caption" not in quantities
    printed = capsys.readouterr().out
    for line in ("4 samples in 2 shards", "without caption: 1 (25.0%)", "different words: 9"):
        assert line in printed


def test_tokens_of_a_vocabulary(folder, tmp_path):
    text = TextProcessor(train_wordpiece(["a dog runs", "a cat"] * 9, 40), 4)
    text.save(tmp_path / "words")
    options = ("--vocabulary", tmp_path / "words", "--max-tokens", 5)
    found = stats(folder, "--out", tmp_path / "stats.json", *options)
    long = TextProcessor(text.tokenizer, 200)
    lengths = [len(long.pieces(each)) for captions in CAPTIONS.values() for each in captions]
    histogram = found["quantities"]["tokens per caption"]["histogram"]
    assert histogram == [[length, lengths.count(length)] for length in sorted(set(lengths))]
    assert found["limit"] == "5 tokens"
    assert found["captions that are too long"] == sum(length > 5 for length in lengths)


def test_damage_and_repetitions_are_counted(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write_tar(
        first / "0.tar",
        [
            ("a.jpg", jpeg(1)),
            ("b.jpg", b"no image"),
            ("b.txt", b"a caption"),
            ("c.txt", b"alone"),
            ("d.jpg", jpeg(2)),
            ("d.json", b"["),
        ],
    )
    write_tar(first / "1.tar", [("a.jpg", jpeg(3)), ("a.txt", b"x")])
    write(second, {"a": jpeg(4), "z": jpeg(5)})
    cut(second / "shard-000000.tar")
    found = stats(first, second, "--out", tmp_path / "new" / "stats.json")
    kinds = ("unreadable image", "missing image", "bad annotation", "corrupt shard")
    assert found["bad samples"] == dict.fromkeys(kinds, 1)
    assert found["repeated"]["keys"] == 1  # within a folder
    assert found["sources"] == {"(none)": 4, "second": 1}  # the JSON of z is cut off


def test_histograms_are_described():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 50, 1001)
    found = describe(Counter(values.tolist()))
    assert found["mean"] == pytest.approx(values.mean())
    assert (found["min"], found["max"], found["count"]) == (values.min(), values.max(), 1001)
    for share, value in found["percentiles"].items():
        assert value == np.percentile(values, float(share), method="inverted_cdf")
    tally, other = Tally(), Tally()
    for count in (1, 1000):  # then the sum of rare sources is not among the frequent ones
        other.sources = Counter({f"{count}-{number}": count for number in range(1001)})
        tally.add(other)
    assert tally.sources.total() == 1001 * 1001
