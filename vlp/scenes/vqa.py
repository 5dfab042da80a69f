"""Questions about a scene, each with a single right answer."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from vlp.data.stream.rng import make_rng
from vlp.scenes.captions import RELATION_WORDS, article
from vlp.scenes.expressions import noun_words
from vlp.scenes.graph import (
    COLOURS,
    INVERSE,
    SHAPES,
    Meaning,
    ObjectPhrase,
    Scene,
    main_relation,
    referents,
    subjects,
    truth,
)

NUMBERS = ("zero", "one", "two", "three")


class SceneQuestion(NamedTuple):
    """A question, its answer and its kind."""

    kind: str
    question: str
    answer: str


def questions(scene: Scene) -> list[SceneQuestion]:
    """Write a question of each kind that the scene allows."""
    rng = make_rng(0, 0, scene.key, "questions")
    number = int(rng.integers(len(scene.objects)))
    colour = partial(_attribute, "colour", "shape")
    shape = partial(_attribute, "shape", "colour")
    makers = (colour, shape, _place, _count, _exists, _relation, _neighbour)
    drafts = (maker(scene, number, rng) for maker in makers)
    return [question for question in drafts if question is not None]


def _attribute(
    attribute: str, clue: str, scene: Scene, number: int, rng: np.random.Generator
) -> SceneQuestion | None:
    obj = scene.objects[number]
    nouns = (obj.phrase(clue), obj.phrase(clue, "size"))
    noun = next((noun for noun in nouns if len(referents(noun, scene)) == 1), None)
    if noun is None:
        return None
    return SceneQuestion(
        attribute, f"what {attribute} is the {noun_words(noun)}?", getattr(obj, attribute)
    )


def _place(scene: Scene, number: int, rng: np.random.Generator) -> SceneQuestion | None:
    obj = scene.objects[number]
    words = noun_words(obj.phrase("shape", "colour"))
    return SceneQuestion("place", f"where is the {words}?", obj.place)


def _count(scene: Scene, number: int, rng: np.random.Generator) -> SceneQuestion | None:
    obj = scene.objects[number]
    nouns = (ObjectPhrase(), obj.phrase("shape"), obj.phrase("colour"), obj.phrase("size"))
    noun = nouns[int(rng.integers(len(nouns)))]
    answer = NUMBERS[len(referents(noun, scene))]
    plural = "crosses" if noun.shape == "cross" else noun_words(noun) + "s"
    return SceneQuestion("count", f"how many {plural} are there?", answer)


def _exists(scene: Scene, number: int, rng: np.random.Generator) -> SceneQuestion | None:
    names = {(obj.colour, obj.shape) for obj in scene.objects}
    # Yes and no are equally likely for each colour and shape, so the text predicts nothing.
    if rng.random() < 0.5:
        colour, shape = scene.objects[number].colour, scene.objects[number].shape
    else:
        # Half of the false questions combine colour and shape of different objects of the image, so
        # that the answer needs the binding of both.
        colours = [obj.colour for obj in scene.objects] if rng.random() < 0.5 else list(COLOURS)
        shapes = [obj.shape for obj in scene.objects] if len(colours) < len(COLOURS) else [*SHAPES]
        absent = [(c, s) for c in colours for s in shapes if (c, s) not in names]
        if not absent:
            absent = [(c, s) for c in COLOURS for s in SHAPES if (c, s) not in names]
        colour, shape = absent[int(rng.integers(len(absent)))]
    answer = "yes" if (colour, shape) in names else "no"
    return SceneQuestion("exists", f"is there {article(colour)} {colour} {shape}?", answer)


def _relation(scene: Scene, number: int, rng: np.random.Generator) -> SceneQuestion | None:
    if len(scene.objects) < 2:
        return None
    other = (number + 1 + int(rng.integers(len(scene.objects) - 1))) % len(scene.objects)
    relation = main_relation(scene, number, other)
    relation = INVERSE[relation] if rng.random() < 0.5 else relation
    nouns = tuple(scene.objects[index].phrase("shape", "colour") for index in (number, other))
    answer = "yes" if truth(Meaning(nouns, ((0, relation, 1),)), scene) else "no"
    words = RELATION_WORDS[relation][int(rng.integers(2))]
    text = f"is the {noun_words(nouns[0])} {words} the {noun_words(nouns[1])}?"
    return SceneQuestion("relation", text, answer)


def _neighbour(scene: Scene, number: int, rng: np.random.Generator) -> SceneQuestion | None:
    if len(scene.objects) < 2:
        return None
    other = (number + 1 + int(rng.integers(len(scene.objects) - 1))) % len(scene.objects)
    relation = main_relation(scene, other, number)
    landmark = scene.objects[number].phrase("shape", "colour")
    meaning = Meaning((ObjectPhrase(), landmark), ((0, relation, 1),))
    if subjects(meaning, scene, lenient=True) != [other]:
        return None
    words = RELATION_WORDS[relation][int(rng.integers(2))]
    answer = f"{scene.objects[other].colour} {scene.objects[other].shape}"
    return SceneQuestion("neighbour", f"what is {words} the {noun_words(landmark)}?", answer)
