"""A table-driven grammar of statements about three boxes: rules, quantities and nouns.

A rule of a table reads `NAME*weight of a box: draws "text" truth`. The weight is how often it makes
a sentence of its own; `of a box` (or `tower`) says that the text is said of one, and the sentence
says by the rule `SOME` of how many it holds. The draws are made in their order. A draw's value is

    NAME or NAME a          the phrase of another rule
    noun, count(4), x       what an entry of `_CHOICES` draws; a value that was drawn before
    <left|right>            one of some values
    either(.3, YES, NO)     the first with probability .3, else the second
    case(NAME, form)        the rule `NAME a` where `form` is "a", or `NAME` where there is none

The text holds values in braces ("there {n:be} {n:{x}}": a quantity with its verb and its noun),
rules ("{HAVING}"), and choices of equal probability ("<with|having>"). The truth joins phrases and
truth functions by "&" (default: the phrase `said`). What stands before a colon leads from all boxes
to one: `each`, `any`, `many` (so many as `n` says), `all` (the items of all boxes together).
"""

from __future__ import annotations

import operator
import re
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from vlp.scenes.nlvr_v1.boxes import COLOURS, SHAPES, SIZES, BoxItem, pick


def every(values: Iterable[bool | None]) -> bool | None:
    """Return whether all hold: False decides, then None."""
    found = set(values)
    return False if False in found else None if None in found else True


def some(values: Iterable[bool | None]) -> bool | None:
    """Return whether at least one holds: True decides, then None."""
    found = set(values)
    return True if True in found else None if None in found else False


def quantified(holds: Callable[[int], bool | None], values: Sequence[bool | None]) -> bool | None:
    """Return whether `holds` of the number of true values, if all readings of None agree."""
    sure = values.count(True)
    readings = {holds(sure + more) for more in range(1 + values.count(None))}
    return readings.pop() if len(readings) == 1 else None


def the_only(values: Iterable[bool | None]) -> bool | None:
    """Return the value if there is just one."""
    found = list(values)
    return found[0] if len(found) == 1 else None


Truth = bool | None  # None: a statement can be read either way.

_RULE = re.compile(r'([A-Z][\w ]*?)(?:\*(\d+))?(?: of a (box|tower))?: ([^"]*)"(.*)" ?(.*)')
_CALL = re.compile(r"(\w+)\((.*)\)")
_ARGUMENT = re.compile(r"[^,()]+(?:\([^)]*\))?")
_CHOICE = re.compile(r"<([^<>]*)>|\{([A-Z ]+)\}")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven")
_HOW = ("exactly", "exactly", "only", "just", "at least", "at least", "at most", "more than")
_BOUNDS: dict[str, Callable[[int, int], Truth]] = {
    "": lambda k, n: None if k > n else k == n,
    **dict.fromkeys(("exactly", "only", "just"), operator.eq),
    **dict.fromkeys(("at least", "atleast"), operator.ge),
    "at most": lambda k, n: None if k == 0 else k <= n,
    "more than": operator.gt,
    "a": lambda k, n: k >= 1,
    "no": lambda k, n: k == 0,
}


class Phrase(NamedTuple):
    """Words, and when they are true of what they are said of."""

    text: str
    true: Callable[[Any], Truth] = lambda about: True

    def __format__(self, spec: str) -> str:
        return self.text


class Count(NamedTuple):
    """A quantity in words, what it says of a number, and whether its noun is in the plural."""

    words: str
    holds: Callable[[int], Truth]
    plural: bool = False

    def __format__(self, noun: str) -> str:
        if noun == "be":
            return "are" if self.plural else "is"
        ending = ("es" if noun.endswith("x") else "s") if self.plural else ""
        return f"{self.words} {noun}{ending}" if noun else self.words


class Grammar:
    """Draws phrases from a table of rules, and the truth functions that it names."""

    def __init__(self, table: str, truths: Mapping[str, Callable[[Any, Any], Truth]]) -> None:
        self.truths, self.rules, names = truths, dict[str, list[str]](), list[str]()
        for line in re.split(r"\n(?=\S)", table.strip()):
            rule = re.sub(r"\n\s+", " ", line.strip())
            found = _RULE.fullmatch(rule if '"' in rule else rule + ' "{said}" said')
            assert found, line
            name, weight, *self.rules[found[1]] = found.groups("")
            names += [name] * int(weight or 0)
        self.sentences = tuple(partial(self.draw, name) for name in names)

    def draw(self, name: str, rng: np.random.Generator, given: Any = None) -> Phrase:
        """Draw the phrase of a rule, within another rule's draws if they are given."""
        about, drawn, text, truth = self.rules[name]
        d = SimpleNamespace(**(vars(given) if given else {"where": Phrase("")}))
        for named in filter(None, drawn.strip().split("; ")):
            key, token = named.split("=", 1)
            setattr(d, key, self._value(token.strip(), rng, d))

        def choose(found: re.Match[str]) -> str:
            return self.draw(found[2], rng, d).text if found[2] else pick(rng, found[1].split("|"))

        words = _CHOICE.sub(choose, text).format_map(vars(d))
        phrase = Phrase(words, partial(self._true, truth, d))
        some_box = SimpleNamespace(name=about, what=phrase)
        return self.draw("SOME", rng, some_box) if about else phrase

    def _true(self, truth: str, d: SimpleNamespace, what: Any) -> Truth:
        over, _, names = truth.rpartition(": ")
        if over == "all":
            what = [item for box in what for item in box]
        elif over:
            values = [self._true(names, d, box) for box in what]
            if over == "many":
                return quantified(d.n.holds, values)
            return every(values) if over == "each" else some(values)
        return every(
            self.truths[name](d, what) if name in self.truths else getattr(d, name).true(what)
            for name in filter(None, names.split(" & "))
        )

    def _value(self, token: str, rng: np.random.Generator, d: SimpleNamespace) -> Any:
        if token.startswith("<"):
            return self._value(pick(rng, token[1:-1].split("|")), rng, d)
        if found := _CALL.fullmatch(token):
            name, arguments = found[1], [part.strip() for part in _ARGUMENT.findall(found[2])]
            if name == "either":
                chosen = arguments[1 if rng.random() < float(arguments[0]) else 2]
                return self._value(chosen, rng, d)
            if name == "case":
                special = f"{arguments[0]} {operator.attrgetter(arguments[1])(d)}"
                return self.draw(special if special in self.rules else arguments[0], rng, d)
            return _CHOICES[name](rng, *(getattr(d, a, None) or literal_eval(a) for a in arguments))
        if token in self.rules:
            return self.draw(token, rng, d)
        if token in _CHOICES:
            return _CHOICES[token](rng)
        return getattr(d, token, int(token) if token.isdigit() else token)


def stated(words: str) -> Count:
    """Return the quantity that words such as "a", "two" and "at least two" state.

    A bare number can be read both as "just so many" and as "so many and perhaps more".
    """
    how, _, word = words.rpartition(" ")
    n = 1 if word == "a" else int(word) if word.isdigit() else _NUMBERS.index(word)
    holds = _BOUNDS[words if words in _BOUNDS else how]
    return Count(words, lambda k: holds(k, n), n > 1 or how == "more than")


def _numeral(rng: np.random.Generator, n: int) -> Count:
    """Draw how a number is written: in letters, or less often in digits."""
    return stated(str(n) if rng.random() < 0.35 else _NUMBERS[n])


def _number(rng: np.random.Generator, most: int) -> Count:
    return _numeral(rng, int(rng.integers(1, most + 1)))


def _count(rng: np.random.Generator, most: int) -> Count:
    """Draw a quantity of up to `most`, exact or bounded."""
    if rng.random() < 0.4:
        return stated("a") if rng.random() < 0.5 else _number(rng, most)
    n = int(rng.integers(1, most + 1))
    how, numeral = pick(rng, _HOW), _numeral(rng, n)
    how = pick(rng, ("at least", "atleast")) if how == "at least" else how
    return stated(f"{how} {numeral}")


def _noun(rng: np.random.Generator, sized: float = 0.05) -> Phrase:
    """Draw an item by colour, by shape, by both, or any; now and then by its size too."""
    tone = pick(rng, COLOURS) if rng.random() < 0.75 else ""
    shape = pick(rng, SHAPES) if rng.random() < 0.6 else ""
    size = pick(rng, SIZES) if rng.random() < sized else ""
    word = shape or pick(rng, ("item", "object"))

    def fits(item: BoxItem) -> bool:
        right_size = not size or item.size == SIZES[size]
        return tone in ("", item.colour) and shape in ("", item.shape) and right_size

    return Phrase(" ".join(part for part in (size, tone, word) if part), fits)


_CHOICES: dict[str, Callable[..., Any]] = {
    "A": lambda rng: stated("a"),
    "NO": lambda rng: stated("no"),
    "count": _count,
    "number": _number,
    "numeral": _numeral,
    "stated": lambda rng, words: stated(words),
    "noun": _noun,
    "thing": lambda rng: Phrase(pick(rng, ("item", "object"))),
    "tint": lambda rng: Phrase(tone := pick(rng, COLOURS), lambda item: item.colour == tone),
    "two_colours": lambda rng: [str(name) for name in rng.permutation(list(COLOURS))[:2]],
}
