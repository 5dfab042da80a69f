"""Statements about three boxes, true or false, worded as people did for NLVR v1.

As there, a picture of which a statement is false holds the items of one of which it is true, dealt
to the boxes and placed anew: neither the words nor what there is says anything, only how it is
arranged. A picture on which a statement can be read two ways ("there are two black items", of
three) is drawn again.
"""

from __future__ import annotations

from typing import NamedTuple

from vlp.data.draws import draw
from vlp.data.scenes.box_sentences import OF_ITEMS
from vlp.data.scenes.boxes import Boxes, rearrange_boxes, sample_boxes
from vlp.data.scenes.splits import Split
from vlp.data.scenes.tower_sentences import OF_TOWERS

_PICTURES, _ARRANGEMENTS = 40, 8


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
        for _ in range(_PICTURES):
            scene = sample_boxes(rng, towers)
            if not judge(scene.boxes):
                continue
            for _ in range(_ARRANGEMENTS):
                other = rearrange_boxes(rng, scene)
                if judge(other.boxes) is False:
                    return BoxStatement(key, text + stop, label, scene if label else other)
