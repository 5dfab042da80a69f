from __future__ import annotations

import re
from collections import Counter

from vlp.scenes.captions import PLACE_WORDS
from vlp.scenes.expressions import expressions, is_unique
from vlp.scenes.graph import COLOURS, SHAPES
from vlp.scenes.sample import sample_scene

NOUN = rf"(?:(small|large) )?(?:({'|'.join(COLOURS)}) )?({'|'.join(SHAPES)}|object)"
RELATION = "left of|to the left of|right of|to the right of|above|over|below|under"


def _meant(text: str, scene) -> list[int]:
    """The objects a reader would take the phrase for, from its words alone."""
    whole = re.fullmatch(rf"the {NOUN}(?: (?:({RELATION}) the {NOUN}|((?:at|on|in) .*)))?", text)
    assert whole, text
    size, colour, shape, relation, *mark, place = whole.groups()
    candidates = _fitting(scene, size, colour, shape)
    if place:
        named = next(name for name, words in PLACE_WORDS.items() if place in words)
        return [at for at in candidates if scene.objects[at].place == named]
    if relation:
        marks = _fitting(scene, *mark)
        return [
            at
            for at in candidates
            if any(_stands(scene, at, relation, other) for other in marks if other != at)
        ]
    return candidates


def _fitting(scene, size, colour, shape) -> list[int]:
    return [
        number
        for number, obj in enumerate(scene.objects)
        if size in (None, obj.size)
        and colour in (None, obj.colour)
        and shape in ("object", obj.shape)
    ]


def _stands(scene, first, words, second) -> bool:
    one, other = scene.objects[first].box, scene.objects[second].box
    right = other[0] + other[2] / 2 - one[0] - one[2] / 2
    down = other[1] + other[3] / 2 - one[1] - one[3] / 2
    word = words.replace("to the ", "")
    distance = {"left of": right, "right of": -right, "above": down, "over": down}
    return distance.get(word, -down) > 0


def test_each_phrase_means_its_object_and_no_other():
    kinds = Counter()
    for index in range(300):
        scene = sample_scene(0, index)
        found = expressions(scene)
        assert found == expressions(scene)
        for expression in found:
            assert _meant(expression.text, scene) == [expression.obj]
            kinds["the " in expression.text[4:], len(scene.objects)] += 1
        # Where something stands always singles it out.
        assert {expression.obj for expression in found} == set(range(len(scene.objects)))
    assert len(kinds) == 6 - 1 or len(kinds) == 6


def test_vague_phrases_are_not_unique(make_scene):
    scene = make_scene("small red circle top left", "small blue circle top", "small red star right")
    texts = [expression.text for expression in expressions(scene)]
    assert "the circle" not in texts
    assert not any(re.match("the (object|circle) at the top$", text) for text in texts)
    for expression in expressions(scene):
        assert is_unique(expression, scene)
        assert not is_unique(expression._replace(obj=(expression.obj + 1) % 3), scene)
