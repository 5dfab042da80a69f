from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlp.scenes.captions import MAX_WORDS, captions, fill, words_of
from vlp.scenes.graph import COLOURS, SHAPES, Meaning, ObjectPhrase, Scene, holds
from vlp.scenes.sample import sample_scene

NOUN = rf"(?:(small|little|large|big) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
MEANING = {"little": "small", "big": "large", "upper": "top", "lower": "bottom"}


def _read(text: str, scene: Scene) -> None:
    """Read a caption back word by word and hold each of its parts against the boxes."""
    nouns = list(re.finditer(NOUN, text))
    found = []
    for noun in nouns:
        size, colour, shape = noun.groups()
        size = MEANING.get(size, size)
        fits = [obj for obj in scene.objects if (obj.colour, obj.shape) == (colour, shape)]
        assert len(fits) == 1
        assert size in (None, fits[0].size)
        found.append(fits[0])
    assert len(found) == len(scene.objects), "every object is mentioned"
    pair = re.search(
        rf"{NOUN},? (?:is )?(?:to the )?(left of|right of|above|over|below|under) a", text
    )
    if pair:
        first = next(o for o in scene.objects if (o.colour, o.shape) == pair.group(2, 3))
        second = found[[noun.start() for noun in nouns].index(pair.start()) + 1]
        right = second.box[0] + second.box[2] / 2 - first.box[0] - first.box[2] / 2
        down = second.box[1] + second.box[3] / 2 - first.box[1] - first.box[3] / 2
        distance = {"left of": right, "right of": -right, "above": down, "over": down}
        assert distance.get(pair.group(4), -down) >= 8
    corner = re.search(rf"{NOUN} (?:in|at) the (top|upper|bottom|lower) (left|right)\b", text)
    if corner:
        obj = next(o for o in scene.objects if (o.colour, o.shape) == corner.group(2, 3))
        row = MEANING.get(corner.group(4), corner.group(4))
        assert obj.place == f"{row} {corner.group(5)}"


@given(st.integers(0, 10**6))
def test_captions_are_true_short_and_mention_everything(index):
    scene = sample_scene(0, index)
    written = captions(scene)
    assert len({caption.text for caption in written}) == len(written) == 5
    for caption in written:
        assert holds(caption.meaning, scene)
        assert len(words_of(caption.text)) <= MAX_WORDS
        assert caption.text == caption.text.lower()
        _read(caption.text, scene)


def test_captions_are_fixed_by_the_scene_and_do_not_depend_on_the_image_size():
    for index in range(30):
        small, large = sample_scene(0, index), sample_scene(0, index, image_size=224)
        assert captions(small) == captions(small) == captions(large)
        assert captions(small, 2) == captions(small)[:2]
    with pytest.raises(ValueError, match="at least 1"):
        captions(sample_scene(0, 0), 0)


def test_claims_carry_what_the_pattern_says(make_scene):
    scene = make_scene("small red circle top", "large blue cross bottom right")
    caption = fill(scene, "N0 P0 , R01 N1", (1, 0), (True, False), [0] * 16)
    assert caption.text == "a blue cross at the bottom right, below a small red circle"
    assert caption.meaning == Meaning(
        (
            ObjectPhrase("cross", "blue", None, "bottom right"),
            ObjectPhrase("circle", "red", "small", None),
        ),
        ((0, "below", 1),),
    )
    back = fill(scene, "N0 with N1 B10", (0, 1), (False, False), [0] * 16)
    assert back.text == "a red circle with a blue cross below it"
    assert back.meaning.relations == ((1, "below", 0),)
    only = fill(make_scene("small red circle top"), "only N0 P0", (0,), (True,), [0] * 16)
    assert only.meaning.alone
