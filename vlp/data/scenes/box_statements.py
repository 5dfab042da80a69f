"""Statements about three boxes, true or false, worded as people did for NLVR v1.

The statement and its label are drawn first, then boxes until there are some of which it is true and
some of which it is false: the words alone say nothing. A picture on which a statement can be read
two ways ("there are two black items", of three) is drawn again.
"""

from __future__ import annotations

from typing import NamedTuple

from vlp.data.draws import draw
from vlp.data.scenes.box_sentences import OF_ITEMS
from vlp.data.scenes.boxes import Boxes, sample_boxes
from vlp.data.scenes.splits import Split
from vlp.data.scenes.tower_sentences import OF_TOWERS

_ATTEMPTS = 100


class BoxStatement(NamedTuple):
    """A sentence about three boxes, and whether it is true of them."""

    key: str
    text: str
    label: bool
    scene: Boxes


def sample_box_statement(seed: int, index: int, split: Split = "train") -> BoxStatement:
    """Draw statement `index` of a split."""
    key = f"boxes-{split}-{seed}-{index}"
    rng = draw(seed, 0, key, "boxes")
    label = bool(rng.random() < 0.5)
    while True:
        towers = bool(rng.random() < 0.5)
        makers = OF_TOWERS if towers else OF_ITEMS
        text, judge = makers[int(rng.integers(len(makers)))](rng)
        stop = "." if rng.random() < 0.4 else ""
        scenes: dict[bool | None, Boxes] = {}
        for _ in range(_ATTEMPTS):
            scene = sample_boxes(rng, towers)
            scenes.setdefault(judge(scene.boxes), scene)
            # What is true or false of hardly any boxes is never said, whichever the label: else
            # its words would tell it.
            if True in scenes and False in scenes:
                return BoxStatement(key, text + stop, label, scenes[label])
