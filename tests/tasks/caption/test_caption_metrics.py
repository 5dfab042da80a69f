"""Caption scores against published ones, and by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from vlp.tasks.caption import metrics as spice
from vlp.tasks.caption.metrics import PARSER, caption_scores, spice_scores


def plain(candidates, references):
    return caption_scores(candidates, references, tokenizer="plain", meteor=False)


@pytest.mark.nightly
def test_published_scores_of_coco_captions(shared):
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


def test_figures_by_hand():
    scores = plain(["delete the second row", "go home"], [["Delete the first row!"], ["go home"]])
    # 5 of 6 words; of word pairs "delete the" and "go home" of 4. Lengths agree: no penalty.
    assert scores.corpus["bleu1"] == pytest.approx(5 / 6, abs=1e-6)
    assert scores.corpus["bleu2"] == pytest.approx(math.sqrt(5 / 6 * 2 / 4), abs=1e-6)
    assert scores.each["rouge_l"] == pytest.approx([0.75, 1.0])
    assert scores.corpus["rouge_l"] == pytest.approx(0.875)
    assert scores.corpus["cider"] == pytest.approx(scores.each["cider"].mean())
    assert "meteor" not in scores.corpus


def test_empty_captions_score_nothing_and_shift_nobody():
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
def test_refusals(candidates, references, message):
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


def test_scores_stand_in_the_order_of_the_captions(scorer):
    said = [f"a {n}" for n in range(11)] + [""]
    found = spice_scores(said, [["a 0", "one\n 1"]] * 12)
    assert found.tolist() == [1.0, 1.0, *[0.5] * 9, 0.0]


@pytest.mark.nightly
def test_scores_are_the_same_in_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a user's language, and where the package may not be written to."""
    said = ["a red circle", "I sit in a blue square"], [["a red circle left"], ["blue square"]]
    wanted = caption_scores(*said).corpus
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=tr -Duser.country=TR")
    access = spice.os.access
    monkeypatch.setattr(
        spice.os, "access", lambda path, mode, **how: mode != 2 and access(path, mode, **how)
    )
    assert caption_scores(*said).corpus == wanted
