"""Rules of statements about items and towers, worded as people did for NLVR v1 (Suhr et al., 2017).

NLVR v1's dev and test sentences were at hand when they were written. A split that was never at hand
confirms the recipe: 72.1 % [69.5, 74.9], majority 55.4 (docs/results/downstream.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import combinations, groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from vlp.data.stream.rng import make_rng
from vlp.scenes.nlvr_v1.boxes import Box, ThreeBoxes, rearrange_boxes, sample_boxes
from vlp.scenes.nlvr_v1.grammar import Grammar, Truth, the_only
from vlp.scenes.splits import Split

_SHARED = """
NOTHING: ""
NOT: "not "
SOME: n=either(.4, count(2), A); n=either(.04, NO, n); there=case(THERE, n)
    "{there}{n:{name}} {what}" many: what
THERE: said=either(.15, NOTHING, THERE IS)
THERE a: said=THERE IS
THERE IS: "there {n:be} "
"""
_ITEMS = """
HAVING: "<with|with|with|that has|which has|that contains>"
ITEMS*4: n=count(4); x=noun; n=either(.05, NO, n); more=either(.85, NOTHING, AND ITEMS)
    "there {n:be} {n:{x}}{more}" all: has & more
AND ITEMS: n=number(3); x=noun " and {n:{x}}" has
TOUCHING*7: x=noun(.15); n=count(3); n=either(.12, NO, n); where=<EDGE|EDGE|BASE|CORNER|WALL>;
    where=either(.3, NOWHERE, where) "there {n:be} {n:{x}} {where}" all: has
NEAR: "<touching|touching|closely touching>"
EDGE: "{NEAR} <the edge|the edge|any edge|an edge|the wall|the side>" touches
BASE: wall=bottom "{NEAR} <the base|the bottom base|the bottom of a box>" side
CORNER: "{NEAR} <the corner|a corner|a corner of a box>" corner
WALL: near=NEAR; wall=<left|right|top|bottom>; words=case(SIDE, wall) "{near} {words}" side
SIDE: "<|the >{wall} wall of a box"
SIDE top: said=SIDE; said=either(.5, ROOF, said)
ROOF: "the <roof|top> of a box"
NOWHERE: "not touching <any|the> edge" apart
BOX WITH ITEMS*7 of a box: what=PARTS; end=either(.05, IN IT, NOTHING) "{HAVING} {what}{end}" what
IN IT: " in it"
PARTS: said=<PART|PART|PART|TWO PARTS|TWO PARTS|THREE PARTS>
TWO PARTS: a=PART; b=NEXT PART "{a} and {b}" a & b
THREE PARTS: a=PART; b=NEXT PART; c=NEXT PART "{a}, {b} and {c}" a & b & c
PART: n=count(4); x=noun; where=either(.08, AT WALL, NOTHING) "{n:{x}}{where}" has
NEXT PART: n=count(3); x=noun; where=either(.08, AT WALL, NOTHING) "{n:{x}}{where}" has
AT WALL: " touching the <wall|edge>" touches
BOX WITH A NUMBER*3 of a box: n=count(7); having=HAVING; x=thing;
    more=either(.75, NOTHING, either(.5, OF A KIND, OF A TINT)) "{having} {n:{x}}{more}" size & more
OF A KIND: n=number(1); x=noun " of which {n} is a {x}" has
OF A TINT: n=number(3); x=tint " of which {n} {n:be} {x}" has
OF THE BOXES*3: n=either(.85, number(2), count(2)); what=PARTS; what=either(.5, SO MANY, what);
    many=case(MANY, n) "{many} of the grey <box|square|boxes> <has|contains> {what}" many: what
MANY: "{n}"
MANY a: "one"
SO MANY: n=count(7); x=thing "{n:{x}}" size
EACH BOX*2: n=count(2); x=noun; where=either(.15, AT EDGE, NOTHING);
    box=<box|grey box|grey square>; verb=<has|contains>
    "<each {box} {verb} {n:{x}}{where}|there {n:be} {n:{x}}{where} in each box>" each: has
AT EDGE: " touching the edge" touches
COLOURS*2 of a box: wanted=<1|2|3>; word=numeral(wanted); thing=<items|objects>;
    what=case(OF COLOURS, wanted); n=number(7); said=case(WITH, n.plural)
OF COLOURS 1: "{thing} of <the same|only one> color"
OF COLOURS 2: "{thing} of <{word} different|exactly {word}> colors"
OF COLOURS 3: "{thing} of <{word}|all {word}> different colors"
WITH: "with {what}" several & colours
WITH True: said=either(.7, WITH, WITH MANY)
WITH MANY: "with {n} {what}" several & size & colours
ONLY*2: thing=<items|objects>; form=<two|two|tone|shape|both>; tones=two_colours;
    shape=<circle|square|triangle>; two=TWO COLOURS; what=case(KIND, form);
    said=either(.15, ONE HAS ONLY, A BOX HAS ONLY)
TWO COLOURS: "<{tones[0]} and {tones[1]} {thing}|{thing} of {tones[0]} and {tones[1]} color>"
KIND two: "{two}" of_two
KIND tone: "{tones[0]} {thing}" several & of_one
KIND shape: "{shape}s" several & of_shape
KIND both: "{tones[0]} {shape}s" several & of_one & of_shape
ONE HAS ONLY: n=number(1); verb=<has|contains> "one of the grey <box|square> {verb} only {what}"
    many: what
A BOX HAS ONLY of a box: "{HAVING} only {what}" what
NONE TOUCHES*1: x=noun; n=NO; where=AT EDGE "none of the {x}s are touching <the|any> edge"
    all: exists & has
THE ONLY TOUCHES*1: x=noun; negated=either(.5, NOT, NOTHING)
    "the {x} is {negated}touching the <edge|wall>" all: the_only_touches
UNIFORM*1 of a box: having=HAVING; n=count(3); x=thing; tone=tint; negated=either(.6, NOT, NOTHING)
    "{having} {n:{x}} that {n:be} {negated}{tone}" size & uniform
"""
_TOWERS = """
HAVING: "<with|with|that has|which has|that contains>"
HEIGHT*3 of a tower: n=count(4) "{HAVING} {n:block}" size
BLOCKS*3 of a tower: n=count(3); x=tint; more=either(.25, AND BLOCKS, NOTHING)
    "{HAVING} {n:{x} block}{more}" has & more
AND BLOCKS: n=number(2); x=tint " and {n:{x} block}" has
END*9: x=tint; place=<base|bottom|top>; form=<at|at|at|base|as|as|as|of height|of height>;
    the=<the |the |the |>; said=case(END, form)
END at of a tower: "with a {x} block at {the}{place}" end
END base of a tower: "with <a |>{x} {place}" end
END as: n=either(.4, count(2), count(1)); n=either(.07, NO, n)
    "there {n:be} {n:{x} block} as {the}{place} of a tower" many: end
END of height: n=either(.4, count(2), count(1)); n=either(.07, NO, n); what=OF HEIGHT
    "there {n:be} {n:{x} block} as {the}{place} of {what}" many: what
OF HEIGHT: n=count(4) "a tower with {n:block}" end & size
THE TOWER*2: height=<1|2|3|4>; x=tint; place=<base|bottom|top>;
    said=either(.2, ALL TOWERS, ONE TOWER)
ALL TOWERS: "<all the towers have|each tower has> a {x} block at the {place}" each: end
ONE TOWER: n=numeral(height); said=<TOWER HAS|ITS END IS>
TOWER HAS: "the tower with {n:block} has a {x} block at the {place}" the_tower
ITS END IS: "the {place} of the tower with {n:block} is {x}" the_tower
HEIGHT AND ENDS*2: n=count(4); x=tint; y=tint; said=either(.33, BOTH ENDS, HEIGHT AND END)
BOTH ENDS of a tower:
    "with a <{x} base and {y} top|{y} block at the top and a {x} block at the base>" both_ends
HEIGHT AND END of a tower: place=<base|bottom|top>
    "{HAVING} {n:block} <with|having|and> a {x} block at the {place}" size & end
OVER*5: x=tint; y=tint; word=<on|on|above|over|below>; words=case(WORD, word);
    said=either(.4, TOWER OVER, BLOCKS OVER)
WORD: "{word}"
WORD below: "<below|bellow>"
TOWER OVER of a tower: "<with|having|which has> a {x} block {words} a {y} block" over
BLOCKS OVER: n=either(.07, NO, count(1)) "there {n:be} {n} {x} block {words} a {y} block" lie_over
IN ALL*3: n=count(4); x=tint; said=either(.25, IN EACH, IN ALL TOWERS)
IN EACH: "<there {n:be} {n:{x} block} in each tower|each tower has {n:{x} block}>" each: has
IN ALL TOWERS: "there {n:be} {n:{x} block}" all: has
COLOURS*4: form=<of number|only one|only two|named>; tones=two_colours; said=case(COLOURS, form)
COLOURS of number of a tower: wanted=<1|2|3>; word=numeral(wanted); words=case(NUMBER, wanted)
    "{words}" tower_colours
NUMBER 1: "<with only one color|with blocks of the same color|that has a single color>"
NUMBER 2: "with <blocks of {word} different|only {word}> colors"
NUMBER 3: "with <blocks of {word} different|{word}> colors"
COLOURS only two of a tower: "with only {tones[0]} and {tones[1]} blocks" of_two
COLOURS only one of a tower: "with only {tones[0]} blocks" of_one & several
COLOURS named: said=<NAMED ONE|NAMED TWO>
NAMED ONE: n=<a|exactly one|only one>; said=case(NAMED, n)
NAMED TWO: n=two; said=NAMED
NAMED: n=stated(n) "there {n:be} {n:{tones[0]} tower}" many: of_one
NAMED a: said=either(.4, NAMED, NAMED AND HIGH)
NAMED AND HIGH: n=count(4) "there is a {tones[0]} tower with {n:block}" any: of_one & size
STACKED*1 of a tower: x=tint; least=<2|3>;
    how=<stacked together|attached with each other|on top of each other>; n=numeral(least)
    "with {n} {x} blocks {how}" stacked
STOREY*1: nth=<second|third>; x=tint; said=<WITH STOREY|A STOREY|MIDDLE>
WITH STOREY of a tower: "with a {x} {nth} block" storey
A STOREY: "the {nth} block from the base of a tower is {x}" any: storey
MIDDLE of a tower: "with <three|3> blocks and a {x} block in the middle" middle
SAME END*1: place=<base|bottom|top>; n=<two|exactly two|only two|at least two|three>; n=stated(n)
    "there are {n} towers <that have|with> the same {place} color" same_end
UNIFORM*1 of a tower: having=HAVING; n=count(2); tone=tint; negated=either(.6, NOT, NOTHING)
    "{having} {n:block} that {n:be} {negated}{tone}" size & uniform
"""


def _end(d: Any, box: Box) -> bool:
    return d.x.true(box[_ENDS[d.place]])


def _times_over(d: Any, box: Box) -> Any:
    """Return how often a block lies right above the other; None where one lies higher up."""
    high, low = (d.y.true, d.x.true) if d.word == "below" else (d.x.true, d.y.true)
    touching = sum(high(top) and low(under) for under, top in pairwise(box))
    apart = any(high(top) and low(under) for under, top in combinations(box, 2))
    return touching or (None if apart else 0)


_colour = attrgetter("colour")
_ENDS = {"base": 0, "bottom": 0, "top": -1}
_TRUTHS: dict[str, Callable[[Any, Any], Truth]] = {
    "has": lambda d, items: d.n.holds(sum(d.x.true(i) and d.where.true(i) for i in items)),
    "exists": lambda d, items: any(map(d.x.true, items)) or None,
    "size": lambda d, box: d.n.holds(len(box)),
    "several": lambda d, box: len(box) > 1 or None,  # one item is no "items"
    "uniform": lambda d, box: all(d.tone.true(item) != bool(d.negated.text) for item in box),
    "touches": lambda d, item: bool(item.walls),
    "apart": lambda d, item: not item.walls,
    "corner": lambda d, item: len(item.walls) > 1,
    "side": lambda d, item: d.wall in item.walls,
    "the_only_touches": lambda d, items: the_only(
        bool(item.walls) != bool(d.negated.text) for item in items if d.x.true(item)
    ),
    "colours": lambda d, box: len({*map(_colour, box)}) == d.wanted,
    "tower_colours": lambda d, box: len({*map(_colour, box)}) == d.wanted if box[1:] else None,
    "of_one": lambda d, box: {*map(_colour, box)} == {d.tones[0]},
    "of_two": lambda d, box: (  # some say so of a box with only one of them
        {*map(_colour, box)} <= {*d.tones} and (len({*map(_colour, box)}) > 1 or None)
    ),
    "of_shape": lambda d, box: {item.shape for item in box} == {d.shape},
    "end": _end,
    "both_ends": lambda d, box: d.x.true(box[0]) and d.y.true(box[-1]) if len(box) > 1 else None,
    "the_tower": lambda d, boxes: the_only(_end(d, box) for box in boxes if len(box) == d.height),
    "over": lambda d, box: None if (times := _times_over(d, box)) is None else times > 0,
    "lie_over": lambda d, boxes: (
        None if None in (times := [_times_over(d, box) for box in boxes]) else d.n.holds(sum(times))
    ),
    "stacked": lambda d, box: d.n.holds(
        max(len([*run]) if fits else 0 for fits, run in groupby(box, d.x.true))
    ),
    "storey": lambda d, box: any(map(d.x.true, box[1:2] if d.nth == "second" else box[2:3])),
    "middle": lambda d, box: len(box) == 3 and d.x.true(box[1]),
    "same_end": lambda d, boxes: d.n.holds(
        max(Counter(box[_ENDS[d.place]].colour for box in boxes).values())
    ),
}
OF_ITEMS = Grammar(_SHARED + _ITEMS, _TRUTHS).sentences
OF_TOWERS = Grammar(_SHARED + _TOWERS, _TRUTHS).sentences
"""Draws of sentences, as often as people said such things."""


_HOARDS, _ARRANGEMENTS = 1 << 13, 8  # few enough to keep what was drawn
_ATTEMPTS = 40


class BoxStatement(NamedTuple):
    """A sentence about three boxes, and whether it is true of them."""

    key: str
    text: str
    label: bool
    scene: ThreeBoxes


def sample_box_statement(
    seed: int, index: int, split: Split = "train", same_items: bool = True
) -> BoxStatement:
    """Draw statement `index` of a split; two splits share no image but by chance.

    With `same_items` false images hold a true one's items. Without it what there is says much:
    easier to start from.
    """
    key = f"boxes-{split}-{seed}-{index}" if same_items else f"boxes-{split}-{seed}-{index}-any"
    rng = make_rng(seed, 0, key, "boxes")
    label = bool(rng.random() < 0.5)
    while True:
        towers = bool(rng.random() < 0.5)
        makers = OF_TOWERS if towers else OF_ITEMS
        text, holds = makers[int(rng.integers(len(makers)))](rng)
        stop = "." if rng.random() < 0.4 else ""
        for _ in range(_ATTEMPTS):
            hoard = int(rng.integers(_HOARDS))
            numbers = rng.permutation(_ARRANGEMENTS)[: None if same_items else 1].tolist()
            scenes = [_arrangement(seed, split, towers, hoard, number) for number in numbers]
            found = {holds(scene.boxes): scene for scene in scenes}
            if label in found and (not same_items or (not label) in found):
                return BoxStatement(key, text + stop, label, found[label])


@cache
def _arrangement(seed: int, split: Split, towers: bool, hoard: int, number: int) -> ThreeBoxes:
    """The same items as every other number of this hoard has."""
    rng = make_rng(seed, 0, f"boxes-{split}-{seed}-{towers}-{hoard}", f"arrangement {number}")
    if number == 0:
        return sample_boxes(rng, towers)
    return rearrange_boxes(rng, _arrangement(seed, split, towers, hoard, 0))
