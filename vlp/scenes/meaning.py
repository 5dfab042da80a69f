"""Claims of a sentence about an image, and their truth in a scene.

A sentence of the corpus is always written together with its claim, so truth is decided by the graph
and never by reading text back. Words are vague at their edges ('left of', 'at the top'), so there
are two readings: what holds in the strict one is surely true, what fails in the lenient one is
surely false, and nothing in the corpus is said or asked in between.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from vlp.scenes.graph import Obj, Scene, relation_holds


class ObjectPhrase(NamedTuple):
    """Attributes that a phrase gives of one object; None = not given."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None
    place: str | None = None

    def fits(self, obj: Obj, lenient: bool = False) -> bool:
        """Return whether the phrase fits the object; leniently, 'top left' is at the 'top' too."""
        return (
            self.shape in (None, obj.shape)
            and self.colour in (None, obj.colour)
            and self.size in (None, obj.size)
            and (
                self.place in (None, obj.place) or (lenient and self.place in obj.place.split(" "))
            )
        )


class Meaning(NamedTuple):
    """Different objects that fit `nouns` stand in `relations` (noun, relation, noun).

    With `alone`, the image holds nothing else.
    """

    nouns: tuple[ObjectPhrase, ...]
    relations: tuple[tuple[int, str, int], ...] = ()
    alone: bool = False


def referents(noun: ObjectPhrase, scene: Scene) -> list[int]:
    """Return the objects of the scene that fit the phrase in the strict reading."""
    return [number for number, obj in enumerate(scene.objects) if noun.fits(obj)]


def subjects(meaning: Meaning, scene: Scene, lenient: bool = False) -> list[int]:
    """Return the objects of the scene that can be the claim's first noun."""
    if meaning.alone and len(scene.objects) != len(meaning.nouns):
        return []
    fitting = [
        [number for number, obj in enumerate(scene.objects) if noun.fits(obj, lenient)]
        for noun in meaning.nouns
    ]
    return sorted(
        {
            chosen[0]
            for chosen in product(*fitting)
            if len(set(chosen)) == len(chosen)
            and all(
                relation_holds(scene, chosen[first], relation, chosen[second], lenient)
                for first, relation, second in meaning.relations
            )
        }
    )


def holds(meaning: Meaning, scene: Scene, lenient: bool = False) -> bool:
    """Return whether some choice of objects satisfies the claim."""
    return bool(subjects(meaning, scene, lenient))


def truth(meaning: Meaning, scene: Scene) -> bool | None:
    """Return True or False where the claim is surely so, None where readers may differ."""
    if holds(meaning, scene):
        return True
    return None if holds(meaning, scene, lenient=True) else False
