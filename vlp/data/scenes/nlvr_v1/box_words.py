"""What statements about boxes are made of: quantities and nouns, and what they are true of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from vlp.data.scenes.nlvr_v1.boxes import COLOURS, SHAPES, SIZES, Box, BoxItem
from vlp.data.scenes.nlvr_v1.three_valued import every

Judge = Callable[[Sequence[Box]], bool | None]
"""Whether a statement is true of some boxes; None where it can be read either way."""

Told = tuple[str, Judge]
Value = TypeVar("Value")

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven")
_SIZE_WORDS = dict(zip(("small", "medium", "big"), SIZES))


class Count(NamedTuple):
    """A quantity in words, what it says of a number, and whether its noun is in the plural."""

    words: str
    holds: Callable[[int], bool | None]
    plural: bool

    @property
    def be(self) -> str:
        """The opening of a sentence."""
        return "there are" if self.plural else "there is"

    def of(self, noun: Noun) -> str:
        """Quantity and noun."""
        return f"{self.words} {noun.several if self.plural else noun.one}"


class Noun(NamedTuple):
    """Words for one item or block, and for several; what it fits."""

    one: str
    several: str
    fits: Callable[[BoxItem], bool]

    def among(self, items: Iterable[BoxItem]) -> int:
        """How many it fits."""
        return sum(map(self.fits, items))


A = Count("a", lambda found: found >= 1, False)
NONE = Count("no", lambda found: found == 0, False)
BLOCK = Noun("block", "blocks", lambda item: True)


def pick(rng: np.random.Generator, *values: Value) -> Value:
    """One of some values."""
    return values[int(rng.integers(len(values)))]


def number_word(rng: np.random.Generator, number: int) -> str:
    """A number in letters, or less often in digits."""
    return str(number) if rng.random() < 0.35 else _NUMBERS[number]


def number(rng: np.random.Generator, most: int) -> Count:
    """A bare number: people mean both "just so many" and "so many and perhaps more"."""
    least = int(rng.integers(1, most + 1))
    word = number_word(rng, least)
    return Count(word, lambda found: None if found > least else found == least, least > 1)


def count(rng: np.random.Generator, most: int) -> Count:
    """A quantity of up to `most`, exact or bounded."""
    if rng.random() < 0.4:
        return A if rng.random() < 0.5 else number(rng, most)
    n = int(rng.integers(1, most + 1))
    how = pick(rng, "exactly", "exactly", "only", "just", "at least", "at least", "at most", "more")
    plural = n > 1
    word = number_word(rng, n)
    if how == "at least":
        return Count(f"{pick(rng, 'at least', 'atleast')} {word}", lambda k: k >= n, plural)
    if how == "at most":
        return Count(f"at most {word}", lambda k: None if k == 0 else k <= n, plural)
    if how == "more":
        return Count(f"more than {word}", lambda k: k > n, True)
    return Count(f"{how} {word}", lambda k: k == n, plural)


def colour(rng: np.random.Generator) -> str:
    """One of the three."""
    return pick(rng, *COLOURS)


def anything(rng: np.random.Generator) -> Noun:
    """An item of any kind."""
    word = pick(rng, "item", "object")
    return Noun(word, f"{word}s", lambda item: True)


def two_colours(rng: np.random.Generator) -> tuple[str, str]:
    """Two that differ, in any order."""
    first, second, *_ = rng.permutation(list(COLOURS))
    return str(first), str(second)


def noun(rng: np.random.Generator, sized: float = 0.05) -> Noun:
    """An item by colour, by shape, by both, or any; now and then by its size too."""
    tone = colour(rng) if rng.random() < 0.75 else ""
    shape = pick(rng, *SHAPES) if rng.random() < 0.6 else ""
    size = pick(rng, *_SIZE_WORDS) if rng.random() < sized else ""
    word = shape or pick(rng, "item", "object")

    def fits(item: BoxItem) -> bool:
        return (
            tone in ("", item.colour)
            and shape in ("", item.shape)
            and (not size or item.size == _SIZE_WORDS[size])
        )

    one = " ".join(part for part in (size, tone, word) if part)
    return Noun(one, f"{one}s", fits)


def block(rng: np.random.Generator, tone: str | None = None) -> Noun:
    """A block of a colour."""
    chosen = tone or colour(rng)
    one = f"{chosen} block"
    return Noun(one, f"{one}s", lambda item: item.colour == chosen)


def just_of(box: Box, colours: set[str]) -> bool | None:
    """Whether a box has these colours; some would say so of one that has only some of them."""
    found = {item.colour for item in box}
    return found == colours or (None if found < colours else False)


def quantified(how_many: Count, values: Sequence[bool | None]) -> bool | None:
    """Whether so many hold, in whichever way those are read that can be read either way."""
    sure = values.count(True)
    readings = {how_many.holds(sure + more) for more in range(1 + values.count(None))}
    return readings.pop() if len(readings) == 1 else None


def boxes_with(
    rng: np.random.Generator, what: str, holds: Callable[[Box], bool | None], name: str = "box"
) -> Told:
    """So many boxes, or towers, of which something holds."""
    how_many = count(rng, 2) if rng.random() < 0.4 else A
    if rng.random() < 0.04:
        how_many = NONE
    several = f"{name}es" if name == "box" else f"{name}s"
    words = f"{how_many.words} {several if how_many.plural else name}"
    opening = "" if how_many is not A and rng.random() < 0.15 else f"{how_many.be} "
    return opening + f"{words} {what}", lambda boxes: quantified(how_many, [*map(holds, boxes)])


def uniform_or_without(
    rng: np.random.Generator, having: str, how_many: Count, thing: Noun, name: str = "box"
) -> Told:
    """So many boxes, or towers, with so many things that are all of a colour, or none of them."""
    tone, negated = colour(rng), rng.random() < 0.6
    verb = "are" if how_many.plural else "is"

    def holds(box: Box) -> bool | None:
        right = all((item.colour == tone) != negated for item in box)
        return every([how_many.holds(len(box)), right])

    words = f"{having} {how_many.of(thing)} that {verb} {'not ' if negated else ''}{tone}"
    return boxes_with(rng, words, holds, name)
