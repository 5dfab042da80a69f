import re
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from vlp.scenes.nlvr_v1 import (
    BOXES,
    COLOURS,
    SIDE,
    WIDTH,
    render_boxes,
    sample_box_statement,
    sample_boxes,
)

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven")
COUNT = (
    r"(?:(exactly|only|just|at least|atleast|at most|more than) )?(a|\d|" + "|".join(NUMBERS) + ")"
)
NOUN = r"(?:(yellow|blue|black) )?(item|object|circle|square|triangle|block)s?"


def _holds(how, word, count):
    number = NUMBERS.index(word) if word in NUMBERS else 1 if word == "a" else int(word)
    if word == "a":
        return count >= 1
    if how in ("at least", "atleast"):
        return count >= number
    if how == "more than":
        return count > number
    if how == "at most":
        return None if count == 0 else count <= number
    if how is None and word != "no" and count > number:
        return None
    return count == number


def _fits(item, colour, noun):
    return colour in (None, item.colour) and noun in ("item", "object", "block", item.shape)


def _true(text, boxes):
    """What a reader makes of some kinds of statement; "unread" of the others."""
    items = [item for box in boxes for item in box]
    if match := re.fullmatch(rf"there (?:is|are) {COUNT} {NOUN}", text):
        how, word, *noun = match.groups()
        return _holds(how, word, sum(_fits(item, *noun) for item in items))
    touching = rf"there (?:is|are) {COUNT} {NOUN} (?:closely )?touching (.*)"
    if match := re.fullmatch(touching, text):
        how, word, colour, noun, place = match.groups()

        def walls(item):
            edges = {"left": item.x, "top": item.y, "right": SIDE - item.x - item.size,
                     "bottom": SIDE - item.y - item.size}  # fmt: skip
            return [wall for wall, away in edges.items() if away == 0]

        def there(item):
            if wall := re.search("left|right|top|bottom|roof|base", place):
                return {"roof": "top", "base": "bottom"}.get(wall[0], wall[0]) in walls(item)
            return len(walls(item)) > (1 if "corner" in place else 0)

        number = sum(_fits(item, colour, noun) and there(item) for item in items)
        return _holds(how, word, number)
    if match := re.fullmatch(
        rf"there is a (?:box|tower) (?:with|(?:that|which) (?:has|contains)) {COUNT} {NOUN}", text
    ):
        how, word, *noun = match.groups()
        values = [_holds(how, word, sum(_fits(i, *noun) for i in box)) for box in boxes]
        return True if True in values else None if None in values else False
    if match := re.fullmatch(r"there is a tower with a (\w+) block at the (\w+)", text):
        colour, place = match.groups()
        lowest = {"top": min, "base": max, "bottom": max}[place]
        return any(lowest(box, key=lambda i: i.y).colour == colour for box in boxes)
    return "unread"


@pytest.mark.nightly
@pytest.mark.parametrize("same_items", [True, False])
def test_labels_are_right_and_independent_of_words(same_items):
    labels, read = defaultdict(list), 0
    for index in range(1000):
        statement = sample_box_statement(0, index, same_items=same_items)
        truth = _true(statement.text.rstrip("."), statement.scene.boxes)
        if truth != "unread":
            read += 1
            assert truth is statement.label, (statement.text, statement.scene)
        for word in {"all", *statement.text.split()}:
            labels[word].append(statement.label)
    assert read > 120
    for word, values in labels.items():
        assert abs(np.mean(values) - 0.5) < 2.0 / len(values) ** 0.5, word


def test_statements_are_deterministic_and_splits_differ():
    assert sample_box_statement(0, 5) == sample_box_statement(0, 5)
    items = [sample_box_statement(seed, 5, split) for seed in (0, 1) for split in ("train", "val")]
    assert len({(item.text, item.scene) for item in items}) == 4


@pytest.mark.parametrize("towers", [True, False])
def test_items_lie_in_their_box_and_apart(towers):
    rng = np.random.default_rng(0)
    walls = []
    for _ in range(100):
        scene = sample_boxes(rng, towers)
        assert len(scene.boxes) == BOXES
        for box in scene.boxes:
            assert 1 <= len(box) <= (4 if towers else 7)
            covered = np.zeros((SIDE, SIDE), dtype=int)
            for item in box:
                assert 0 <= item.x <= SIDE - item.size
                assert 0 <= item.y <= SIDE - item.size
                covered[item.y : item.y + item.size, item.x : item.x + item.size] += 1
                walls.append(bool(item.walls))
            assert covered.max() == 1
    if towers:
        assert all(item.y > above.y for box in scene.boxes for item, above in pairwise(box))
    else:
        assert 0.2 < np.mean(walls) < 0.6


def test_the_image_shows_each_item_in_its_colour():
    rng = np.random.default_rng(1)
    for towers in (True, False):
        scene = sample_boxes(rng, towers)
        image = render_boxes(scene)
        assert image.size == (WIDTH, SIDE)
        for number, box in enumerate(scene.boxes):
            for item in box:
                middle = number * 150 + item.x + item.size // 2, item.y + item.size // 2
                assert image.getpixel(middle) == COLOURS[item.colour]
        assert image.getpixel((125, 50)) == (128, 128, 128)
