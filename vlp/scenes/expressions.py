"""Referring expressions: phrases that fit exactly one object of a scene."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from vlp.data.stream.rng import make_rng
from vlp.scenes.captions import PLACE_WORDS, RELATION_WORDS
from vlp.scenes.graph import Meaning, ObjectPhrase, Scene, holds, main_relation, subjects


class ReferringExpression(NamedTuple):
    """A phrase, the index of its object, and its claim; the claim's first noun is the object."""

    text: str
    obj: int
    meaning: Meaning


def expressions(scene: Scene) -> list[ReferringExpression]:
    """Return up to three unambiguous phrases per object: by attributes, place and relation."""
    rng = make_rng(0, 0, scene.key, "expressions")
    phrases: list[ReferringExpression] = []
    for number in range(len(scene.objects)):
        for candidates in (_attributes, _places, _relations):
            unique = (c for c in candidates(scene, number, rng) if is_unique(c, scene))
            phrases.extend(islice(unique, 1))
    return phrases


def is_unique(expression: ReferringExpression, scene: Scene) -> bool:
    """Return whether the phrase fits its object strictly, and no other object even leniently."""
    # The lenient test comes first, as it rejects more phrases: vague words fit more objects.
    return subjects(expression.meaning, scene, lenient=True) == [expression.obj] and holds(
        expression.meaning, scene
    )


def noun_words(noun: ObjectPhrase) -> str:
    """Return a noun phrase without article and place: 'small red circle', 'circle'."""
    words = (noun.size, noun.colour, noun.shape or "object")
    return " ".join(word for word in words if word)


# The following are generators, as most candidates are never needed.


def _attributes(
    scene: Scene, number: int, rng: np.random.Generator
) -> Iterator[ReferringExpression]:
    obj = scene.objects[number]
    short = [obj.phrase("shape"), obj.phrase("colour"), obj.phrase("size")]
    pairs = (("shape", "colour"), ("shape", "size"), ("colour", "size"))
    long = [obj.phrase(*pair) for pair in pairs]
    for noun in _rotate(short, rng) + _rotate(long, rng):
        yield ReferringExpression(f"the {noun_words(noun)}", number, Meaning((noun,)))


def _places(scene: Scene, number: int, rng: np.random.Generator) -> Iterator[ReferringExpression]:
    obj = scene.objects[number]
    attributes = ((), ("shape",), ("colour",), ("shape", "colour"))
    nouns = [obj.phrase("place", *more) for more in attributes]
    words = PLACE_WORDS[obj.place][int(rng.integers(3))]
    for noun in _rotate(nouns, rng):
        yield ReferringExpression(f"the {noun_words(noun)} {words}", number, Meaning((noun,)))


def _relations(
    scene: Scene, number: int, rng: np.random.Generator
) -> Iterator[ReferringExpression]:
    for other in (int(index) for index in rng.permutation(len(scene.objects))):
        if other == number:
            continue
        relation = main_relation(scene, number, other)
        landmark = scene.objects[other].phrase("shape", "colour")
        words = RELATION_WORDS[relation][int(rng.integers(2))]
        obj = scene.objects[number]
        nouns = [obj.phrase("shape"), ObjectPhrase(), obj.phrase("colour")]
        for noun in _rotate(nouns, rng):
            text = f"the {noun_words(noun)} {words} the {noun_words(landmark)}"
            yield ReferringExpression(text, number, Meaning((noun, landmark), ((0, relation, 1),)))


def _rotate(nouns: list[ObjectPhrase], rng: np.random.Generator) -> list[ObjectPhrase]:
    start = int(rng.integers(len(nouns)))
    return nouns[start:] + nouns[:start]
