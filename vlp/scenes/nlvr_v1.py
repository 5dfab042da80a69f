"""Statements about images of three boxes, like NLVR v1 (Suhr et al., ACL 2017).

A box holds scattered items or a tower of blocks. Sentences are drawn from tables of rules, which
imitate the sentences of NLVR v1's dev and test splits. A model trained on them reaches 72.1 %
[69.5, 74.9] on a third split, which the rules do not imitate; majority 55.4
(docs/results/downstream.md).
"""

from __future__ import annotations

import operator
import re
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import combinations, groupby, pairwise, product
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageDraw

from vlp.data.stream.rng import make_rng
from vlp.scenes.sample import Split

SHAPES = ("circle", "square", "triangle")
COLOURS = {"yellow": (255, 255, 0), "blue": (0, 153, 255), "black": (0, 0, 0)}
SIZES = {"small": 10, "medium": 20, "big": 30}
SIDE, PITCH, BOXES = 100, 150, 3  # pixels of a box, and from one left edge to the next
WIDTH = PITCH * (BOXES - 1) + SIDE
BLOCK, MAX_BLOCKS, MAX_ITEMS = 20, 4, 7  # pixels of a block, blocks of a tower, items of a box
_GROUND, _GAP = (211, 211, 211), (128, 128, 128)
_BLOCK_LEFT, _STOREY = 40, BLOCK + 1
_SUPERSAMPLING = 4

_MAX_PLACINGS = 50

Wall = Literal["left", "right", "top", "bottom"]
Value = TypeVar("Value")
_Kind = tuple[str, str, int]  # shape, colour, size


class BoxItem(NamedTuple):
    """A shape in a box; size, left edge x and upper edge y are in pixels of the box."""

    shape: str
    colour: str
    size: int
    x: int
    y: int

    @property
    def walls(self) -> frozenset[Wall]:
        """Walls that the item touches."""
        touches_wall: dict[Wall, bool] = {
            "left": self.x == 0,
            "right": self.x + self.size == SIDE,
            "top": self.y == 0,
            "bottom": self.y + self.size == SIDE,
        }
        return frozenset(wall for wall, touches in touches_wall.items() if touches)


# Items in any order; a tower's blocks from its base up.
Box = tuple[BoxItem, ...]


class ThreeBoxes(NamedTuple):
    """Three boxes, each with a tower if `towers`, else with scattered items."""

    towers: bool
    boxes: tuple[Box, ...]


def pick(rng: np.random.Generator, values: Iterable[Value]) -> Value:
    """Draw one of the values."""
    choices = tuple(values)
    return choices[int(rng.integers(len(choices)))]


def sample_boxes(rng: np.random.Generator, towers: bool) -> ThreeBoxes:
    """Draw three boxes and their items or towers."""
    counts = rng.integers(1, (MAX_BLOCKS if towers else MAX_ITEMS) + 1, size=BOXES).tolist()
    return _arrange(rng, towers, [_kind(rng, towers) for _ in range(sum(counts))], counts)


def rearrange_boxes(rng: np.random.Generator, scene: ThreeBoxes) -> ThreeBoxes:
    """Draw another arrangement of the same items or blocks, as likely as in `sample_boxes`."""
    kinds = [(item.shape, item.colour, item.size) for box in scene.boxes for item in box]
    sizes = range(1, (MAX_BLOCKS if scene.towers else MAX_ITEMS) + 1)
    counts = pick(rng, (c for c in product(sizes, repeat=BOXES) if sum(c) == len(kinds)))
    shuffled = [kinds[index] for index in rng.permutation(len(kinds))]
    return _arrange(rng, scene.towers, shuffled, counts)


def render_boxes(scene: ThreeBoxes) -> Image.Image:
    """Render three boxes: RGB, WIDTH x SIDE pixels, anti-aliased."""
    scale = _SUPERSAMPLING
    image = Image.new("RGB", (WIDTH * scale, SIDE * scale), _GAP)
    canvas = ImageDraw.Draw(image)
    for number, box in enumerate(scene.boxes):
        left = number * PITCH
        canvas.rectangle(_corners(left, 0, SIDE), fill=_GROUND)
        for item in box:
            corners = _corners(left + item.x, item.y, item.size)
            if item.shape == "circle":
                canvas.ellipse(corners, fill=COLOURS[item.colour])
            elif item.shape == "square":
                canvas.rectangle(corners, fill=COLOURS[item.colour])
            else:
                x, y, right, bottom = corners
                top = ((x + right) / 2, y)
                canvas.polygon([top, (right, bottom), (x, bottom)], fill=COLOURS[item.colour])
    return image.reduce(scale)


def _corners(x: int, y: int, side: int) -> tuple[int, int, int, int]:
    scale = _SUPERSAMPLING
    return x * scale, y * scale, (x + side) * scale - 1, (y + side) * scale - 1


def _kind(rng: np.random.Generator, towers: bool) -> _Kind:
    if towers:
        return "square", pick(rng, COLOURS), BLOCK
    size = pick(rng, SIZES.values())
    return pick(rng, SHAPES), pick(rng, COLOURS), size


def _arrange(
    rng: np.random.Generator, towers: bool, kinds: Sequence[_Kind], counts: Sequence[int]
) -> ThreeBoxes:
    """Put items or blocks into the boxes in order, `counts` into each."""
    arrange = _tower if towers else _scatter
    parts = [kinds[end - count : end] for count, end in zip(counts, np.cumsum(counts))]
    return ThreeBoxes(towers, tuple(arrange(rng, part) for part in parts))


def _tower(rng: np.random.Generator, kinds: Sequence[_Kind]) -> Box:
    return tuple(
        BoxItem(shape, colour, size, _BLOCK_LEFT, SIDE - BLOCK - _STOREY * storey)
        for storey, (shape, colour, size) in enumerate(kinds)
    )


def _scatter(rng: np.random.Generator, kinds: Sequence[_Kind]) -> Box:
    """Place items that do not touch each other; about 40 % touch a wall."""
    while True:  # until all items find room
        items = list[BoxItem]()
        for shape, colour, size in kinds:
            for _ in range(_MAX_PLACINGS):
                x, y = int(rng.integers(SIDE - size + 1)), int(rng.integers(SIDE - size + 1))
                if rng.random() < 0.3:
                    end = int(rng.integers(2)) * (SIDE - size)
                    x, y = (end, y) if rng.random() < 0.5 else (x, end)
                item = BoxItem(shape, colour, size, x, y)
                if not any(_overlap(item, other) for other in items):
                    items.append(item)
                    break
        if len(items) == len(kinds):
            return tuple(items)


def _overlap(a: BoxItem, b: BoxItem) -> bool:
    gap = 2
    across = a.x < b.x + b.size + gap and b.x < a.x + a.size + gap
    return across and a.y < b.y + b.size + gap and b.y < a.y + a.size + gap


def every(values: Iterable[bool | None]) -> bool | None:
    """Return the conjunction of truth values, in which None is unknown."""
    readings = set(values)
    return False if False in readings else None if None in readings else True


def some(values: Iterable[bool | None]) -> bool | None:
    """Return the disjunction of truth values, in which None is unknown."""
    readings = set(values)
    return True if True in readings else None if None in readings else False


def count_truth(holds: Callable[[int], bool | None], values: Sequence[bool | None]) -> bool | None:
    """Return `holds` of the number of true values; None if it depends on unknown values."""
    count = values.count(True)
    readings = {holds(count + more) for more in range(1 + values.count(None))}
    return readings.pop() if len(readings) == 1 else None


def the_only(values: Iterable[bool | None]) -> bool | None:
    """Return the value of a single-element iterable; None for other numbers of elements."""
    readings = list(values)
    return readings[0] if len(readings) == 1 else None


Truth = bool | None  # None: readers may differ

_RULE = re.compile(r'([A-Z][\w ]*?)(?:\*(\d+))?(?: of a (box|tower))?: ([^"]*)"(.*)" ?(.*)')
_CALL = re.compile(r"(\w+)\((.*)\)")
_ARGUMENT = re.compile(r"[^,()]+(?:\([^)]*\))?")
_CHOICE = re.compile(r"<([^<>]*)>|\{([A-Z ]+)\}")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven")
_HOW = ("exactly", "exactly", "only", "just", "at least", "at least", "at most", "more than")
_BOUNDS: dict[str, Callable[[int, int], Truth]] = {  # of k items, for a text that says n
    "": lambda k, n: None if k > n else k == n,
    **dict.fromkeys(("exactly", "only", "just"), operator.eq),
    **dict.fromkeys(("at least", "atleast"), operator.ge),
    "at most": lambda k, n: None if k == 0 else k <= n,
    "more than": operator.gt,
    "a": lambda k, n: k >= 1,
    "no": lambda k, n: k == 0,
}


class Phrase(NamedTuple):
    """Words, and their truth of a subject: an item, a box or all boxes."""

    text: str
    true: Callable[[Any], Truth] = lambda subject: True

    def __format__(self, spec: str) -> str:
        return self.text


class Count(NamedTuple):
    """A quantity in words, its truth of a number, and whether its noun is a plural."""

    words: str
    holds: Callable[[int], Truth]
    plural: bool = False

    def __format__(self, noun: str) -> str:
        if noun == "be":
            return "are" if self.plural else "is"
        ending = ("es" if noun.endswith("x") else "s") if self.plural else ""
        return f"{self.words} {noun}{ending}" if noun else self.words


# A rule of a table reads `NAME*weight of a box: draws "text" truth`. Rules with `*weight` are whole
# sentences, with that frequency. `of a box` (or `tower`) marks a text about one box, to which the
# rule `SOME` adds the number of such boxes. Draws are made in order. A draw's value is
#
#     NAME or NAME a          phrase of another rule
#     noun, count(4), x       draw of `_CHOICES`; earlier draw
#     <left|right>            one of the values
#     either(.3, YES, NO)     the first with probability .3, else the second
#     case(NAME, form)        phrase of `NAME a` if `form` is "a" and this rule exists, or `NAME`
#
# The text holds draws in braces ("{n:be} {n:{x}}": verb, then quantity with its noun), rules
# ("{HAVING}"), and choices of equal probability ("<with|having>"). The truth joins phrases and
# truth functions by "&" (default: the phrase `said`). A prefix applies it to boxes: to `each`,
# `any` or `many` (`n`) of them, or to the items of `all` boxes together. `d` has a rule's draws.
class Grammar:
    """Generator of phrases from a table of rules (above) and truth functions."""

    def __init__(self, table: str, truths: Mapping[str, Callable[[Any, Any], Truth]]) -> None:
        self.truths, self.rules, names = truths, dict[str, list[str]](), list[str]()
        for line in re.split(r"\n(?=\S)", table.strip()):
            rule = re.sub(r"\n\s+", " ", line.strip())
            match = _RULE.fullmatch(rule if '"' in rule else rule + ' "{said}" said')
            assert match, line
            name, weight, *self.rules[match[1]] = match.groups("")
            names += [name] * int(weight or 0)
        self.sentences = tuple(partial(self.draw, name) for name in names)

    def draw(self, name: str, rng: np.random.Generator, outer: Any = None) -> Phrase:
        """Draw the phrase of a rule; `outer` holds the draws of the rule that contains it."""
        about, assignments, text, truth = self.rules[name]
        d = SimpleNamespace(**(vars(outer) if outer else {"where": Phrase("")}))
        for assignment in filter(None, assignments.strip().split("; ")):
            key, token = assignment.split("=", 1)
            setattr(d, key, self._value(token.strip(), rng, d))

        def choose(match: re.Match[str]) -> str:
            return self.draw(match[2], rng, d).text if match[2] else pick(rng, match[1].split("|"))

        words = _CHOICE.sub(choose, text).format_map(vars(d))
        phrase = Phrase(words, partial(self._true, truth, d))
        some_box = SimpleNamespace(name=about, what=phrase)
        return self.draw("SOME", rng, some_box) if about else phrase

    def _true(self, truth: str, d: SimpleNamespace, subject: Any) -> Truth:
        over, _, names = truth.rpartition(": ")
        if over == "all":
            subject = [item for box in subject for item in box]
        elif over:
            values = [self._true(names, d, box) for box in subject]
            if over == "many":
                return count_truth(d.n.holds, values)
            return every(values) if over == "each" else some(values)
        return every(
            self.truths[name](d, subject) if name in self.truths else getattr(d, name).true(subject)
            for name in filter(None, names.split(" & "))
        )

    def _value(self, token: str, rng: np.random.Generator, d: SimpleNamespace) -> Any:
        if token.startswith("<"):
            return self._value(pick(rng, token[1:-1].split("|")), rng, d)
        if match := _CALL.fullmatch(token):
            name, arguments = match[1], [part.strip() for part in _ARGUMENT.findall(match[2])]
            if name == "either":
                choice = arguments[1 if rng.random() < float(arguments[0]) else 2]
                return self._value(choice, rng, d)
            if name == "case":
                variant = f"{arguments[0]} {operator.attrgetter(arguments[1])(d)}"
                return self.draw(variant if variant in self.rules else arguments[0], rng, d)
            return _CHOICES[name](rng, *(getattr(d, a, None) or literal_eval(a) for a in arguments))
        if token in self.rules:
            return self.draw(token, rng, d)
        if token in _CHOICES:
            return _CHOICES[token](rng)
        return getattr(d, token, int(token) if token.isdigit() else token)


def parse_count(words: str) -> Count:
    """Parse a quantity such as "a", "at least two" or "two", which is exact or a minimum."""
    how, _, word = words.rpartition(" ")
    n = 1 if word == "a" else int(word) if word.isdigit() else _NUMBERS.index(word)
    holds = _BOUNDS[words if words in _BOUNDS else how]
    return Count(words, lambda k: holds(k, n), n > 1 or how == "more than")


def _numeral(rng: np.random.Generator, n: int) -> Count:
    """Write a number in letters, or with probability 0.35 in digits."""
    return parse_count(str(n) if rng.random() < 0.35 else _NUMBERS[n])


def _number(rng: np.random.Generator, maximum: int) -> Count:
    return _numeral(rng, int(rng.integers(1, maximum + 1)))


def _count(rng: np.random.Generator, maximum: int) -> Count:
    """Draw a quantity of up to `maximum`, exact or bounded."""
    if rng.random() < 0.4:
        return parse_count("a") if rng.random() < 0.5 else _number(rng, maximum)
    n = int(rng.integers(1, maximum + 1))
    how, numeral = pick(rng, _HOW), _numeral(rng, n)
    how = pick(rng, ("at least", "atleast")) if how == "at least" else how
    return parse_count(f"{how} {numeral}")


def _noun(rng: np.random.Generator, size_share: float = 0.05) -> Phrase:
    """Draw a noun phrase: "item" or a shape, perhaps with a colour and, rarely, a size."""
    tone = pick(rng, COLOURS) if rng.random() < 0.75 else ""
    shape = pick(rng, SHAPES) if rng.random() < 0.6 else ""
    size = pick(rng, SIZES) if rng.random() < size_share else ""
    word = shape or pick(rng, ("item", "object"))

    def fits(item: BoxItem) -> bool:
        right_size = not size or item.size == SIZES[size]
        return tone in ("", item.colour) and shape in ("", item.shape) and right_size

    return Phrase(" ".join(part for part in (size, tone, word) if part), fits)


_CHOICES: dict[str, Callable[..., Any]] = {
    "A": lambda rng: parse_count("a"),
    "NO": lambda rng: parse_count("no"),
    "count": _count,
    "number": _number,
    "numeral": _numeral,
    "stated": lambda rng, words: parse_count(words),
    "noun": _noun,
    "thing": lambda rng: Phrase(pick(rng, ("item", "object"))),
    "tint": lambda rng: Phrase(tone := pick(rng, COLOURS), lambda item: item.colour == tone),
    "two_colours": lambda rng: [str(name) for name in rng.permutation(list(COLOURS))[:2]],
}


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
    """Return how often a block lies directly on the other; None if it lies only farther above."""
    high, low = (d.y.true, d.x.true) if d.word == "below" else (d.x.true, d.y.true)
    adjacent = sum(high(top) and low(under) for under, top in pairwise(box))
    farther = any(high(top) and low(under) for under, top in combinations(box, 2))
    return adjacent or (None if farther else 0)


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


# Sets of items, and arrangements of each: few enough for a cache.
_ITEM_SETS, _ARRANGEMENTS = 1 << 13, 8
_ATTEMPTS = 40


class BoxStatement(NamedTuple):
    """A sentence about three boxes, and whether it is true."""

    key: str
    text: str
    label: bool
    scene: ThreeBoxes


def sample_box_statement(
    seed: int, index: int, split: Split = "train", same_items: bool = True
) -> BoxStatement:
    """Draw statement `index` of a split.

    same_items: the same items can also be arranged so that the sentence gets the opposite label;
        without it the items alone often tell the label.
    """
    key = f"boxes-{split}-{seed}-{index}" if same_items else f"boxes-{split}-{seed}-{index}-any"
    rng = make_rng(seed, 0, key, "boxes")
    label = bool(rng.random() < 0.5)
    while True:
        towers = bool(rng.random() < 0.5)
        makers = OF_TOWERS if towers else OF_ITEMS
        text, is_true = makers[int(rng.integers(len(makers)))](rng)
        full_stop = "." if rng.random() < 0.4 else ""
        for _ in range(_ATTEMPTS):
            item_set = int(rng.integers(_ITEM_SETS))
            arrangements = rng.permutation(_ARRANGEMENTS).tolist()
            numbers = arrangements if same_items else arrangements[:1]
            scenes = [_arrangement(seed, split, towers, item_set, number) for number in numbers]
            # The last scene in which the sentence is true, and the last in which it is false.
            scene_by_truth = {is_true(scene.boxes): scene for scene in scenes}
            needed_truths = {True, False} if same_items else {label}
            if needed_truths <= scene_by_truth.keys():
                return BoxStatement(key, text + full_stop, label, scene_by_truth[label])


@cache
def _arrangement(seed: int, split: Split, towers: bool, item_set: int, number: int) -> ThreeBoxes:
    """Return an arrangement of a set of items; arrangement 0 draws the items."""
    rng = make_rng(seed, 0, f"boxes-{split}-{seed}-{towers}-{item_set}", f"arrangement {number}")
    if number == 0:
        return sample_boxes(rng, towers)
    return rearrange_boxes(rng, _arrangement(seed, split, towers, item_set, 0))
