"""True or false statements about two images, like NLVR2's.

Three of four are about positions, and their images contain the objects they are about.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from vlp.data.stream.rng import make_rng
from vlp.scenes.captions import PLACE_WORDS, RELATION_WORDS, article
from vlp.scenes.expressions import noun_words
from vlp.scenes.graph import (
    COLOURS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Meaning,
    ObjectPhrase,
    Scene,
    holds,
    referents,
    truth,
)
from vlp.scenes.nlvr_v1 import every
from vlp.scenes.sample import Split, sample_scene

Rule = Callable[[Scene, Scene], bool | None]

_MAX_ATTEMPTS = 5000
_IMAGES = 1 << 15  # of a split: too many to memorise, few enough for a cache
_CONTENT_SHARE = 0.25  # of statements whose truth shuffled patches do not change
_SIDES = ("left", "right")


class Statement(NamedTuple):
    """A sentence about a left and a right image, and whether it is true."""

    key: str
    text: str
    label: bool
    left: Scene
    right: Scene


def sample_statement(
    seed: int, index: int, split: Split = "train", image_size: int = 64
) -> Statement:
    """Draw statement `index`; its images are scenes of the split."""
    key = f"statement-{split}-{seed}-{index}"
    rng = make_rng(seed, 0, key, "statement")
    makers = _ABOUT_CONTENT if rng.random() < _CONTENT_SHARE else _ABOUT_POSITIONS
    text, rule = makers[int(rng.integers(len(makers)))](rng)
    # The label is drawn before the images, so that the text alone predicts 50 % of labels.
    label = bool(rng.random() < 0.5)
    for _ in range(_MAX_ATTEMPTS):
        left, right = (
            _image(seed, int(number), split, image_size) for number in rng.integers(_IMAGES, size=2)
        )
        if rule(left, right) is label:
            return Statement(key, text, label, left, right)
    raise RuntimeError(f"no two scenes of split {split!r} make {text!r} {label}")


@cache
def _image(seed: int, number: int, split: Split, image_size: int) -> Scene:
    return sample_scene(seed, number, split, image_size)


def _compare_counts(rng: np.random.Generator) -> tuple[str, Rule]:
    compare: Callable[[int, int], bool]
    if rng.random() < 1 / 3:
        text, compare = "both pictures show the same number of objects", operator.eq
    elif rng.random() < 0.5:
        text, compare = "the left picture shows more objects than the right one", operator.gt
    else:
        text, compare = "the left picture shows fewer objects than the right one", operator.lt
    return text, lambda left, right: compare(len(left.objects), len(right.objects))


def _both(rng: np.random.Generator) -> tuple[str, Rule]:
    noun, words = _coarse_noun(rng)
    return (
        f"both pictures show {words}",
        lambda left, right: bool(referents(noun, left) and referents(noun, right)),
    )


def _in_single_image(rng: np.random.Generator) -> tuple[str, Rule]:
    noun, words = _coarse_noun(rng)
    return (
        f"exactly one of the pictures shows {words}",
        lambda left, right: bool(referents(noun, left)) != bool(referents(noun, right)),
    )


def _total_count(rng: np.random.Generator) -> tuple[str, Rule]:
    number = int(rng.integers(3, 6))
    word = ("three", "four", "five")[number - 3]
    return (
        f"there are {word} objects in all",
        lambda left, right: len(left.objects) + len(right.objects) == number,
    )


def _all_of_one_size(rng: np.random.Generator) -> tuple[str, Rule]:
    size = SIZES[int(rng.integers(len(SIZES)))]
    return (
        f"all objects in both pictures are {size}",
        lambda left, right: all(obj.size == size for obj in left.objects + right.objects),
    )


def _relation(rng: np.random.Generator) -> tuple[str, Rule]:
    # Two different colours: splits hold out relations of shapes, and two objects of one colour
    # nearly always make the statement true.
    first, second = (
        ObjectPhrase(colour=COLOURS[number])
        for number in rng.choice(len(COLOURS), size=2, replace=False)
    )
    relation = RELATIONS[int(rng.integers(4))]
    words = RELATION_WORDS[relation][int(rng.integers(2))]
    side = int(rng.integers(2))
    return (
        f"in the {_SIDES[side]} picture {_with_article(first)} is {words} {_with_article(second)}",
        lambda left, right: _truth_if(
            Meaning((first, second)),
            Meaning((first, second), ((0, relation, 1),)),
            (left, right)[side],
        ),
    )


def _place(rng: np.random.Generator) -> tuple[str, Rule]:
    noun = ObjectPhrase(colour=COLOURS[int(rng.integers(len(COLOURS)))])
    place, words = _some_place(rng)
    side = int(rng.integers(2))
    return (
        f"in the {_SIDES[side]} picture {_with_article(noun)} is {words}",
        lambda left, right: _truth_if(
            Meaning((noun,)), Meaning((noun._replace(place=place),)), (left, right)[side]
        ),
    )


def _place_in_both(rng: np.random.Generator) -> tuple[str, Rule]:
    place, words = _some_place(rng)
    meaning = Meaning((ObjectPhrase(place=place),))
    return (
        f"both pictures show an object {words}",
        lambda left, right: every([truth(meaning, left), truth(meaning, right)]),
    )


def _place_in_single_image(rng: np.random.Generator) -> tuple[str, Rule]:
    place, words = _some_place(rng)
    meaning = Meaning((ObjectPhrase(place=place),))

    def rule(left: Scene, right: Scene) -> bool | None:
        truths = truth(meaning, left), truth(meaning, right)
        return None if None in truths else truths[0] is not truths[1]

    return f"exactly one of the pictures shows an object {words}", rule


def _truth_if(premise: Meaning, claim: Meaning, scene: Scene) -> bool | None:
    """Return the truth of `claim` for a scene if `premise` is true of it, else None."""
    return truth(claim, scene) if holds(premise, scene) else None


def _some_place(rng: np.random.Generator) -> tuple[str, str]:
    place = PLACES[int(rng.integers(len(PLACES)))]
    return place, PLACE_WORDS[place][int(rng.integers(3))]


def _with_article(noun: ObjectPhrase) -> str:
    words = noun_words(noun)
    return f"{article(words)} {words}"


def _coarse_noun(rng: np.random.Generator) -> tuple[ObjectPhrase, str]:
    if rng.random() < 0.5:
        shape = SHAPES[int(rng.integers(len(SHAPES)))]
        return ObjectPhrase(shape=shape), f"a {shape}"
    colour = COLOURS[int(rng.integers(len(COLOURS)))]
    return ObjectPhrase(colour=colour), f"something {colour}"


_ABOUT_CONTENT = (_compare_counts, _both, _in_single_image, _total_count, _all_of_one_size)
_ABOUT_POSITIONS = (_relation, _place, _place_in_both, _place_in_single_image)
