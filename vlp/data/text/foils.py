"""Foils: false captions of an image, made from true ones by the exchange of a word or phrase.

The rules match words, not meaning (as FOIL-COCO, Shekhar et al. 2017, and VALSE, Parcalabescu et
al. 2022): some foils are still true, others odd. Scores on blank images measure how many are odd.
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
    """Make, for each caption of an image, at most one foil of each kind, in the order `FOIL_KINDS`.

    `subject_object` exchanges two beings, `binding` the colours of two things; other kinds replace
    a word or phrase (`left_right` all of them). `seed` and `key` choose among possible foils.
    """
    true_texts = {_normalise(caption) for caption in captions}
    # A word of another caption of the image may be true, so it makes no foil.
    all_captions = " . ".join(captions).lower()
    foils_of_captions = []
    for number, caption in enumerate(captions):
        foils = []
        for kind, rule in _RULES.items():
            texts = (apply_edits(caption, edits) for edits in rule(caption, all_captions))
            choices = [text for text in dict.fromkeys(texts) if _normalise(text) not in true_texts]
            if choices:
                rng = make_rng(seed, 0, key, f"foil {kind} {number}")
                foils.append(Foil(kind, choices[int(rng.integers(len(choices)))]))
        foils_of_captions.append(foils)
    return foils_of_captions


def apply_edits(caption: str, edits: Sequence[Edit]) -> str:
    """Apply edits to a caption; "a" or "an" before them and the first capital are adapted."""
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


def _subject_object(caption: str, all_captions: str) -> Iterator[list[Edit]]:
    for left, right in combinations(_BEING.finditer(caption), 2):
        (first, plural), (second, second_plural) = map(_singular, (left["noun"], right["noun"]))
        between = caption[left.end() : right.start()].strip().lower()
        beings = words.BEINGS[first], words.BEINGS[second]
        may_be_same = set(beings[0]) & set(beings[1])
        if plural != second_plural or may_be_same or _disagrees(caption, beings):
            continue
        if not re.search(words.SYMMETRIC, between):
            being = left[0]
            if left.start() == 0:  # without the capital of the caption
                being = being[:1].lower() + being[1:]
            yield [Edit(*left.span(), right[0]), Edit(*right.span(), being)]


def _colour(caption: str, all_captions: str) -> Iterator[list[Edit]]:
    for match in _COLOUR.finditer(caption):
        for new in words.COLOURS[match[1].lower()]:
            if not _mentions(all_captions, new) and _is_plausible(caption, match.end(), new):
                yield [Edit(*match.span(1), new)]


def _binding(caption: str, all_captions: str) -> Iterator[list[Edit]]:
    for left, right in combinations(_BOUND.finditer(caption), 2):
        first, second = left["colour"].lower(), right["colour"].lower()
        is_distinct = second in words.COLOURS[first] and left["noun"] != right["noun"]
        colours = ((left.end("colour"), second), (right.end("colour"), first))
        if is_distinct and all(_is_plausible(caption, *colour) for colour in colours):
            yield [Edit(*left.span("colour"), second), Edit(*right.span("colour"), first)]


def _number(caption: str, all_captions: str) -> Iterator[list[Edit]]:
    for match in _NUMBER.finditer(caption):
        index = words.NUMBERS.index(match[1].lower())
        for new in words.NUMBERS[max(index - 1, 0) : index + 3]:
            if not _mentions(all_captions, new):
                yield [Edit(*match.span(1), new)]


def _count(caption: str, all_captions: str) -> Iterator[list[Edit]]:
    match = _ALONE.match(caption)
    if match is None or _FINITE.search(caption):
        return
    plural = _plural(match["noun"].lower())
    if not _mentions(all_captions, f"{words.SEVERAL}|{plural}"):
        yield [Edit(*match.span(), f"two {match['more'].lower()}{plural}")]


def _phrases(kind: str) -> _Rule:
    table = [(_pattern(old), new) for old, new in words.PHRASES[kind]]

    def rule(caption: str, all_captions: str) -> Iterator[list[Edit]]:
        for pattern, opposites in table:
            for match in pattern.finditer(caption):
                for new in opposites:
                    if not _mentions(all_captions, new):
                        yield [Edit(*match.span(pattern.groups), new)]

    return rule


def _left_right(caption: str, all_captions: str) -> Iterator[list[Edit]]:
    sides = list(_SIDE.finditer(caption))
    if sides and not re.search(r"\b(left|right) (?:to|and) (?:the )?(left|right)\b", caption):
        opposite = {"left": "right", "right": "left"}
        yield [Edit(*side.span(1), opposite[side[1].lower()]) for side in sides]


def _disagrees(caption: str, beings: Sequence[str]) -> bool:
    """Return whether a pronoun of the caption excludes one of the beings."""
    return any(
        set(being) <= set(excluded) and _mentions(caption.lower(), pronouns)
        for pronouns, excluded in words.PRONOUNS.items()
        for being in beings
    )


def _is_plausible(caption: str, end: int, colour: str) -> bool:
    """Return whether the noun after `end` may have the colour: animals have few colours."""
    return colour in words.ANIMAL_COLOURS or _ANIMAL.match(caption, end) is None


def _mentions(text: str, choice: str) -> bool:
    return re.search(rf"(?<![\w-])(?:{choice})(?![\w-])", text) is not None


def _normalise(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _plural(noun: str) -> str:
    return words.PLURALS.get(noun, f"{noun}s")


def _singular(noun: str) -> tuple[str, bool]:
    """Return the singular of a noun of a being, and whether the noun is a plural."""
    return _SINGULAR.get(noun.lower(), noun.lower()), noun.lower() in _SINGULAR


def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){pattern}(?![\w'-])", re.IGNORECASE)


_join = "|".join

_SINGULAR = {_plural(noun): noun for noun in words.BEINGS if _plural(noun) != noun}
_PEOPLE = [name for name, beings in words.BEINGS.items() if set(beings) & set("mwbg")]
_PEOPLE += [_plural(name) for name in _PEOPLE]
_ANIMALS = [name for name in (*words.BEINGS, *_SINGULAR) if name not in _PEOPLE]
_MORE = rf"(?:(?!(?:{words.SMALL_WORDS})\b)[\w-]+ ){{0,3}}?"
_END = rf"(?=$|[ ]?[.,]| (?:{words.SMALL_WORDS})\b| [a-z]+(?:ing|s|ed)\b)"
_BEING = _pattern(
    rf"(?:an?|the|two|three|four|five) {_MORE}(?P<noun>{_join([*words.BEINGS, *_SINGULAR])}){_END}"
)
_COLOUR = _pattern(
    rf"({_join([*words.COLOURS])})(?= \w)"
    rf"(?! (?:and \w+ )?(?:{words.GUESSABLE}|{_join(_PEOPLE)})\b)"
)
_ANIMAL = re.compile(rf"(?: [\w-]+){{0,3}}? (?:{_join(_ANIMALS)})\b", re.IGNORECASE)
_BOUND = _pattern(
    rf"(?<!and )(?P<colour>{_join([*words.COLOURS])}) "
    rf"(?!(?:{words.GUESSABLE}|{_join(_PEOPLE)}|{_join([*words.COLOURS])}|{words.SMALL_WORDS})\b)"
    r"(?P<noun>[\w-]+)"
)
_NUMBER = _pattern(
    rf"({_join(words.NUMBERS)})(?! (?:wheel|piece|stor|way|tone|on|by|leg|seat|lane)\w*)"
)
_ALONE = _pattern(
    rf"(?:an?|one) (?P<more>(?!lone|single|solitary){_MORE})(?P<noun>{_join([*words.BEINGS])})"
    r"(?= \w+ing)"
)
_FINITE = _pattern(
    r"(?:is|was|has|his|hers?|its|him|himself|herself|itself|he|she|it|"
    rf"[a-z]+[^s\W]s (?:{words.SMALL_WORDS}))"
)
_SIDE = _pattern(words.LEFT_RIGHT)

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
