import numpy as np
import pytest
from boxes_by_hand import centre_distance

from vlp.scenes.captions import words_of
from vlp.scenes.negatives import SWAP_KINDS, sample_swap
from vlp.scenes.sample import held_out_pairs

BACK = {"left": "right", "right": "left", "above": "below", "over": "under"}
BACK |= {"below": "above", "under": "over"}


@pytest.mark.parametrize("kind", SWAP_KINDS)
@pytest.mark.parametrize("split", ["swaps", "unseen", "train"])
def test_pairs_differ_only_in_what_they_should(kind, split):
    for index in range(40):
        pair = sample_swap(0, index, kind, split)
        assert pair == sample_swap(0, index, kind, split)
        places = zip(pair.scene.objects, pair.twin.objects, strict=True)
        ours, theirs = words_of(pair.caption.text), words_of(pair.foil.text)
        assert ours != theirs
        if kind == "relation":
            ((word, after),) = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
            assert BACK[word] == after
        elif kind == "place":
            # One object alone has moved, and touches no other.
            assert sum(before.box != after.box for before, after in places) == 1
            assert pair.caption.meaning.nouns[0].place != pair.foil.meaning.nouns[0].place
        elif kind == "distance":
            # The second object of the caption has moved, and one word has changed.
            assert sum(a != b for a, b in zip(ours, theirs, strict=True)) == 1
            (obj,) = [before for before, after in places if before.box != after.box]
            assert (obj.colour, obj.shape) == pair.caption.meaning.nouns[1][1::-1]
        else:
            assert sorted(ours) == sorted(theirs)
        # The images hold the same colours, shapes and boxes.
        for field in ("colour", "shape", "size" if kind in ("place", "distance") else "box"):
            values = [
                sorted(getattr(obj, field) for obj in scene.objects)
                for scene in (pair.scene, pair.twin)
            ]
            assert values[0] == values[1]
        assert sorted(pair.scene.tints) == sorted(pair.twin.tints)
        assert len(pair.scene.objects) >= (1 if kind == "place" else 2)
        for scene in (pair.scene, pair.twin) if split == "train" else ():
            assert not held_out_pairs(scene, "swaps") + held_out_pairs(scene, "unseen")


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


def _true(caption, scene):
    """Look the named objects up in the scene and compare their centres, or edges."""
    boxes = []
    for noun in caption.meaning.nouns[:2]:
        fits = [
            obj for obj in scene.objects if (obj.colour, obj.shape) == (noun.colour, noun.shape)
        ]
        if not fits:
            return False
        boxes.append(fits[0].box)
    if not caption.meaning.relations:
        (x, y, width, height), side = boxes[0], scene.image_size
        column = ("left", "", "right")[int((x + width / 2) / side * 3)]
        row = ("top", "", "bottom")[int((y + height / 2) / side * 3)]
        return caption.meaning.nouns[0].place == (f"{row} {column}".strip() or "centre")
    ((subject, relation, reference),) = caption.meaning.relations
    if relation in ("near", "far"):
        # The least distance along either axis of any two points of the boxes, in 64ths.
        points = [[np.arange(box[a], box[a] + box[a + 2] + 1) for a in (0, 1)] for box in boxes]
        least = max(np.abs(a[:, None] - b).min() for a, b in zip(*points, strict=True))
        assert 10 < least <= 16 or least >= 24
        return (relation == "near") == bool(least <= 16)
    return centre_distance(boxes[subject], relation, boxes[reference]) > 0
