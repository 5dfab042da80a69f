"""Statements about towers of blocks, worded as people did for NLVR v1 (Suhr et al., ACL 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

import numpy as np

from vlp.data.scenes.nlvr_v1.box_words import (
    BLOCK,
    NONE,
    Told,
    block,
    boxes_with,
    colour,
    count,
    just_of,
    number,
    number_word,
    pick,
    quantified,
    two_colours,
    uniform_or_without,
)
from vlp.data.scenes.nlvr_v1.boxes import BOXES, TALLEST, Box
from vlp.data.scenes.nlvr_v1.three_valued import every, some

_WITH = ("with", "with", "that has", "which has", "that contains")
_ENDS = {"base": 0, "bottom": 0, "top": -1}


def _tower(rng: np.random.Generator, what: str, holds: Callable[[Box], bool | None]) -> Told:
    return boxes_with(rng, what, holds, "tower")


def _of_a_height(rng: np.random.Generator) -> Told:
    how_many = count(rng, TALLEST)
    return _tower(
        rng, f"{pick(rng, *_WITH)} {how_many.of(BLOCK)}", lambda box: how_many.holds(len(box))
    )


def _with_blocks(rng: np.random.Generator) -> Told:
    parts = [(count(rng, 3), block(rng))]
    if rng.random() < 0.25:
        parts.append((number(rng, 2), block(rng)))
    words = " and ".join(how_many.of(what) for how_many, what in parts)
    return _tower(
        rng,
        f"{pick(rng, *_WITH)} {words}",
        lambda box: every([how_many.holds(what.among(box)) for how_many, what in parts]),
    )


def _end_of_a_tower(rng: np.random.Generator) -> Told:
    tone, place = colour(rng), pick(rng, *_ENDS)
    what = block(rng, tone)

    def is_there(box: Box) -> bool:
        return what.fits(box[_ENDS[place]])

    form = pick(rng, "at", "at", "at", "base", "as", "as", "as", "of a height", "of a height")
    the = pick(rng, "the ", "the ", "the ", "")
    if form == "at":
        return _tower(rng, f"with a {what.one} at {the}{place}", is_there)
    if form == "base":
        return _tower(rng, f"with {pick(rng, 'a ', '')}{tone} {place}", is_there)
    how_many = count(rng, 2) if rng.random() < 0.4 else count(rng, 1)
    how_many = NONE if rng.random() < 0.07 else how_many
    text = f"{how_many.be} {how_many.of(what)} as {the}{place} of a tower"
    if form == "as":
        return text, lambda boxes: how_many.holds(sum(map(is_there, boxes)))
    height = count(rng, TALLEST)
    return f"{text} with {height.of(BLOCK)}", lambda boxes: quantified(
        how_many, [every([is_there(box), height.holds(len(box))]) for box in boxes]
    )


def _the_tower(rng: np.random.Generator) -> Told:
    """About the only tower of a height, or all towers."""
    height, tone, place = int(rng.integers(1, TALLEST + 1)), colour(rng), pick(rng, *_ENDS)
    what = block(rng, tone)
    inside = f"a {what.one} at the {place}"
    if rng.random() < 0.2:
        words = pick(rng, f"all the towers have {inside}", f"each tower has {inside}")
        return words, lambda boxes: all(what.fits(box[_ENDS[place]]) for box in boxes)

    def judge(boxes: Sequence[Box]) -> bool | None:
        of_it = [box for box in boxes if len(box) == height]
        return what.fits(of_it[0][_ENDS[place]]) if len(of_it) == 1 else None

    blocks = f"{number_word(rng, height)} block{'s' if height > 1 else ''}"
    text = pick(
        rng,
        f"the tower with {blocks} has {inside}",
        f"the {place} of the tower with {blocks} is {tone}",
    )
    return text, judge


def _height_and_ends(rng: np.random.Generator) -> Told:
    height = count(rng, TALLEST)
    low, high = colour(rng), colour(rng)
    first, second = block(rng, low), block(rng, high)
    if rng.random() < 0.33:
        words = pick(
            rng,
            f"with a {low} base and {high} top",
            f"with a {second.one} at the top and a {first.one} at the base",
        )
        return _tower(
            rng,
            words,
            lambda box: first.fits(box[0]) and second.fits(box[-1]) if len(box) > 1 else None,
        )
    place = pick(rng, *_ENDS)
    words = f"{pick(rng, *_WITH)} {height.of(BLOCK)} {pick(rng, 'with', 'having', 'and')}"
    return _tower(
        rng,
        f"{words} a {first.one} at the {place}",
        lambda box: every([height.holds(len(box)), first.fits(box[_ENDS[place]])]),
    )


def _over(rng: np.random.Generator) -> Told:
    upper, lower = block(rng), block(rng)
    word = pick(rng, "on", "on", "above", "over", "below")
    high, low = (lower, upper) if word == "below" else (upper, lower)
    words = f"{upper.one} {pick(rng, word, 'bellow') if word == 'below' else word} a {lower.one}"

    def times(box: Box) -> int | None:
        """So often one lies right above the other; None where it lies higher up."""
        touching = sum(high.fits(top) and low.fits(under) for under, top in pairwise(box))
        apart = any(
            high.fits(box[top]) and low.fits(box[under])
            for top in range(len(box))
            for under in range(top)
        )
        return touching or (None if apart else 0)

    def holds(box: Box) -> bool | None:
        found = times(box)
        return None if found is None else found > 0

    if rng.random() < 0.4:
        return _tower(rng, f"{pick(rng, 'with', 'having', 'which has')} a {words}", holds)
    how_many = NONE if rng.random() < 0.07 else count(rng, 1)

    def judge(boxes: Sequence[Box]) -> bool | None:
        found = [times(box) for box in boxes]
        return None if None in found else how_many.holds(sum(each or 0 for each in found))

    return f"{how_many.be} {how_many.words} {words}", judge


def _blocks_in_all(rng: np.random.Generator) -> Told:
    how_many, what = count(rng, 4), block(rng)
    if rng.random() < 0.25:
        text = pick(
            rng,
            f"{how_many.be} {how_many.of(what)} in each tower",
            f"each tower has {how_many.of(what)}",
        )
        return text, lambda boxes: every([how_many.holds(what.among(box)) for box in boxes])
    return (
        f"{how_many.be} {how_many.of(what)}",
        lambda boxes: how_many.holds(sum(what.among(box) for box in boxes)),
    )


def _colours_of_a_tower(rng: np.random.Generator) -> Told:
    form = pick(rng, "number", "only one", "only two", "named")
    first, second = two_colours(rng)
    if form == "number":
        wanted = int(rng.integers(1, 4))
        word = number_word(rng, wanted)
        phrases = {
            1: ("with only one color", "with blocks of the same color", "that has a single color"),
            2: (f"with blocks of {word} different colors", f"with only {word} colors"),
            3: (f"with blocks of {word} different colors", f"with {word} colors"),
        }[wanted]

        def holds(box: Box) -> bool | None:
            return None if len(box) == 1 else len({item.colour for item in box}) == wanted

        return _tower(rng, pick(rng, *phrases), holds)
    if form == "only two":
        return _tower(
            rng,
            f"with only {first} and {second} blocks",
            lambda box: just_of(box, {first, second}),
        )
    if form == "only one":
        return _tower(
            rng,
            f"with only {first} blocks",
            lambda box: just_of(box, {first}) and (len(box) > 1 or None),
        )
    how_many = int(rng.integers(1, BOXES))
    name = "tower" if how_many == 1 else "towers"
    words = pick(rng, "a", "exactly one", "only one") if how_many == 1 else "two"

    def judge(boxes: Sequence[Box]) -> bool | None:
        found = sum(just_of(box, {first}) is True for box in boxes)
        if words == "a":
            return found >= 1
        return None if words == "two" and found > 2 else found == how_many

    text = f"there {'is' if how_many == 1 else 'are'} {words} {first} {name}"
    if words != "a" or rng.random() < 0.4:
        return text, judge
    height = count(rng, TALLEST)
    return f"{text} with {height.of(BLOCK)}", lambda boxes: some(
        [every([just_of(box, {first}), height.holds(len(box))]) for box in boxes]
    )


def _stacked(rng: np.random.Generator) -> Told:
    tone, least = colour(rng), int(rng.integers(2, TALLEST))

    def holds(box: Box) -> bool | None:
        runs = [len([*run]) for name, run in groupby(item.colour for item in box) if name == tone]
        longest = max(runs, default=0)
        return None if longest > least else longest == least

    together = pick(rng, "stacked together", "attached with each other", "on top of each other")
    return _tower(rng, f"with {number_word(rng, least)} {tone} blocks {together}", holds)


def _storey(rng: np.random.Generator) -> Told:
    """About the second or third block, or the middle one."""
    at, tone = int(rng.integers(1, 3)), colour(rng)
    nth, what = ("second", "third")[at - 1], block(rng, tone)

    def holds(box: Box) -> bool:
        return len(box) > at and what.fits(box[at])

    form = pick(rng, "with", "of a tower", "middle")
    if form == "with":
        return _tower(rng, f"with a {tone} {nth} block", holds)
    if form == "of a tower":
        return f"the {nth} block from the base of a tower is {tone}", lambda boxes: some(
            [holds(box) for box in boxes]
        )
    return _tower(
        rng,
        f"with {pick(rng, 'three', '3')} blocks and a {what.one} in the middle",
        lambda box: len(box) == 3 and what.fits(box[1]),
    )


def _same_base(rng: np.random.Generator) -> Told:
    place = pick(rng, *_ENDS)
    how = pick(rng, "two", "exactly two", "only two", "at least two", "three")

    def judge(boxes: Sequence[Box]) -> bool | None:
        ends = [box[_ENDS[place]].colour for box in boxes]
        most = max(map(ends.count, ends))
        if how == "three":
            return most == len(boxes)
        if how == "two" and most > 2:
            return None
        return most >= 2 if how == "at least two" else most == 2

    return f"there are {how} towers {pick(rng, 'that have', 'with')} the same {place} color", judge


def _uniform_or_without(rng: np.random.Generator) -> Told:
    return uniform_or_without(rng, pick(rng, *_WITH), count(rng, 2), BLOCK, "tower")


OF_TOWERS = (
    *(_of_a_height,) * 3,
    *(_with_blocks,) * 3,
    *(_end_of_a_tower,) * 9,
    *(_the_tower,) * 2,
    *(_height_and_ends,) * 2,
    *(_over,) * 5,
    *(_blocks_in_all,) * 3,
    *(_colours_of_a_tower,) * 4,
    _stacked,
    _storey,
    _same_base,
    _uniform_or_without,
)
"""Makers of statements, as often as people said such things."""
