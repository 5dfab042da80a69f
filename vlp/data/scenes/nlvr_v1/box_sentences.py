"""Statements about scattered items, worded as people did for NLVR v1 (Suhr et al., ACL 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vlp.data.scenes.nlvr_v1.box_words import (
    NONE,
    Count,
    Noun,
    Told,
    anything,
    boxes_with,
    colour,
    count,
    just_of,
    noun,
    number,
    number_word,
    pick,
    quantified,
    two_colours,
    uniform_or_without,
)
from vlp.data.scenes.nlvr_v1.boxes import MOST_ITEMS, SHAPES, Box, BoxItem
from vlp.data.scenes.nlvr_v1.three_valued import every

_SIDES = ("left", "right", "top", "bottom")
_HAVING = ("with", "with", "with", "that has", "which has", "that contains")


def _all(boxes: Sequence[Box]) -> list[BoxItem]:
    return [item for box in boxes for item in box]


def _items_in_all(rng: np.random.Generator) -> Told:
    how_many, what = count(rng, 4), noun(rng)
    if rng.random() < 0.05:
        how_many = NONE
    text = f"{how_many.be} {how_many.of(what)}"
    if rng.random() < 0.85:
        return text, lambda boxes: how_many.holds(what.among(_all(boxes)))
    second, other = number(rng, 3), noun(rng)
    return f"{text} and {second.of(other)}", lambda boxes: every(
        [how_many.holds(what.among(_all(boxes))), second.holds(other.among(_all(boxes)))]
    )


def _place_of_touch(rng: np.random.Generator) -> tuple[str, Callable[[BoxItem], bool]]:
    """Where an item touches, in words, and whether it does."""
    where = pick(rng, "any", "any", "bottom", "corner", "side")
    near = pick(rng, "touching", "touching", "closely touching")
    if where == "any":
        words = pick(rng, "the edge", "the edge", "any edge", "an edge", "the wall", "the side")
        return f"{near} {words}", lambda item: bool(item.walls)
    if where == "corner":
        words = pick(rng, "the corner", "a corner", "a corner of a box")
        return f"{near} {words}", lambda item: len(item.walls) > 1
    if where == "bottom":
        words = pick(rng, "the base", "the bottom base", "the bottom of a box")
        return f"{near} {words}", lambda item: "bottom" in item.walls
    wall = pick(rng, *_SIDES)
    words = f"{pick(rng, '', 'the ')}{wall} wall of a box"
    if wall == "top" and rng.random() < 0.5:
        words = pick(rng, "the roof of a box", "the top of a box")
    return f"{near} {words}", lambda item: wall in item.walls


def _touching(rng: np.random.Generator) -> Told:
    what, how_many = noun(rng, 0.15), count(rng, 3)
    if rng.random() < 0.12:
        how_many = NONE
    place, touches = _place_of_touch(rng)
    if rng.random() < 0.3:
        place, touches = f"not touching {pick(rng, 'any', 'the')} edge", lambda item: not item.walls
    return _counted_where(how_many, what, place, touches)


def _counted_where(
    how_many: Count, what: Noun, words: str, there: Callable[[BoxItem], bool]
) -> Told:
    return (
        f"{how_many.be} {how_many.of(what)} {words}",
        lambda boxes: how_many.holds(sum(what.fits(i) and there(i) for i in _all(boxes))),
    )


def _none_touching(rng: np.random.Generator) -> Told:
    what, words = noun(rng), pick(rng, "the", "any")

    def judge(boxes: Sequence[Box]) -> bool | None:
        of_them = [item for item in _all(boxes) if what.fits(item)]
        return not any(item.walls for item in of_them) if of_them else None

    return f"none of the {what.several} are touching {words} edge", judge


def _parts(rng: np.random.Generator) -> tuple[str, Callable[[Box], bool | None]]:
    """One to three counted nouns, of which one may touch a wall."""
    parts = list[tuple[str, Callable[[Box], bool | None]]]()
    for _ in range(pick(rng, 1, 1, 1, 2, 2, 3)):
        how_many, what = count(rng, 4 if not parts else 3), noun(rng)
        touching = rng.random() < 0.08

        def holds(
            box: Box, how_many: Count = how_many, what: Noun = what, touching: bool = touching
        ) -> bool | None:
            return how_many.holds(
                sum(what.fits(i) and (not touching or bool(i.walls)) for i in box)
            )

        suffix = f" touching the {pick(rng, 'wall', 'edge')}" if touching else ""
        parts.append((how_many.of(what) + suffix, holds))
    *first, last = (words for words, _ in parts)
    joined = f"{', '.join(first)} and {last}" if first else last
    return joined, lambda box: every([holds(box) for _, holds in parts])


def _box_with_items(rng: np.random.Generator) -> Told:
    words, holds = _parts(rng)
    suffix = " in it" if rng.random() < 0.05 else ""
    return boxes_with(rng, f"{pick(rng, *_HAVING)} {words}{suffix}", holds)


def _box_with_a_number(rng: np.random.Generator) -> Told:
    how_many = count(rng, MOST_ITEMS)
    words = f"{pick(rng, *_HAVING)} {how_many.of(anything(rng))}"
    if rng.random() < 0.75:
        return boxes_with(rng, words, lambda box: how_many.holds(len(box)))
    if rng.random() < 0.5:
        part, what = number(rng, 1), noun(rng)
        which, fits = f"is a {what.one}", what.fits
    else:
        part, tone = number(rng, 3), colour(rng)
        which, fits = f"{'are' if part.plural else 'is'} {tone}", lambda item: item.colour == tone
    return boxes_with(
        rng,
        f"{words} of which {part.words} {which}",
        lambda box: every([how_many.holds(len(box)), part.holds(sum(map(fits, box)))]),
    )


def _of_the_boxes(rng: np.random.Generator) -> Told:
    how_many = number(rng, 2) if rng.random() < 0.85 else count(rng, 2)
    words, holds = _parts(rng)
    if rng.random() < 0.5:
        inside = count(rng, MOST_ITEMS)
        words = inside.of(anything(rng))

        def holds(box: Box) -> bool | None:
            return inside.holds(len(box))

    opening = f"{how_many.words if how_many.words != 'a' else 'one'} of the grey"
    text = f"{opening} {pick(rng, 'box', 'square', 'boxes')} {pick(rng, 'has', 'contains')} {words}"
    return text, lambda boxes: quantified(how_many, [holds(box) for box in boxes])


def _each_box(rng: np.random.Generator) -> Told:
    how_many, what = count(rng, 2), noun(rng)
    touching = rng.random() < 0.15
    inside = f"{how_many.of(what)}{' touching the edge' if touching else ''}"
    box_word, verb = pick(rng, "box", "grey box", "grey square"), pick(rng, "has", "contains")
    text = pick(rng, f"each {box_word} {verb} {inside}", f"{how_many.be} {inside} in each box")

    def among(box: Box) -> int:
        return sum(what.fits(item) and (not touching or bool(item.walls)) for item in box)

    return text, lambda boxes: every([how_many.holds(among(box)) for box in boxes])


def _colours_of_a_box(rng: np.random.Generator) -> Told:
    wanted = int(rng.integers(1, 4))
    how_many, thing = number_word(rng, wanted), pick(rng, "items", "objects")
    words = {
        1: (f"{thing} of the same color", f"{thing} of only one color"),
        2: (f"{thing} of {how_many} different colors", f"{thing} of exactly {how_many} colors"),
        3: (
            f"{thing} of {how_many} different colors",
            f"{thing} of all {how_many} different colors",
        ),
    }[wanted]

    def holds(box: Box) -> bool | None:
        if len(box) == 1 and wanted == 1:
            return None  # one item is no "items"
        return len({item.colour for item in box}) == wanted

    text, inside = pick(rng, *words), number(rng, MOST_ITEMS)
    if not inside.plural or rng.random() < 0.7:
        return boxes_with(rng, f"with {text}", holds)
    return boxes_with(
        rng,
        f"with {inside.words} {text}",
        lambda box: every([len(box) > 1 or None, inside.holds(len(box)), holds(box)]),
    )


def _only(rng: np.random.Generator) -> Told:
    """A box with nothing but items of one or two colours, or of one shape."""
    thing = pick(rng, "items", "objects")
    form = pick(rng, "two colours", "two colours", "one colour", "shape", "coloured shape")
    first, second = two_colours(rng)
    shape = pick(rng, *SHAPES)

    def holds(box: Box) -> bool | None:
        tones, shapes = {item.colour for item in box}, {item.shape for item in box}
        if form == "two colours":
            return just_of(box, {first, second})
        right = form == "shape" or tones == {first}
        right = right and (form == "one colour" or shapes == {shape})
        return None if right and len(box) == 1 else right

    words = {
        "two colours": pick(
            rng, f"{first} and {second} {thing}", f"{thing} of {first} and {second} color"
        ),
        "one colour": f"{first} {thing}",
        "shape": f"{shape}s",
        "coloured shape": f"{first} {shape}s",
    }[form]
    if rng.random() < 0.15:
        single, verb = number(rng, 1), pick(rng, "has", "contains")
        return (
            f"one of the grey {pick(rng, 'box', 'square')} {verb} only {words}",
            lambda boxes: quantified(single, [holds(box) for box in boxes]),
        )
    return boxes_with(rng, f"{pick(rng, *_HAVING)} only {words}", holds)


def _is_touching(rng: np.random.Generator) -> Told:
    """About the only item of its kind."""
    what, negated = noun(rng), rng.random() < 0.5

    def judge(boxes: Sequence[Box]) -> bool | None:
        of_them = [bool(item.walls) for item in _all(boxes) if what.fits(item)]
        return None if len(of_them) != 1 else of_them[0] != negated

    edge = pick(rng, "edge", "wall")
    return f"the {what.one} is {'not ' if negated else ''}touching the {edge}", judge


def _uniform_or_without(rng: np.random.Generator) -> Told:
    return uniform_or_without(rng, pick(rng, *_HAVING), count(rng, 3), anything(rng))


OF_ITEMS = (
    *(_items_in_all,) * 4,
    *(_touching,) * 7,
    *(_box_with_items,) * 7,
    *(_box_with_a_number,) * 3,
    *(_of_the_boxes,) * 3,
    *(_each_box,) * 2,
    *(_colours_of_a_box,) * 2,
    *(_only,) * 2,
    _none_touching,
    _is_touching,
    _uniform_or_without,
)
"""Makers of statements, as often as people said such things."""
