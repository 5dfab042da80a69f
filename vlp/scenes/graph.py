"""The scene graph: coloured shapes at places, their boxes, relations, and claims about them.

All text of an image is derived from its graph, so captions, questions and expressions agree.
"""

# Vague words ('left of', 'at the top') have a strict and a lenient reading. Texts of the corpus are
# true in the strict reading, or false even in the lenient one.

from __future__ import annotations

from itertools import permutations, product
from typing import NamedTuple

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "black", "white")
SHAPES = ("circle", "square", "triangle", "cross", "star")
SIZES = ("small", "large")
ROWS = ("top", "centre", "bottom")
COLUMNS = ("left", "centre", "right")
RELATIONS = ("left", "right", "above", "below")
NEARNESS = ("near", "far")
INVERSE = {"left": "right", "right": "left", "above": "below", "below": "above"}

LATTICE = 64  # positions are whole 64ths of the side, equal at every image size
CLEAR = 8  # 64ths between two centres of which one is clearly left of or above the other
NEAR, FAR = 16, 24  # 64ths between boxes: at most NEAR is near, at least FAR is far

Box = tuple[float, float, float, float]


def place_name(row: int, column: int) -> str:
    """Return the name of a cell of the 3 x 3 grid: 'top left', 'top', ..., 'bottom right'."""
    names = [ROWS[row]] * (row != 1) + [COLUMNS[column]] * (column != 1)
    return " ".join(names) or "centre"


PLACES = tuple(place_name(row, column) for row in range(3) for column in range(3))


class Obj(NamedTuple):
    """One object; `box` is its tight [x, y, width, height] in pixels, `place` one of `PLACES`."""

    shape: str
    colour: str
    size: str
    box: Box
    place: str

    def phrase(self, *attributes: str) -> ObjectPhrase:
        """Return the phrase with these attributes of the object."""
        return ObjectPhrase(**{name: getattr(self, name) for name in attributes})


class Scene(NamedTuple):
    """An image as a graph; colours are RGB in 0..255, sizes are in pixels."""

    key: str  # seeds all text of the scene
    image_size: int
    objects: tuple[Obj, ...]
    background: tuple[int, int, int]
    tints: tuple[tuple[int, int, int], ...]  # colour of each object
    cover: str | None = None  # place behind a curtain


def offset(first: Obj, second: Obj, image_size: int) -> tuple[int, int]:
    """Return (right, down) from the first centre to the second, in halves of 64ths of the side."""
    # Rounded to whole numbers, which are the same at every image size.
    scale = 2 * LATTICE / image_size
    x = second.box[0] - first.box[0] + (second.box[2] - first.box[2]) / 2
    y = second.box[1] - first.box[1] + (second.box[3] - first.box[3]) / 2
    return round(x * scale), round(y * scale)


def gap(first: Obj, second: Obj, image_size: int) -> int:
    """Return the wider of the gaps along x and y, in 64ths of the side; negative: overlap."""
    (x, y, width, height), (x2, y2, width2, height2) = first.box, second.box
    pixels = max(x2 - x - width, x - x2 - width2, y2 - y - height, y - y2 - height2)
    return round(pixels * LATTICE / image_size)


def nearness(scene: Scene, first: int, second: int) -> str | None:
    """Return 'near', 'far', or None between both."""
    length = gap(scene.objects[first], scene.objects[second], scene.image_size)
    return "near" if length <= NEAR else "far" if length >= FAR else None


def relation_holds(
    scene: Scene, first: int, relation: str, second: int, lenient: bool = False
) -> bool:
    """Return whether object `first` is clearly (or with `lenient` perhaps) `relation` of `second`.

    'left' and 'above' may both hold. Centres closer than `CLEAR` have no clear relation.
    """
    # Leniently any offset is enough, and 'near' and 'far' hold unless the opposite clearly does.
    if relation in NEARNESS:
        measured = nearness(scene, first, second)
        return measured == relation or (lenient and measured is None)
    right, down = offset(scene.objects[first], scene.objects[second], scene.image_size)
    distance = {"left": right, "right": -right, "above": down, "below": -down}[relation]
    return distance >= (1 if lenient else 2 * CLEAR)


def main_relation(scene: Scene, first: int, second: int) -> str:
    """Return the relation of two objects along the axis on which their centres differ more."""
    right, down = offset(scene.objects[first], scene.objects[second], scene.image_size)
    if abs(right) >= abs(down):
        return "left" if right > 0 else "right"
    return "above" if down > 0 else "below"


def relations(scene: Scene) -> list[tuple[int, str, int]]:
    """List the clear relations of all pairs, as (first object, relation, second object)."""
    return [
        (first, relation, second)
        for first, second in permutations(range(len(scene.objects)), 2)
        for relation in RELATIONS
        if relation_holds(scene, first, relation, second)
    ]


class ObjectPhrase(NamedTuple):
    """Attributes in a phrase about an object; None: any."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None
    place: str | None = None

    def fits(self, obj: Obj, lenient: bool = False) -> bool:
        """Return whether the phrase fits the object; leniently, 'top' also fits 'top left'."""
        return (
            self.shape in (None, obj.shape)
            and self.colour in (None, obj.colour)
            and self.size in (None, obj.size)
            and (
                self.place in (None, obj.place) or (lenient and self.place in obj.place.split(" "))
            )
        )


class Meaning(NamedTuple):
    """A claim that the scene has objects that fit `nouns`, in `relations`.

    Relations are (noun index, relation, noun index). `is_exhaustive`: there are no other objects.
    """

    nouns: tuple[ObjectPhrase, ...]
    relations: tuple[tuple[int, str, int], ...] = ()
    is_exhaustive: bool = False


def referents(noun: ObjectPhrase, scene: Scene, lenient: bool = False) -> list[int]:
    """Return the objects of the scene that fit the phrase."""
    return [number for number, obj in enumerate(scene.objects) if noun.fits(obj, lenient)]


def subjects(meaning: Meaning, scene: Scene, lenient: bool = False) -> list[int]:
    """Return the objects that can be the claim's first noun; empty if the claim is false."""
    if meaning.is_exhaustive and len(scene.objects) != len(meaning.nouns):
        return []
    candidates = [referents(noun, scene, lenient) for noun in meaning.nouns]
    return sorted(
        {
            assignment[0]
            for assignment in product(*candidates)
            if len(set(assignment)) == len(assignment)  # distinct objects
            and all(
                relation_holds(scene, assignment[first], relation, assignment[second], lenient)
                for first, relation, second in meaning.relations
            )
        }
    )


def holds(meaning: Meaning, scene: Scene, lenient: bool = False) -> bool:
    """Return whether the claim is true of the scene."""
    return bool(subjects(meaning, scene, lenient))


def truth(meaning: Meaning, scene: Scene) -> bool | None:
    """Return whether the claim is true; None if only in the lenient reading."""
    if holds(meaning, scene):
        return True
    return None if holds(meaning, scene, lenient=True) else False
