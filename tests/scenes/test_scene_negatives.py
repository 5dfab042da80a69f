from __future__ import annotations

import numpy as np
import pytest

from vlp.scenes.captions import words_of
from vlp.scenes.negatives import SWAP_KINDS, sample_swap
from vlp.scenes.sample import held_out_pairs

BACK = {"left": "right", "right": "left", "above": "below", "over": "under"}
BACK |= {"below": "above", "under": "over"}


def _bag(caption) -> list[str]:
    return sorted(words_of(caption.text))


@pytest.mark.parametrize("kind", SWAP_KINDS)
@pytest.mark.parametrize("split", ["swaps", "unseen", "train"])
def test_pairs_differ_only_in_what_they_should(kind, split):
    for index in range(40):
        pair = sample_swap(0, index, kind, split)
        assert pair == sample_swap(0, index, kind, split)
        assert pair.caption.text != pair.foil.text
        if kind == "relation":
            ours, theirs = words_of(pair.caption.text), words_of(pair.foil.text)
            differing = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
            assert len(differing) == 1
            assert BACK[differing[0][0]] == differing[0][1]
        elif kind == "place":
            # One object alone has moved, and touches no other.
            places = zip(pair.scene.objects, pair.twin.objects, strict=True)
            assert sum(one.box != other.box for one, other in places) == 1
            assert pair.caption.meaning.nouns[0].place != pair.foil.meaning.nouns[0].place
        elif kind == "distance":
            # The second object of the caption has moved, and one word has changed.
            ours, theirs = words_of(pair.caption.text), words_of(pair.foil.text)
            assert sum(a != b for a, b in zip(ours, theirs, strict=True)) == 1
            moved = [
                one
                for one, other in zip(pair.scene.objects, pair.twin.objects, strict=True)
                if one.box != other.box
            ]
            named = pair.caption.meaning.nouns[1]
            assert [(obj.colour, obj.shape) for obj in moved] == [(named.colour, named.shape)]
        else:
            assert _bag(pair.caption) == _bag(pair.foil)
        # The images hold the same colours, shapes and boxes.
        for field in ("colour", "shape", "size" if kind in ("place", "distance") else "box"):
            values = [
                sorted(getattr(obj, field) for obj in scene.objects)
                for scene in (pair.scene, pair.twin)
            ]
            assert values[0] == values[1]
        assert sorted(pair.scene.tints) == sorted(pair.twin.tints)


@pytest.mark.parametrize("kind", SWAP_KINDS)
def test_pairs_for_training_hold_nothing_that_is_held_out(kind):
    for index in range(60):
        pair = sample_swap(0, index, kind, "train")
        assert len(pair.scene.objects) >= (1 if kind == "place" else 2)
        for scene in (pair.scene, pair.twin):
            assert not held_out_pairs(scene, "swaps")
            assert not held_out_pairs(scene, "unseen")


@pytest.mark.parametrize("kind", SWAP_KINDS)
def test_each_caption_is_true_of_one_image_only(kind):
    for index in range(40):
        pair = sample_swap(1, index, kind)
        truths = [
            _true(caption, scene)
            for scene in (pair.scene, pair.twin)
            for caption in (pair.caption, pair.foil)
        ]
        assert truths == [True, False, False, True]


def _true(caption, scene) -> bool:
    """Look the named objects up in the scene and compare their centres, or edges."""
    named = []
    for noun in caption.meaning.nouns[:2]:
        fits = [
            obj for obj in scene.objects if (obj.colour, obj.shape) == (noun.colour, noun.shape)
        ]
        if not fits:
            return False
        named.append(fits[0].box)
    if not caption.meaning.relations:
        (x, y, width, height), side = named[0], scene.image_size
        column = ("left", "", "right")[int((x + width / 2) / side * 3)]
        row = ("top", "", "bottom")[int((y + height / 2) / side * 3)]
        return caption.meaning.nouns[0].place == (f"{row} {column}".strip() or "centre")
    ((subject, relation, reference),) = caption.meaning.relations
    one, other = named[subject], named[reference]
    if relation in ("near", "far"):
        # The least distance along either axis of any two points of the boxes, in 64ths.
        points = [[np.arange(box[a], box[a] + box[a + 2] + 1) for a in (0, 1)] for box in named]
        least = max(np.abs(a[:, None] - b).min() for a, b in zip(*points, strict=True))
        assert 10 < least <= 16 or least >= 24
        return (relation == "near") == bool(least <= 16)
    right = other[0] + other[2] / 2 - one[0] - one[2] / 2
    down = other[1] + other[3] / 2 - one[1] - one[3] / 2
    return {"left": right, "right": -right, "above": down, "below": -down}[relation] > 0
