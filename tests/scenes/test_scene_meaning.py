from __future__ import annotations

from itertools import permutations

import pytest

from vlp.scenes.graph import Meaning, ObjectPhrase, holds, subjects, truth
from vlp.scenes.sample import sample_scene

RED_CIRCLE = ObjectPhrase(shape="circle", colour="red")


def test_each_noun_needs_an_object_of_its_own(make_scene):
    scene = make_scene("small red circle top left", "large red square right")
    assert holds(Meaning((ObjectPhrase(colour="red"), ObjectPhrase(colour="red"))), scene)
    assert not holds(Meaning((RED_CIRCLE, RED_CIRCLE)), scene)


def test_relations_bind_the_nouns(make_scene):
    scene = make_scene("small red circle left", "small blue square right")
    square = ObjectPhrase(shape="square")
    assert truth(Meaning((RED_CIRCLE, square), ((0, "left", 1),)), scene) is True
    assert truth(Meaning((RED_CIRCLE, square), ((0, "right", 1),)), scene) is False
    assert truth(Meaning((square, RED_CIRCLE), ((0, "left", 1),)), scene) is False
    assert truth(Meaning((square, RED_CIRCLE), ((1, "left", 0),)), scene) is True


def test_vague_claims_are_neither_true_nor_false(make_scene):
    scene = make_scene("small red circle top left")
    assert truth(Meaning((ObjectPhrase(colour="red", place="top"),)), scene) is None
    assert truth(Meaning((ObjectPhrase(colour="red", place="left"),)), scene) is None
    assert truth(Meaning((ObjectPhrase(colour="red", place="bottom"),)), scene) is False
    assert truth(Meaning((ObjectPhrase(colour="red", place="top left"),)), scene) is True
    moved = make_scene("small red circle left", "small blue square right")
    red, blue = moved.objects
    # Nearly level: three pixels higher is neither 'above' nor surely not above.
    nearly = moved._replace(objects=(red, blue._replace(box=(46.0, 28.0, 14.0, 14.0))))
    meaning = Meaning((RED_CIRCLE, ObjectPhrase(shape="square")), ((0, "above", 1),))
    assert truth(meaning, nearly) is None


@pytest.mark.parametrize("lenient", [False, True])
def test_subjects_against_trying_every_assignment(lenient):
    answers = set()
    for index in range(60):
        scene = sample_scene(3, index)
        if len(scene.objects) < 3:
            continue
        obj = scene.objects[index % 3]
        for relation in ("left", "above"):
            nouns = (ObjectPhrase(), ObjectPhrase(size=obj.size), ObjectPhrase(colour=obj.colour))
            meaning = Meaning(nouns, ((0, relation, 1), (1, relation, 2)))
            expected = sorted(
                {
                    chosen[0]
                    for chosen in permutations(range(3))
                    if scene.objects[chosen[1]].size == obj.size
                    and scene.objects[chosen[2]].colour == obj.colour
                    and _before(scene, chosen[0], chosen[1], relation, lenient)
                    and _before(scene, chosen[1], chosen[2], relation, lenient)
                }
            )
            assert subjects(meaning, scene, lenient) == expected
            answers.add(bool(expected))
    assert answers == {True, False}


def _before(scene, first, second, relation, lenient) -> bool:
    axis = 0 if relation == "left" else 1
    one, other = scene.objects[first].box, scene.objects[second].box
    distance = other[axis] + other[axis + 2] / 2 - one[axis] - one[axis + 2] / 2
    return distance > 0 if lenient else distance >= 8
