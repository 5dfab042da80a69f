"""Statements about three boxes, true or false, worded as people did for NLVR v1.

The statement and its label are drawn first, then boxes until there are some of which it is true and
some of which it is false: the words alone say nothing. A picture on which a statement can be read
two ways ("there are two black items", of three) is drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from vlp.data.draws import draw
from vlp.data.scenes.boxes import BOXES, COLOURS, SHAPES, TALLEST, Box, Boxes, Item, sample_boxes
from vlp.data.scenes.splits import Split

Judge = Callable[[Sequence[Box]], bool | None]
"""Whether a statement is true of some boxes; None where it can be read either way."""

Test = Callable[[Item], bool]
Value = TypeVar("Value")

_ATTEMPTS = 100
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven")


class BoxStatement(NamedTuple):
    """A sentence about three boxes, and whether it is true of them."""

    key: str
    text: str
    label: bool
    scene: Boxes


class Count(NamedTuple):
    """A quantity in words, what it says of a number, and whether its noun is in the plural."""

    words: str
    holds: Callable[[int], bool | None]
    plural: bool


class Noun(NamedTuple):
    """Words for one item or block, and for several; what it fits."""

    one: str
    several: str
    fits: Test

    def among(self, items: Sequence[Item]) -> int:
        """How many it fits."""
        return sum(map(self.fits, items))


_BLOCKS = Noun("block", "blocks", lambda item: True)


def sample_box_statement(seed: int, index: int, split: Split = "train") -> BoxStatement:
    """Draw statement `index` of a split."""
    key = f"boxes-{split}-{seed}-{index}"
    rng = draw(seed, 0, key, "boxes")
    label = bool(rng.random() < 0.5)
    while True:
        towers = bool(rng.random() < 0.5)
        makers = _OF_TOWERS if towers else _OF_ITEMS
        text, judge = makers[int(rng.integers(len(makers)))](rng)
        scenes: dict[bool | None, Boxes] = {}
        for _ in range(_ATTEMPTS):
            scene = sample_boxes(rng, towers)
            scenes.setdefault(judge(scene.boxes), scene)
            # What is true or false of hardly any boxes is never said, whichever the label: else
            # its words would tell it.
            if True in scenes and False in scenes:
                return BoxStatement(key, text, label, scenes[label])


def _pick(rng: np.random.Generator, values: Sequence[Value]) -> Value:
    return values[int(rng.integers(len(values)))]


def _count(rng: np.random.Generator, most: int) -> Count:
    number = int(rng.integers(1, most + 1))
    word = _pick(rng, (_NUMBERS[number], str(number)))
    how = _pick(rng, ("", "exactly", "only", "at least", "at most"))
    if number == 1 and how == "" and rng.random() < 0.5:
        return Count("a", lambda n: n >= 1, False)
    judges: dict[str, Callable[[int], bool | None]] = {
        # People mean both "just so many" and "so many and perhaps more".
        "": lambda n: None if n > number else n == number,
        "exactly": lambda n: n == number,
        "only": lambda n: n == number,
        "at least": lambda n: n >= number,
        "at most": lambda n: None if n == 0 else n <= number,
    }
    return Count(f"{how} {word}".strip(), judges[how], number > 1)


def _noun(rng: np.random.Generator) -> Noun:
    """An item by colour, by shape, by both, or any."""
    colour = _pick(rng, tuple(COLOURS)) if rng.random() < 0.75 else ""
    shape = _pick(rng, SHAPES) if rng.random() < 0.55 else ""
    word = shape or _pick(rng, ("item", "object"))

    def fits(item: Item) -> bool:
        return colour in ("", item.colour) and shape in ("", item.shape)

    one = f"{colour} {word}".strip()
    return Noun(one, f"{one}s", fits)


def _block(rng: np.random.Generator, colour: str | None = None) -> Noun:
    chosen = colour or _pick(rng, tuple(COLOURS))
    one = f"{chosen} block"
    return Noun(one, f"{one}s", lambda item: item.colour == chosen)


def _counted(count: Count, noun: Noun) -> str:
    return f"{count.words} {noun.several if count.plural else noun.one}"


def _be(count: Count) -> str:
    return "there are" if count.plural else "there is"


def _all(boxes: Sequence[Box]) -> list[Item]:
    return [item for box in boxes for item in box]


def _in_all(noun: Noun, rng: np.random.Generator) -> tuple[str, Judge]:
    count = _count(rng, 4)
    return (
        f"{_be(count)} {_counted(count, noun)}",
        lambda boxes: count.holds(noun.among(_all(boxes))),
    )


def _boxes_with(
    rng: np.random.Generator, what: str, holds: Callable[[Box], bool | None], name: str = "box"
) -> tuple[str, Judge]:
    """So many boxes, or towers, of which something holds."""
    count = _count(rng, 2) if rng.random() < 0.4 else Count("a", lambda n: n >= 1, False)
    several = f"{name}es" if name == "box" else f"{name}s"
    words = f"{count.words} {several if count.plural else name}"

    def judge(boxes: Sequence[Box]) -> bool | None:
        found = [holds(box) for box in boxes]
        sure = sum(value is True for value in found)
        readings = {count.holds(sure + more) for more in range(1 + found.count(None))}
        return readings.pop() if len(readings) == 1 else None

    return f"{_be(count)} {words} {what}", judge


def _items_in_all(rng: np.random.Generator) -> tuple[str, Judge]:
    return _in_all(_noun(rng), rng)


def _box_with_items(rng: np.random.Generator) -> tuple[str, Judge]:
    parts = [(_count(rng, 4), _noun(rng))]
    if rng.random() < 0.35:
        parts.append((_count(rng, 3), _noun(rng)))
    what = "with " + " and ".join(_counted(*part) for part in parts)

    def holds(box: Box) -> bool | None:
        return _and([count.holds(noun.among(box)) for count, noun in parts])

    return _boxes_with(rng, what, holds)


def _and(values: Sequence[bool | None]) -> bool | None:
    if False in values:
        return False
    return None if None in values else True


def _touching(rng: np.random.Generator) -> tuple[str, Judge]:
    noun, count = _noun(rng), _count(rng, 3)
    if rng.random() < 0.25:
        count = Count("no", lambda n: n == 0, False)
    wall = _pick(rng, ("left", "right", "top", "bottom", "", "", "", ""))
    near = _pick(rng, ("touching", "closely touching"))
    if wall:
        what = f"{near} {_pick(rng, ('', 'the '))}{wall} wall of a box"
    elif rng.random() < 0.2:
        what = f"{near} a corner of a box"
    else:
        what = f"{near} the {_pick(rng, ('edge', 'wall'))}"

    def touches(item: Item) -> bool:
        if "corner" in what:
            return len(item.walls) > 1
        return wall in item.walls if wall else bool(item.walls)

    return (
        f"{_be(count)} {_counted(count, noun)} {what}",
        lambda boxes: count.holds(sum(noun.fits(i) and touches(i) for i in _all(boxes))),
    )


def _each_box(rng: np.random.Generator) -> tuple[str, Judge]:
    noun, count = _noun(rng), _count(rng, 2)
    verb = _pick(rng, ("has", "contains"))
    return (
        f"each {_pick(rng, ('box', 'grey box'))} {verb} {_counted(count, noun)}",
        lambda boxes: _and([count.holds(noun.among(box)) for box in boxes]),
    )


def _colours_of_a_box(rng: np.random.Generator) -> tuple[str, Judge]:
    number = int(rng.integers(1, 4))
    what = {
        1: ("with items of the same color", "with objects of only one color"),
        2: ("with items of two different colors", "with items of exactly two colors"),
        3: ("with items of three different colors", "with all 3 different colors"),
    }[number]

    def holds(box: Box) -> bool | None:
        if len(box) == 1 and number == 1:
            return None  # one item is no "items"
        return len({item.colour for item in box}) == number

    return _boxes_with(rng, _pick(rng, what), holds)


def _tower_of(rng: np.random.Generator) -> tuple[str, Judge]:
    count = _count(rng, TALLEST)
    return _boxes_with(
        rng, f"with {_counted(count, _BLOCKS)}", lambda box: count.holds(len(box)), "tower"
    )


def _tower_with(rng: np.random.Generator) -> tuple[str, Judge]:
    count, noun = _count(rng, 3), _block(rng)
    verb = _pick(rng, ("with", "that contains"))
    return _boxes_with(
        rng, f"{verb} {_counted(count, noun)}", lambda box: count.holds(noun.among(box)), "tower"
    )


def _end_of_a_tower(rng: np.random.Generator) -> tuple[str, Judge]:
    noun, place = _block(rng), _pick(rng, ("base", "bottom", "top"))

    def is_there(box: Box) -> bool:
        return noun.fits(box[-1 if place == "top" else 0])

    if rng.random() < 0.5:
        return _boxes_with(rng, f"with a {noun.one} at the {place}", is_there, "tower")
    height = _count(rng, TALLEST)
    tall = f"a tower with {_counted(height, _BLOCKS)}"
    return (
        f"there is a {noun.one} as the {place} of {tall}",
        lambda boxes: _or([_and([is_there(box), height.holds(len(box))]) for box in boxes]),
    )


def _or(values: Sequence[bool | None]) -> bool | None:
    if True in values:
        return True
    return None if None in values else False


def _over(rng: np.random.Generator) -> tuple[str, Judge]:
    upper, lower = _block(rng), _block(rng)
    words = f"with a {upper.one} {_pick(rng, ('above', 'over'))} a {lower.one}"

    def holds(box: Box) -> bool | None:
        if any(upper.fits(high) and lower.fits(low) for low, high in pairwise(box)):
            return True
        apart = any(
            upper.fits(box[high]) and lower.fits(box[low])
            for high in range(len(box))
            for low in range(high)
        )
        return None if apart else False  # above, but not right above

    return _boxes_with(rng, words, holds, "tower")


def _blocks_in_all(rng: np.random.Generator) -> tuple[str, Judge]:
    return _in_all(_block(rng), rng)


def _towers_of_one_colour(rng: np.random.Generator) -> tuple[str, Judge]:
    colour = _pick(rng, tuple(COLOURS))
    noun, number = _block(rng, colour), int(rng.integers(1, BOXES))
    words = ("a", "exactly one", "only one")[int(rng.integers(3))] if number == 1 else "two"
    name = "tower" if number == 1 else "towers"

    def judge(boxes: Sequence[Box]) -> bool | None:
        found = sum(noun.among(box) == len(box) for box in boxes)
        if words == "a":
            return found >= 1
        return None if words == "two" and found > 2 else found == number

    be = "is" if number == 1 else "are"
    return f"there {be} {words} {colour} {name}", judge


Maker = Callable[[np.random.Generator], tuple[str, Judge]]

_OF_ITEMS: tuple[Maker, ...] = (
    _items_in_all,
    _box_with_items,
    _box_with_items,
    _touching,
    _touching,
    _each_box,
    _colours_of_a_box,
)
_OF_TOWERS: tuple[Maker, ...] = (
    _tower_of,
    _tower_with,
    _end_of_a_tower,
    _end_of_a_tower,
    _over,
    _blocks_in_all,
    _towers_of_one_colour,
)
