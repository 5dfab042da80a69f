"""Captions that identify their image by each object's colour, shape, size, place or relation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vlp.data.stream.rng import make_rng
from vlp.scenes.graph import Meaning, Scene, main_relation, nearness

MAX_WORDS = 18  # with punctuation; 20 tokens with [CLS] and [SEP]

CAPTIONS = 5

# Slots: `N0` is the noun phrase of object 0 with article, `T0` without; `P0` its place, `C0` the
# same in telegram style; `R01` the relation of object 0 to object 1, `B01` the same with object 1
# as 'it'; `A01` near or far. Other words are literal.
# Most patterns give the place of every object: with captions of relations, a few minutes of
# training reach much lower recall.
PATTERNS = {
    1: (
        "N0 P0",
        "there is N0 P0",
        "P0 there is N0",
        "P0 , N0",
        "a picture of N0 P0",
        "one T0 P0",
        "T0 , C0",
        "only N0 P0",
        "nothing but N0 P0",
    ),
    2: (
        "N0 P0 and N1 P1",
        "N0 P0 , N1 P1",
        "there is N0 P0 and N1 P1",
        "P0 N0 , P1 N1",
        "T0 C0 , T1 C1",
        "C0 T0 , C1 T1",
        "N0 P0 , R01 N1",
        "N0 R01 N1",
        "N0 is R01 N1",
        "N0 with N1 B10",
    ),
    3: (
        "T0 C0 , T1 C1 , T2 C2",
        "T0 C0 , T1 C1 and T2 C2",
        "C0 T0 , C1 T1 , C2 T2",
        "C0 T0 , C1 T1 and C2 T2",
        "N0 C0 , N1 C1 , N2 C2",
        "T0 R01 T1 , T2 C2",
        "N0 R01 N1 , and N2 P2",
        "N0 R01 N1 and R02 N2",
        "N0 with N1 B10 and N2 B20",
    ),
}
# Patterns that another object in the image makes false.
EXHAUSTIVE = ("only N0 P0", "nothing but N0 P0", "one T0 P0")

RELATION_WORDS = {
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
BACK_WORDS = {
    "left": ("to its left", "on its left"),
    "right": ("to its right", "on its right"),
    "above": ("above it", "over it"),
    "below": ("below it", "under it"),
}
# Single words: in a phrase of two, a masked word would follow from the other.
NEARNESS_WORDS = {"near": ("close", "together"), "far": ("apart", "distant")}
SIZE_WORDS = {"small": ("small", "small", "little"), "large": ("large", "large", "big")}

PLACE_WORDS = {
    "top left": ("at the top left", "in the top left corner", "in the upper left"),
    "top": ("at the top", "at the top centre", "at the top in the middle"),
    "top right": ("at the top right", "in the top right corner", "in the upper right"),
    "left": ("on the left", "at the left edge", "at the middle left"),
    "centre": ("in the centre", "in the middle", "at the centre"),
    "right": ("on the right", "at the right edge", "at the middle right"),
    "bottom left": ("at the bottom left", "in the bottom left corner", "in the lower left"),
    "bottom": ("at the bottom", "at the bottom centre", "at the bottom in the middle"),
    "bottom right": ("at the bottom right", "in the bottom right corner", "in the lower right"),
}

_WORDINGS = {"R": RELATION_WORDS, "B": BACK_WORDS, "A": NEARNESS_WORDS}

_SLOT = re.compile(r"([NTPCRBA])(\d)(\d?)")


class ObjectWord(NamedTuple):
    """Word `position` (as in `words_of`), which names the colour or shape of object `obj`."""

    position: int
    word: str
    kind: str
    obj: int


class SceneCaption(NamedTuple):
    """A sentence, its claim, and the words that name objects."""

    text: str
    meaning: Meaning
    words: tuple[ObjectWord, ...]


def article(word: str) -> str:
    """Return 'a' or 'an' for a word."""
    return "an" if word[0] in "aeiou" else "a"


def captions(scene: Scene, count: int = CAPTIONS) -> list[SceneCaption]:
    """Write up to `count` different captions, seeded by the scene's key."""
    if count < 1:
        raise ValueError(f"captions must be at least 1, got {count}")
    rng = make_rng(0, 0, scene.key, "captions")
    patterns = PATTERNS[len(scene.objects)]
    written: dict[str, SceneCaption] = {}
    # A round uses each pattern once; texts that repeat or are too long make more rounds necessary.
    for _ in range(count):
        for pattern in rng.permutation(len(patterns)):
            caption = write(scene, patterns[int(pattern)], rng)
            if caption is not None:
                written.setdefault(caption.text, caption)
            if len(written) == count:
                return list(written.values())
    return list(written.values())


def write(scene: Scene, pattern: str, rng: np.random.Generator) -> SceneCaption | None:
    """Fill a pattern for the scene; None if it has more than `MAX_WORDS` even without sizes."""
    count = len(scene.objects)
    order = [int(number) for number in rng.permutation(count)]
    rng.random(count)  # unused; without this draw, later draws would change
    sizes = [True] * count
    style = draw_style(rng)
    # Leave out sizes one by one, in random order, until the caption is short enough.
    while True:
        caption = fill(scene, pattern, order, sizes, style)
        if len(words_of(caption.text)) <= MAX_WORDS:
            return caption
        remaining = [number for number in range(count) if sizes[number]]
        if not remaining:
            return None
        sizes[remaining[int(rng.integers(len(remaining)))]] = False


def words_of(text: str) -> list[str]:
    """Split a text into words and punctuation marks, as BERT does before word pieces."""
    return re.findall(r"\w+|[^\w\s]", text)


def draw_style(rng: np.random.Generator) -> list[int]:
    """Draw numbers that choose a synonym for each slot of a pattern."""
    return [int(number) for number in rng.integers(1 << 16, size=16)]


def fill(
    scene: Scene, pattern: str, order: Sequence[int], sizes: Sequence[bool], style: Sequence[int]
) -> SceneCaption:
    """Fill a pattern for the scene.

    Args:
        order: indices of the scene's objects, in the order of the pattern's objects.
        sizes: whether to name the size of each object of the scene.
        style: numbers of `draw_style`, which choose among synonyms.
    """
    words: list[str] = []
    object_words: list[ObjectWord] = []
    relations: list[tuple[int, str, int]] = []
    with_place: set[int] = set()  # objects of the pattern whose place it names
    for position, token in enumerate(pattern.split()):
        slot = _SLOT.fullmatch(token)
        if slot is None:
            words.append(token)
            continue
        kind, first = slot[1], int(slot[2])
        obj = scene.objects[order[first]]
        pick = style[position]
        if kind in "NT":
            phrase = [_choose(SIZE_WORDS[obj.size], pick)] if sizes[order[first]] else []
            phrase += [obj.colour, obj.shape]
            if kind == "N":
                words.append(article(phrase[0]))
            words += phrase
            end = len(words)
            object_words.append(ObjectWord(end - 2, obj.colour, "colour", order[first]))
            object_words.append(ObjectWord(end - 1, obj.shape, "shape", order[first]))
        elif kind in "PC":
            place = _choose(PLACE_WORDS[obj.place], pick) if kind == "P" else obj.place
            words += place.split()
            with_place.add(first)
        else:
            second = int(slot[3])
            pair = order[first], order[second]
            relation = nearness(scene, *pair) if kind == "A" else main_relation(scene, *pair)
            if relation is None:
                raise ValueError(f"{scene.key}: objects {pair} are neither near nor far")
            relations.append((first, relation, second))
            words += _choose(_WORDINGS[kind][relation], pick).split()
    nouns = tuple(
        scene.objects[number].phrase(
            "shape", "colour", *["size"] * sizes[number], *["place"] * (position in with_place)
        )
        for position, number in enumerate(order)
    )
    # The claim says what the words say, so that other images can be checked against it.
    meaning = Meaning(nouns, tuple(relations), is_exhaustive=pattern in EXHAUSTIVE)
    return SceneCaption(" ".join(words).replace(" ,", ","), meaning, tuple(object_words))


def _choose(choices: tuple[str, ...], pick: int) -> str:
    return choices[pick % len(choices)]
