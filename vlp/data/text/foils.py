"""Foils: captions that are false of an image, each a true caption with one thing exchanged.

The rules read words, not meaning (after FOIL-COCO, Shekhar et al. 2017, and VALSE, Parcalabescu et
al. 2022): some foils are still true, others odd; a score of blank images measures the odd ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Literal, NamedTuple, get_args

from vlp.data.stream.rng import make_rng
from vlp.data.text import foil_words as words

FoilKind = Literal[
    "subject_object",
    "colour",
    "binding",
    "number",
    "count",
    "preposition",
    "left_right",
    "near_far",
]
FOIL_KINDS: tuple[FoilKind, ...] = get_args(FoilKind)


class Foil(NamedTuple):
    """A false caption and its kind."""

    kind: FoilKind
    text: str


class Edit(NamedTuple):
    """Replacement of the characters `start` to `end` of a caption."""

    start: int
    end: int
    new: str


def make_foils(captions: Sequence[str], seed: int, key: str) -> list[list[Foil]]:
    """Make for each caption of an image at most one foil of each of `FOIL_KINDS`, in that order.

    `subject_object` exchanges two beings, `binding` the colours of two things; the other kinds
    replace one word or phrase. New words occur in no caption of the image.
    """
    known = {_plain(caption) for caption in captions}
    everything = " . ".join(captions).lower()
    found = []
    for number, caption in enumerate(captions):
        foils = []
        for kind, rule in _RULES.items():
            texts = (edited(caption, edits) for edits in rule(caption, everything))
            choice = [text for text in dict.fromkeys(texts) if _plain(text) not in known]
            if choice:
                rng = make_rng(seed, 0, key, f"foil {kind} {number}")
                foils.append(Foil(kind, choice[int(rng.integers(len(choice)))]))
        found.append(foils)
    return found


def edited(caption: str, edits: Sequence[Edit]) -> str:
    """Return the caption with some spans replaced; articles and the first capital follow."""
    parts, done = [], 0
    for edit in sorted(edits):
        before, new = caption[done : edit.start], edit.new
        if edit.start == 0 and caption[:1].isupper():
            new = new[:1].upper() + new[1:]
        article = r"\1n " if new[:1].lower() in "aeiou" else r"\1 "
        parts += [re.sub(r"(?<![\w-])([aA])n? $", article, before), new]
        done = edit.end
    return "".join([*parts, caption[done:]])


_Rule = Callable[[str, str], Iterator[list[Edit]]]  # (caption, all captions)


def _subject_object(caption: str, everything: str) -> Iterator[list[Edit]]:
    for one, other in combinations(_BEING.finditer(caption), 2):
        (first, plural), (second, also) = map(_singular, (one["noun"], other["noun"]))
        between = caption[one.end() : other.start()].strip().lower()
        beings = words.BEINGS[first], words.BEINGS[second]
        if plural != also or set(beings[0]) & set(beings[1]) or _disagrees(caption, beings):
            continue
        if not re.search(words.SYMMETRIC, between):
            start = _lower_start(one[0]) if one.start() == 0 else one[0]
            yield [Edit(*one.span(), other[0]), Edit(*other.span(), start)]


def _colour(caption: str, everything: str) -> Iterator[list[Edit]]:
    for found in _COLOUR.finditer(caption):
        for new in words.COLOURS[found[1].lower()]:
            if not _says(everything, new) and _could_be(caption, found.end(), new):
                yield [Edit(*found.span(1), new)]


def _binding(caption: str, everything: str) -> Iterator[list[Edit]]:
    for one, other in combinations(_BOUND.finditer(caption), 2):
        first, second = one["colour"].lower(), other["colour"].lower()
        told_apart = second in words.COLOURS[first] and one["noun"] != other["noun"]
        places = ((one.end("colour"), second), (other.end("colour"), first))
        if told_apart and all(_could_be(caption, *place) for place in places):
            yield [Edit(*one.span("colour"), second), Edit(*other.span("colour"), first)]


def _number(caption: str, everything: str) -> Iterator[list[Edit]]:
    for found in _NUMBER.finditer(caption):
        place = words.NUMBERS.index(found[1].lower())
        for new in words.NUMBERS[max(place - 1, 0) : place + 3]:
            if not _says(everything, new):
                yield [Edit(*found.span(1), new)]


def _count(caption: str, everything: str) -> Iterator[list[Edit]]:
    found = _ALONE.match(caption)
    if found is None or _FINITE.search(caption):
        return
    plural = _plural(found["noun"].lower())
    if not _says(everything, f"{words.SEVERAL}|{plural}"):
        yield [Edit(*found.span(), f"two {found['more'].lower()}{plural}")]


def _phrases(kind: str) -> _Rule:
    table = [(_compiled(old), new) for old, new in words.PHRASES[kind]]

    def rule(caption: str, everything: str) -> Iterator[list[Edit]]:
        for pattern, opposites in table:
            for found in pattern.finditer(caption):
                for new in opposites:
                    if not _says(everything, new):
                        yield [Edit(*found.span(pattern.groups), new)]

    return rule


def _left_right(caption: str, everything: str) -> Iterator[list[Edit]]:
    found = list(_SIDE.finditer(caption))
    if found and not re.search(r"\b(left|right) (?:to|and) (?:the )?(left|right)\b", caption):
        turned = {"left": "right", "right": "left"}
        yield [Edit(*side.span(1), turned[side[1].lower()]) for side in found]


def _disagrees(caption: str, beings: Sequence[str]) -> bool:
    """Return whether a pronoun of the caption would tell that two beings changed places."""
    return any(
        set(being) <= set(others) and _says(caption.lower(), pronouns)
        for pronouns, others in words.PRONOUNS.items()
        for being in beings
    )


def _could_be(caption: str, end: int, colour: str) -> bool:
    """Return whether a thing named behind `end` may have a colour: animals have few."""
    return colour in words.OF_ANIMALS or _ANIMAL.match(caption, end) is None


def _says(text: str, choice: str) -> bool:
    return re.search(rf"(?<![\w-])(?:{choice})(?![\w-])", text) is not None


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _plural(noun: str) -> str:
    return words.PLURALS.get(noun, f"{noun}s")


def _singular(noun: str) -> tuple[str, bool]:
    """Return the singular of a noun of a being, and whether the noun is a plural."""
    return _SINGULAR.get(noun.lower(), noun.lower()), noun.lower() in _SINGULAR


def _lower_start(text: str) -> str:
    return text[:1].lower() + text[1:]


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){pattern}(?![\w'-])", re.IGNORECASE)


def _any(names: Sequence[str]) -> str:
    return "|".join(names)


_SINGULAR = {_plural(noun): noun for noun in words.BEINGS if _plural(noun) != noun}
_PEOPLE = [name for name, beings in words.BEINGS.items() if set(beings) & set("mwbg")]
_PEOPLE += [_plural(name) for name in _PEOPLE]
_ANIMALS = [name for name in (*words.BEINGS, *_SINGULAR) if name not in _PEOPLE]
_MORE = rf"(?:(?!(?:{words.SMALL_WORDS})\b)[\w-]+ ){{0,3}}?"
_END = rf"(?=$|[ ]?[.,]| (?:{words.SMALL_WORDS})\b| [a-z]+(?:ing|s|ed)\b)"
_BEING = _compiled(
    rf"(?:an?|the|two|three|four|five) {_MORE}(?P<noun>{_any([*words.BEINGS, *_SINGULAR])}){_END}"
)
_COLOUR = _compiled(
    rf"({_any([*words.COLOURS])})(?= \w)"
    rf"(?! (?:and \w+ )?(?:{words.GUESSABLE}|{_any(_PEOPLE)})\b)"
)
_ANIMAL = re.compile(rf"(?: [\w-]+){{0,3}}? (?:{_any(_ANIMALS)})\b", re.IGNORECASE)
_BOUND = _compiled(
    rf"(?<!and )(?P<colour>{_any([*words.COLOURS])}) "
    rf"(?!(?:{words.GUESSABLE}|{_any(_PEOPLE)}|{_any([*words.COLOURS])}|{words.SMALL_WORDS})\b)"
    r"(?P<noun>[\w-]+)"
)
_NUMBER = _compiled(
    rf"({_any(words.NUMBERS)})(?! (?:wheel|piece|stor|way|tone|on|by|leg|seat|lane)\w*)"
)
_ALONE = _compiled(
    rf"(?:an?|one) (?P<more>(?!lone|single|solitary){_MORE})(?P<noun>{_any([*words.BEINGS])})"
    r"(?= \w+ing)"
)
_FINITE = _compiled(
    r"(?:is|was|has|his|hers?|its|him|himself|herself|itself|he|she|it|"
    rf"[a-z]+[^s\W]s (?:{words.SMALL_WORDS}))"
)
_SIDE = _compiled(words.LEFT_RIGHT)

_RULES: dict[FoilKind, _Rule] = {
    "subject_object": _subject_object,
    "colour": _colour,
    "binding": _binding,
    "number": _number,
    "count": _count,
    "preposition": _phrases("preposition"),
    "left_right": _left_right,
    "near_far": _phrases("near_far"),
}
