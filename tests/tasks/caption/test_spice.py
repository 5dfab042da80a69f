"""SPICE where its parser is there, and what is said where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from vlp.tasks.caption import metrics as spice
from vlp.tasks.caption.metrics import PARSER, spice_scores


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
