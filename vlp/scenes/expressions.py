"""Referring expressions: phrases that mean exactly one object of the scene, with its box."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vlp.data.stream.rng import make_rng
from vlp.scenes.captions import PLACE_WORDS, RELATION_WORDS
from vlp.scenes.graph import Meaning, ObjectPhrase, Scene, holds, main_relation, subjects


class ReferringExpression(NamedTuple):
    """A phrase, its object, and its claim; the claim's first noun is the object."""

    text: str
    obj: int
    meaning: Meaning


def expressions(scene: Scene) -> list[ReferringExpression]:
    """Return up to three unambiguous phrases per object: by looks, by place and by relation."""
    rng = make_rng(0, 0, scene.key, "expressions")
    phrases: list[ReferringExpression] = []
    for number in range(len(scene.objects)):
        for candidates in (_looks, _places, _relations):
            phrase = next(
                (
                    candidate
                    for candidate in candidates(scene, number, rng)
                    if is_unique(candidate, scene)
                ),
                None,
            )
            if phrase is not None:
                phrases.append(phrase)
    return phrases


def is_unique(expression: ReferringExpression, scene: Scene) -> bool:
    """Return whether the phrase means its object for sure, and no other one even leniently."""
    # Lenient first: it excludes more, and what holds strictly is part of what holds leniently.
    return subjects(expression.meaning, scene, lenient=True) == [expression.obj] and holds(
        expression.meaning, scene
    )


def noun_words(noun: ObjectPhrase) -> str:
    """Return a noun as words without article and place, such as 'small red circle' or 'circle'."""
    words = (noun.size, noun.colour, noun.shape or "object")
    return " ".join(word for word in words if word)


# The makers yield candidates one by one, most of which are never asked for.


def _looks(scene: Scene, number: int, rng: np.random.Generator) -> Iterator[ReferringExpression]:
    obj = scene.objects[number]
    short = [obj.phrase("shape"), obj.phrase("colour"), obj.phrase("size")]
    pairs = (("shape", "colour"), ("shape", "size"), ("colour", "size"))
    long = [obj.phrase(*pair) for pair in pairs]
    for noun in _rotated(short, rng) + _rotated(long, rng):
        yield ReferringExpression(f"the {noun_words(noun)}", number, Meaning((noun,)))


def _places(scene: Scene, number: int, rng: np.random.Generator) -> Iterator[ReferringExpression]:
    obj = scene.objects[number]
    attributes = ((), ("shape",), ("colour",), ("shape", "colour"))
    nouns = [obj.phrase("place", *more) for more in attributes]
    words = PLACE_WORDS[obj.place][int(rng.integers(3))]
    for noun in _rotated(nouns, rng):
        yield ReferringExpression(f"the {noun_words(noun)} {words}", number, Meaning((noun,)))


def _relations(
    scene: Scene, number: int, rng: np.random.Generator
) -> Iterator[ReferringExpression]:
    for other in (int(index) for index in rng.permutation(len(scene.objects))):
        if other == number:
            continue
        relation = main_relation(scene, number, other)
        mark = scene.objects[other].phrase("shape", "colour")
        words = RELATION_WORDS[relation][int(rng.integers(2))]
        obj = scene.objects[number]
        nouns = [obj.phrase("shape"), ObjectPhrase(), obj.phrase("colour")]
        for noun in _rotated(nouns, rng):
            text = f"the {noun_words(noun)} {words} the {noun_words(mark)}"
            yield ReferringExpression(text, number, Meaning((noun, mark), ((0, relation, 1),)))


def _rotated(nouns: list[ObjectPhrase], rng: np.random.Generator) -> list[ObjectPhrase]:
    start = int(rng.integers(len(nouns)))
    return nouns[start:] + nouns[:start]
