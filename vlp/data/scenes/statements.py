"""Statements about two pictures, true or false (the form of NLVR2).

The statement is drawn first, its label by a coin, and only then pictures until the label is right:
whatever a model reads in the words alone, it is right half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vlp.data.draws import draw
from vlp.data.scenes.captions import RELATION_WORDS
from vlp.data.scenes.claims import Claim, Noun, referents, truth
from vlp.data.scenes.graph import COLOURS, RELATIONS, SHAPES, SIZES, Scene
from vlp.data.scenes.sample import sample_scene
from vlp.data.scenes.splits import Split

Judge = Callable[[Scene, Scene], bool | None]

_MAX_ATTEMPTS = 5000


class Statement(NamedTuple):
    """A sentence about a left and a right picture, and whether it is true of them."""

    key: str
    text: str
    label: bool
    left: Scene
    right: Scene


def sample_statement(
    seed: int, index: int, split: Split = "train", image_size: int = 64
) -> Statement:
    """Draw statement `index`; its pictures are scenes of the split."""
    key = f"statement-{split}-{seed}-{index}"
    rng = draw(seed, 0, key, "statement")
    makers = (_more, _both, _exactly_one, _in_all, _relation, _sizes)
    text, judge = makers[int(rng.integers(len(makers)))](rng)
    label = bool(rng.random() < 0.5)
    for _ in range(_MAX_ATTEMPTS):
        left, right = (
            sample_scene(seed, int(number), split, image_size)
            for number in rng.integers(1 << 40, size=2)
        )
        if judge(left, right) is label:
            return Statement(key, text, label, left, right)
    raise RuntimeError(f"no two scenes of split {split!r} make {text!r} {label}")


def _more(rng: np.random.Generator) -> tuple[str, Judge]:
    if rng.random() < 1 / 3:
        return (
            "both pictures show the same number of objects",
            lambda left, right: len(left.objects) == len(right.objects),
        )
    if rng.random() < 0.5:
        return (
            "the left picture shows more objects than the right one",
            lambda left, right: len(left.objects) > len(right.objects),
        )
    return (
        "the left picture shows fewer objects than the right one",
        lambda left, right: len(left.objects) < len(right.objects),
    )


def _both(rng: np.random.Generator) -> tuple[str, Judge]:
    noun, words = _coarse_noun(rng)
    return (
        f"both pictures show {words}",
        lambda left, right: bool(referents(noun, left) and referents(noun, right)),
    )


def _exactly_one(rng: np.random.Generator) -> tuple[str, Judge]:
    noun, words = _coarse_noun(rng)
    return (
        f"exactly one of the pictures shows {words}",
        lambda left, right: bool(referents(noun, left)) != bool(referents(noun, right)),
    )


def _in_all(rng: np.random.Generator) -> tuple[str, Judge]:
    number = int(rng.integers(3, 6))
    word = ("three", "four", "five")[number - 3]
    return (
        f"there are {word} objects in all",
        lambda left, right: len(left.objects) + len(right.objects) == number,
    )


def _relation(rng: np.random.Generator) -> tuple[str, Judge]:
    # Colours only: a relation between shapes may be one that the split never shows.
    first, second = (COLOURS[number] for number in rng.integers(len(COLOURS), size=2))
    relation = RELATIONS[int(rng.integers(4))]
    claim = Claim((Noun(colour=first), Noun(colour=second)), ((0, relation, 1),))
    words = RELATION_WORDS[relation][int(rng.integers(2))]
    side = int(rng.integers(2))
    text = f"in the {('left', 'right')[side]} picture something {first} is {words} something"
    return f"{text} {second}", lambda left, right: truth(claim, (left, right)[side])


def _sizes(rng: np.random.Generator) -> tuple[str, Judge]:
    size = SIZES[int(rng.integers(2))]
    return (
        f"all objects in both pictures are {size}",
        lambda left, right: all(obj.size == size for obj in left.objects + right.objects),
    )


def _coarse_noun(rng: np.random.Generator) -> tuple[Noun, str]:
    if rng.random() < 0.5:
        shape = SHAPES[int(rng.integers(len(SHAPES)))]
        return Noun(shape=shape), f"a {shape}"
    colour = COLOURS[int(rng.integers(len(COLOURS)))]
    return Noun(colour=colour), f"something {colour}"
