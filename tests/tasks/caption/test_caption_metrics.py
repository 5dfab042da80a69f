"""Caption scores against published ones, and by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from vlp.tasks.caption import metrics as captions
from vlp.tasks.caption import metrics as spice
from vlp.tasks.caption.metrics import PARSER, caption_scores, spice_scores


def plain(candidates, references):
    return caption_scores(candidates, references, tokenizer="plain", meteor=False)


@pytest.mark.nightly
def test_published_scores_of_coco_captions(shared: Path) -> None:
    folder = shared / "data/caption_metrics/coco_val2014_973"
    said: dict[int, list[str]] = {}
    for row in json.loads((folder / "captions_val2014_973.json").read_text())["annotations"]:
        said.setdefault(row["image_id"], []).append(row["caption"])
    rows = json.loads((folder / "captions_val2014_973_results.json").read_text())
    published = json.loads((folder / "published_scores.json").read_text())["scores"]
    scores = caption_scores(
        [row["caption"] for row in rows], [said[row["image_id"]] for row in rows]
    ).corpus
    names = {"rouge_l": "ROUGE_L", "cider": "CIDEr", "meteor": "METEOR"}
    names |= {f"bleu{n}": f"Bleu_{n}" for n in range(1, 5)}
    assert set(scores) == set(names)
    for ours, theirs in names.items():
        assert scores[ours] == pytest.approx(published[theirs], abs=5.1e-4), ours


@pytest.mark.nightly
def test_printed_example_of_nlg_eval(shared: Path) -> None:
    folder = shared / "data/caption_metrics/nlg_eval_example"
    lines = [
        (folder / name).read_text().splitlines() for name in ("hyp.txt", "ref1.txt", "ref2.txt")
    ]
    published = json.loads((folder / "published_scores.json").read_text())["scores"]
    # It splits at blanks, where COCO drops punctuation; METEOR tokenises by itself.
    found = {n: [one] for n, one in enumerate(lines[0])}
    wanted = {n: list(both) for n, both in enumerate(zip(*lines[1:]))}
    kept = captions._tokenised
    captions._tokenised = lambda given, _: found if len(given[0]) == 1 else wanted
    try:
        scores = caption_scores(lines[0], list(zip(*lines[1:])))
    finally:
        captions._tokenised = kept
    assert scores.corpus["bleu1"] == pytest.approx(published["Bleu_1"], abs=1e-6)
    assert scores.corpus["bleu4"] == pytest.approx(published["Bleu_4"], abs=1e-6)
    assert scores.corpus["rouge_l"] == pytest.approx(published["ROUGE_L"], abs=1e-6)
    assert scores.corpus["cider"] == pytest.approx(published["CIDEr"], abs=1e-6)
    assert scores.corpus["meteor"] == pytest.approx(published["METEOR"], abs=1e-6)


def test_figures_by_hand() -> None:
    scores = plain(["delete the second row", "go home"], [["Delete the first row!"], ["go home"]])
    # 5 of 6 words; of word pairs "delete the" and "go home" of 4. Lengths agree: no penalty.
    assert scores.corpus["bleu1"] == pytest.approx(5 / 6, abs=1e-6)
    assert scores.corpus["bleu2"] == pytest.approx(math.sqrt(5 / 6 * 2 / 4), abs=1e-6)
    assert scores.each["rouge_l"] == pytest.approx([0.75, 1.0])
    assert scores.corpus["rouge_l"] == pytest.approx(0.875)
    assert scores.corpus["cider"] == pytest.approx(scores.each["cider"].mean())
    assert "meteor" not in scores.corpus


def test_right_captions_are_the_best() -> None:
    said = [["open the home tab", "go to home"], ["delete it"], ["play the song"]]
    right = plain([one[0] for one in said], said)
    assert right.corpus["bleu1"] == pytest.approx(1)
    for name, value in plain([said[n - 1][0] for n in range(3)], said).corpus.items():
        assert value < right.corpus[name]


def test_empty_captions_score_nothing_and_shift_nobody() -> None:
    scores = caption_scores(["", "a ||| dog", ""], [["...", "x y"], ["a ||| dog"], ["a cat"]])
    assert scores.each["rouge_l"].tolist() == [0, 1, 0]
    assert scores.each["meteor"].tolist() == [0, 1, 0]
    assert set(plain(["", ""], [["a dog"], ["b"]]).corpus.values()) == {0.0}


@pytest.mark.parametrize(
    ("candidates", "references", "message"),
    [
        ([], [], "0 captions"),
        (["a"], [["a"], ["b"]], "1 captions against references of 2"),
        (["a", "b"], [["a"], []], "caption 1 \\('b'\\) has no reference"),
        (["a"], [[" "]], "caption 0"),
        (["a"], [["..."]], "no reference has a word"),
    ],
)
def test_refusals(candidates, references, message) -> None:
    with pytest.raises(ValueError, match=message):
        plain(candidates, references)


@pytest.fixture
def scorer(monkeypatch, tmp_path):
    """The package's module once its parser has been fetched, with a scorer of shared words.

    The real one runs a parser that is no part of the package.
    """

    class Module:
        __file__ = str(tmp_path / "spice.py")

        class Spice:
            def compute_score(self, wanted, found):
                shares = {}
                for number, (said,) in found.items():
                    words, known = set(said.split()), set(" ".join(wanted[number]).split())
                    shares[number] = len(words & known) / len(words) if words else float("nan")
                each = [{"All": {"f": shares[number]}} for number in sorted(shares)]
                return float(np.mean(list(shares.values()))), each

    monkeypatch.setattr(spice, "_module", lambda name: Module)
    monkeypatch.setattr(spice, "require_caption_tools", lambda: None)
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in PARSER:
        (folder / name).touch()
    return folder


def test_scores_stand_in_the_order_of_the_captions(scorer) -> None:
    said = [f"a {n}" for n in range(11)] + [""]
    found = spice_scores(said, [["a 0", "one\n 1"]] * 12)
    assert found.tolist() == [1.0, 1.0, *[0.5] * 9, 0.0]
