"""Statements about three boxes, true or false, worded as people did for NLVR v1.

As there, an image of which a statement is false holds the items of one of which it is true, dealt
to the boxes and placed anew: neither the words nor what there is says anything, only how it is
arranged. An image on which a statement can be read two ways ("there are two black items", of
three) is not shown with it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from vlp.data.scenes.nlvr_v1.boxes import ThreeBoxes, rearrange_boxes, sample_boxes
from vlp.data.scenes.nlvr_v1.sentences import OF_ITEMS, OF_TOWERS
from vlp.data.scenes.splits import Split
from vlp.data.stream.rng import make_rng

_HOARDS, _ARRANGEMENTS = 1 << 13, 8  # few enough to keep what was drawn
_ATTEMPTS = 40


class BoxStatement(NamedTuple):
    """A sentence about three boxes, and whether it is true of them."""

    key: str
    text: str
    label: bool
    scene: ThreeBoxes


def sample_box_statement(
    seed: int, index: int, split: Split = "train", same_items: bool = True
) -> BoxStatement:
    """Draw statement `index` of a split.

    Args:
        seed: seed of the corpus.
        index: number of the statement within its split.
        split: statements of two splits share no image but by chance.
        same_items: whether false images hold a true one's items. Without it what there is says
            much: easier to start from.
    """
    key = f"boxes-{split}-{seed}-{index}" if same_items else f"boxes-{split}-{seed}-{index}-any"
    rng = make_rng(seed, 0, key, "boxes")
    label = bool(rng.random() < 0.5)
    while True:
        towers = bool(rng.random() < 0.5)
        makers = OF_TOWERS if towers else OF_ITEMS
        text, holds = makers[int(rng.integers(len(makers)))](rng)
        stop = "." if rng.random() < 0.4 else ""
        for _ in range(_ATTEMPTS):
            hoard = int(rng.integers(_HOARDS))
            numbers = rng.permutation(_ARRANGEMENTS)[: None if same_items else 1].tolist()
            scenes = [_arrangement(seed, split, towers, hoard, number) for number in numbers]
            found = {holds(scene.boxes): scene for scene in scenes}
            if label in found and (not same_items or (not label) in found):
                return BoxStatement(key, text + stop, label, found[label])


@cache
def _arrangement(seed: int, split: Split, towers: bool, hoard: int, number: int) -> ThreeBoxes:
    """The same items as every other number of this hoard has."""
    rng = make_rng(seed, 0, f"boxes-{split}-{seed}-{towers}-{hoard}", f"arrangement {number}")
    if number == 0:
        return sample_boxes(rng, towers)
    return rearrange_boxes(rng, _arrangement(seed, split, towers, hoard, 0))
