from __future__ import annotations

import re
from collections import Counter

from vlp.scenes.graph import COLOURS, SHAPES
from vlp.scenes.sample import sample_scene
from vlp.scenes.vqa import NUMBERS, questions

NAME = rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"


def _find(scene, colour, shape):
    return next((o for o in scene.objects if (o.colour, o.shape) == (colour, shape)), None)


def _centre(obj) -> tuple[float, float]:
    return obj.box[0] + obj.box[2] / 2, obj.box[1] + obj.box[3] / 2


def _relation(one, words, other) -> bool:
    (x, y), (u, v) = _centre(one), _centre(other)
    word = words.replace("to the ", "")
    return {"left of": x < u, "right of": x > u, "above": y < v, "over": y < v}.get(word, y > v)


def test_answers_are_right():
    seen = Counter()
    for index in range(300):
        scene = sample_scene(0, index)
        for kind, text, answer in questions(scene):
            seen[kind] += 1
            if kind in ("colour", "shape"):
                words = re.fullmatch(r"what \w+ is the (.*)\?", text)[1].split()
                fits = [
                    obj
                    for obj in scene.objects
                    if all(w in (obj.size, obj.colour, obj.shape, "object") for w in words)
                ]
                assert [getattr(obj, kind) for obj in fits] == [answer]
            elif kind == "place":
                colour, shape = re.fullmatch(rf"where is the {NAME}\?", text).groups()
                assert _find(scene, colour, shape).place == answer
            elif kind == "count":
                word = re.fullmatch(r"how many (.*) are there\?", text)[1]
                plurals = {"crosses": "cross", "objects": "object"}
                word = plurals.get(word, word.removesuffix(" objects").removesuffix("s"))
                fits = [o for o in scene.objects if word in (o.size, o.colour, o.shape, "object")]
                assert NUMBERS.index(answer) == len(fits)
            elif kind == "exists":
                colour, shape = re.fullmatch(rf"is there an? {NAME}\?", text).groups()
                assert answer == ("yes" if _find(scene, colour, shape) else "no")
            elif kind == "relation":
                match = re.fullmatch(rf"is the {NAME} (.*?) the {NAME}\?", text).groups()
                one, other = _find(scene, *match[:2]), _find(scene, *match[3:])
                assert answer == ("yes" if _relation(one, match[2], other) else "no")
            else:
                words, colour, shape = re.fullmatch(rf"what is (.*?) the {NAME}\?", text).groups()
                mark = _find(scene, colour, shape)
                fits = [o for o in scene.objects if o is not mark and _relation(o, words, mark)]
                assert [f"{obj.colour} {obj.shape}" for obj in fits] == [answer]
    assert set(seen) == {
        "colour", "shape", "place", "count", "exists", "relation", "neighbour",
    }  # fmt: skip
    assert min(seen.values()) > 80
