from __future__ import annotations

import re
from collections import defaultdict

import pytest

from vlp.scenes.captions import PLACE_WORDS
from vlp.scenes.nlvr2 import sample_statement
from vlp.scenes.sample import sample_scene


def _true(text: str, left, right) -> bool:
    """Read the statement and look at the two images."""
    if "all objects in both" in text:
        size = text.split()[-1]
        return {obj.size for obj in left.objects + right.objects} == {size}
    if "in all" in text:
        number = ["three", "four", "five"].index(text.split()[2]) + 3
        return len(left.objects) + len(right.objects) == number
    if "same number" in text:
        return len(left.objects) == len(right.objects)
    if "more" in text or "fewer" in text:
        difference = len(left.objects) - len(right.objects)
        return (difference if "more" in text else -difference) > 0
    relation = re.fullmatch(r"in the (\w+) picture an? (\w+) object is (.*) an? (\w+) object", text)
    if relation:
        side, first, words, second = relation.groups()
        objects = (left if side == "left" else right).objects
        colours = [obj.colour for obj in objects]
        assert first != second, "either way round is true of two alike"
        assert {first, second} <= set(colours), "only the place decides"
        return any(
            one is not other
            and (one.colour, other.colour) == (first, second)
            and _stands(one.box, words, other.box)
            for one in objects
            for other in objects
        )
    place = re.fullmatch(r"in the (\w+) picture an? (\w+) object is (.*)", text)
    if place:
        side, colour, words = place.groups()
        shown = [obj for obj in (left if side == "left" else right).objects if obj.colour == colour]
        assert shown, "only the place decides"
        return any(_lies(obj, words, left.image_size) for obj in shown)
    there = re.fullmatch(r"(both|exactly one of the) pictures shows? an object (.*)", text)
    if there:
        lie = [
            any(_lies(obj, there[2], scene.image_size) for obj in scene.objects)
            for scene in (left, right)
        ]
        return sum(lie) == (2 if there[1] == "both" else 1)
    word = text.split()[-1]
    shows = [
        any(word in (obj.shape, obj.colour) for obj in scene.objects) for scene in (left, right)
    ]
    return sum(shows) == (2 if text.startswith("both") else 1)


def _stands(one, words, other) -> bool:
    right = other[0] + other[2] / 2 - one[0] - one[2] / 2
    down = other[1] + other[3] / 2 - one[1] - one[3] / 2
    word = words.replace("to the ", "")
    distance = {"left of": right, "right of": -right, "above": down, "over": down}
    return distance.get(word, -down) > 0


def _lies(obj, words, size) -> bool:
    """In the ninth of the image that the words name."""
    [place] = [place for place, said in PLACE_WORDS.items() if words in said]
    x, y = (obj.box[axis] + obj.box[axis + 2] / 2 for axis in (0, 1))
    names = (
        ["top", "centre", "bottom"][int(3 * y / size)],
        ["left", "centre", "right"][int(3 * x / size)],
    )
    return " ".join(name for name in names if name != "centre") == place.replace("centre", "")


@pytest.mark.nightly
def test_labels_are_right_and_the_words_say_nothing():
    labels = defaultdict(list)
    for index in range(400):
        told = sample_statement(0, index)
        assert _true(told.text, told.left, told.right) is told.label, told.text
        labels["all"].append(told.label)
        labels[told.text.split()[0]].append(told.label)
    assert len(labels) >= 5
    for key, values in labels.items():
        assert abs(sum(values) / len(values) - 0.5) < 1.75 / len(values) ** 0.5, key


def test_statements_are_fixed_and_their_images_are_of_the_split():
    told = sample_statement(3, 5, "val", 96)
    assert told == sample_statement(3, 5, "val", 96)
    assert told.left.image_size == told.right.image_size == 96
    assert told.left.key.startswith("val-3-")
    number = int(told.left.key.rsplit("-", 1)[1])
    assert sample_scene(3, number, "val", 96) == told.left
