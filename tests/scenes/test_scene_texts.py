import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from boxes_by_hand import centre_distance
from hypothesis import given
from hypothesis import strategies as st

from vlp.data.schema import Annotation, captions_of
from vlp.scenes.annotation import (
    annotation,
    snli_ve_annotation,
    statement_annotation,
    swap_annotation,
)
from vlp.scenes.captions import MAX_WORDS, PLACE_WORDS, captions, fill, words_of
from vlp.scenes.expressions import expressions, is_unique
from vlp.scenes.graph import COLOURS, SHAPES, Meaning, ObjectPhrase, holds, relation_holds
from vlp.scenes.negatives import sample_swap
from vlp.scenes.nlvr2 import sample_statement
from vlp.scenes.render import render
from vlp.scenes.sample import sample_scene
from vlp.scenes.snli_ve import LABELS, hides_nothing, label_of, sample_triple
from vlp.scenes.vqa import NUMBERS, questions

NAME = rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
CAPTION_NOUN = rf"(?:(small|little|large|big) )?{NAME}"
NOUN = rf"(?:(small|large) )?(?:({'|'.join(COLOURS)}) )?({'|'.join(SHAPES)}|object)"
RELATION = "left of|to the left of|right of|to the right of|above|over|below|under"
SYNONYMS = {"little": "small", "big": "large", "upper": "top", "lower": "bottom"}


def find(scene, colour, shape):
    return next((o for o in scene.objects if (o.colour, o.shape) == (colour, shape)), None)


def fitting(scene, size, colour, shape):
    return [
        obj
        for obj in scene.objects
        if size in (None, obj.size)
        and colour in (None, obj.colour)
        and shape in ("object", obj.shape)
    ]


def stands(one, words, other):
    return one is not other and centre_distance(one.box, words, other.box) > 0


def read_caption(text, scene):
    nouns = list(re.finditer(CAPTION_NOUN, text))
    objects = [find(scene, *noun.group(2, 3)) for noun in nouns]
    assert len(objects) == len(scene.objects), "every object is mentioned"
    for noun, obj in zip(nouns, objects):
        assert SYNONYMS.get(noun[1], noun[1]) in (None, obj.size)
    pair = re.search(rf"{CAPTION_NOUN},? (?:is )?({RELATION}) a", text)
    if pair:
        second = objects[[noun.start() for noun in nouns].index(pair.start()) + 1]
        first = find(scene, *pair.group(2, 3))
        assert centre_distance(first.box, pair[4], second.box) >= 8
    corner = re.search(rf"{NAME} (?:in|at) the (top|upper|bottom|lower) (left|right)\b", text)
    if corner:
        row = SYNONYMS.get(corner[3], corner[3])
        assert find(scene, *corner.group(1, 2)).place == f"{row} {corner[4]}"


@given(st.integers(0, 10**6))
def test_captions_are_true_short_and_mention_everything(index):
    scene = sample_scene(0, index)
    written = captions(scene)
    assert len({caption.text for caption in written}) == len(written) == 5
    for caption in written:
        assert holds(caption.meaning, scene)
        assert len(words_of(caption.text)) <= MAX_WORDS
        assert caption.text == caption.text.lower()
        read_caption(caption.text, scene)


def test_captions_are_fixed_by_the_scene_and_do_not_depend_on_the_image_size():
    for index in range(30):
        small, large = sample_scene(0, index), sample_scene(0, index, image_size=224)
        assert captions(small) == captions(small) == captions(large)
        assert captions(small, 2) == captions(small)[:2]
    with pytest.raises(ValueError, match="at least 1"):
        captions(sample_scene(0, 0), 0)


def test_claims_carry_what_the_pattern_says(make_scene):
    scene = make_scene("small red circle top", "large blue cross bottom right")
    caption = fill(scene, "N0 P0 , R01 N1", (1, 0), (True, False), [0] * 16)
    assert caption.text == "a blue cross at the bottom right, below a small red circle"
    cross = ObjectPhrase("cross", "blue", None, "bottom right")
    circle = ObjectPhrase("circle", "red", "small", None)
    assert caption.meaning == Meaning((cross, circle), ((0, "below", 1),))
    back = fill(scene, "N0 with N1 B10", (0, 1), (False, False), [0] * 16)
    assert back.text == "a red circle with a blue cross below it"
    assert back.meaning.relations == ((1, "below", 0),)
    only = fill(make_scene("small red circle top"), "only N0 P0", (0,), (True,), [0] * 16)
    assert only.meaning.is_exhaustive


def referents(text, scene):
    """The objects a reader would take an expression for, from its words alone."""
    whole = re.fullmatch(rf"the {NOUN}(?: (?:({RELATION}) the {NOUN}|((?:at|on|in) .*)))?", text)
    assert whole, text
    size, colour, shape, relation, *mark, place = whole.groups()
    candidates = fitting(scene, size, colour, shape)
    if place:
        name = next(name for name, words in PLACE_WORDS.items() if place in words)
        return [obj for obj in candidates if obj.place == name]
    if relation:
        marks = fitting(scene, *mark)
        return [obj for obj in candidates if any(stands(obj, relation, m) for m in marks)]
    return candidates


def test_each_expression_means_its_object_and_no_other():
    kinds = Counter()
    for index in range(300):
        scene = sample_scene(0, index)
        written = expressions(scene)
        assert written == expressions(scene)
        for expression in written:
            assert referents(expression.text, scene) == [scene.objects[expression.obj]]
            kinds["the " in expression.text[4:], len(scene.objects)] += 1
        # Where something stands always singles it out.
        assert {expression.obj for expression in written} == set(range(len(scene.objects)))
    assert len(kinds) >= 5


def test_vague_expressions_are_not_unique(make_scene):
    scene = make_scene("small red circle top left", "small blue circle top", "small red star right")
    texts = [expression.text for expression in expressions(scene)]
    assert "the circle" not in texts
    assert not any(re.match("the (object|circle) at the top$", text) for text in texts)
    for expression in expressions(scene):
        assert is_unique(expression, scene)
        assert not is_unique(expression._replace(obj=(expression.obj + 1) % 3), scene)


def answers(kind, text, scene):
    if kind in ("colour", "shape"):
        words = re.fullmatch(r"what \w+ is the (.*)\?", text)[1].split()
        looks = [(obj, (obj.size, obj.colour, obj.shape, "object")) for obj in scene.objects]
        return [getattr(obj, kind) for obj, look in looks if set(words) <= set(look)]
    if kind == "count":
        word = re.fullmatch(r"how many (.*) are there\?", text)[1]
        plurals = {"crosses": "cross", "objects": "object"}
        word = plurals.get(word, word.removesuffix(" objects").removesuffix("s"))
        fits = [o for o in scene.objects if word in (o.size, o.colour, o.shape, "object")]
        return [NUMBERS[len(fits)]]
    if kind == "neighbour":
        words, *mark = re.fullmatch(rf"what is (.*?) the {NAME}\?", text).groups()
        fits = [o for o in scene.objects if stands(o, words, find(scene, *mark))]
        return [f"{obj.colour} {obj.shape}" for obj in fits]
    if kind == "relation":
        parts = re.fullmatch(rf"is the {NAME} (.*?) the {NAME}\?", text).groups()
        true = stands(find(scene, *parts[:2]), parts[2], find(scene, *parts[3:]))
    else:
        obj = find(scene, *re.fullmatch(rf"(?:where is the|is there an?) {NAME}\?", text).groups())
        if kind == "place":
            return [obj.place]
        true = obj is not None
    return ["yes" if true else "no"]


def test_answers_are_right():
    kinds = Counter()
    for index in range(300):
        scene = sample_scene(0, index)
        for kind, text, answer in questions(scene):
            kinds[kind] += 1
            assert answers(kind, text, scene) == [answer]
    assert set(kinds) == {*["colour", "shape", "place", "count", "exists", "relation", "neighbour"]}
    assert min(kinds.values()) > 80


def lies(obj, words, size):
    [place] = [place for place, wordings in PLACE_WORDS.items() if words in wordings]
    x, y = (obj.box[axis] + obj.box[axis + 2] / 2 for axis in (0, 1))
    row = ["top", "centre", "bottom"][int(3 * y / size)]
    column = ["left", "centre", "right"][int(3 * x / size)]
    cell = " ".join(name for name in (row, column) if name != "centre")
    return cell == place.replace("centre", "")


def is_true(text, left, right):
    if "all objects in both" in text:
        return {obj.size for obj in left.objects + right.objects} == {text.split()[-1]}
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
        assert first != second, "either way round is true of two alike"
        assert {first, second} <= {obj.colour for obj in objects}, "only the place decides"
        pairs = (
            (a, b) for a in objects for b in objects if (a.colour, b.colour) == (first, second)
        )
        return any(stands(a, words, b) for a, b in pairs)
    place = re.fullmatch(r"in the (\w+) picture an? (\w+) object is (.*)", text)
    if place:
        side, colour, words = place.groups()
        shown = [obj for obj in (left if side == "left" else right).objects if obj.colour == colour]
        assert shown, "only the place decides"
        return any(lies(obj, words, left.image_size) for obj in shown)
    place = re.fullmatch(r"(?:both|exactly one of the) pictures shows? an object (.*)", text)
    word = text.split()[-1]
    shows = [
        any(
            lies(obj, place[1], scene.image_size) if place else word in (obj.shape, obj.colour)
            for obj in scene.objects
        )
        for scene in (left, right)
    ]
    return sum(shows) == (2 if text.startswith("both") else 1)


@pytest.mark.nightly
def test_labels_of_statements_are_right_and_independent_of_words():
    labels = defaultdict(list)
    for index in range(400):
        statement = sample_statement(0, index)
        assert is_true(statement.text, statement.left, statement.right) is statement.label, (
            statement
        )
        labels["all"].append(statement.label)
        labels[statement.text.split()[0]].append(statement.label)
    assert len(labels) >= 5
    for key, values in labels.items():
        assert abs(sum(values) / len(values) - 0.5) < 1.75 / len(values) ** 0.5, key


def test_statements_are_fixed_and_their_images_are_of_the_split():
    statement = sample_statement(3, 5, "val", 96)
    assert statement == sample_statement(3, 5, "val", 96)
    assert statement.left.image_size == statement.right.image_size == 96
    number = int(statement.left.key.removeprefix("val-3-"))
    assert sample_scene(3, number, "val", 96) == statement.left


def test_labels_of_hypotheses_follow_from_what_can_be_seen():
    labels = Counter()
    for index in range(200):
        triple = sample_triple(0, index)
        scene = triple.scene
        # The longest, since 'at the bottom in the middle' ends in another place's words.
        ends = [words for wordings in PLACE_WORDS.values() for words in wordings]
        ending = max((end for end in ends if triple.hypothesis.endswith(f" {end}")), key=len)
        place = next(name for name, wordings in PLACE_WORDS.items() if ending in wordings)
        looks = set(triple.hypothesis.split()[3:5]) - {"object", "at", "in", "on"}
        visible = [obj for obj in scene.objects if obj.place == place]
        if scene.cover == place:
            assert triple.label == "neutral"
        elif visible and looks <= {visible[0].colour, visible[0].shape}:
            assert triple.label == "entailment"
        else:
            assert triple.label == "contradiction"
        labels[triple.label] += 1
        assert scene.cover is not None
    assert set(labels) == set(LABELS)
    assert min(labels.values()) > 40


def test_the_curtain_leaves_every_object_in_view():
    for index in range(25):
        scene = sample_triple(1, index).scene
        bare, covered = (np.asarray(render(s)) for s in (scene._replace(cover=None), scene))
        for obj in scene.objects:
            x, y, width, height = (int(value) for value in obj.box)
            view = slice(y, y + height), slice(x, x + width)
            assert np.array_equal(covered[view], bare[view])
        assert not np.array_equal(bare, covered)


def test_labels_of_vague_hypotheses(make_scene):
    scene = make_scene("small red circle top left")._replace(cover="bottom")
    corner = scene._replace(cover="bottom right")
    for colour, place, image, label in (
        ("red", "top left", scene, "entailment"),
        ("blue", "top left", scene, "contradiction"),
        ("red", "centre", scene, "contradiction"),
        ("red", "bottom", scene, "neutral"),
        ("red", "top", scene, None),
        ("red", "bottom", corner, None),
        ("red", "bottom left", corner, "contradiction"),
    ):
        assert label_of(ObjectPhrase(colour=colour, place=place), image) == label
    assert not hides_nothing(scene, "top left")
    assert hides_nothing(scene, "bottom right")


def test_annotations_survive_json_and_words_point_to_boxes():
    for index in range(30):
        scene = sample_scene(0, index)
        stored = Annotation.model_validate_json(annotation(scene).to_json())
        assert captions_of(stored) == [caption.text for caption in captions(scene)]
        assert (stored.source, stored.image_id) == ("scenes", f"train-0-{index}")
        assert stored.boxes == [list(obj.box) for obj in scene.objects]
        assert [obj["box"] for obj in stored.scene["objects"]] == stored.boxes
        assert all(expression.box in stored.boxes for expression in stored.expressions)
        assert all(question.answers for question in stored.questions)
        assert len({question.id for question in stored.questions}) == len(stored.questions)
        for first, relation, second in stored.scene["relations"]:
            assert relation_holds(scene, first, relation, second)
        for word in stored.words:
            caption = captions_of(stored)[word.caption]
            assert words_of(caption)[word.index] == word.word
            owner = next(o for o in stored.scene["objects"] if o["box"] == word.box)
            assert owner[word.kind] == word.word
        assert len(stored.words) == 2 * len(stored.boxes) * len(stored.captions)


def test_samples_of_the_other_tasks_are_typed():
    pair = sample_swap(0, 0, "order")
    swap = Annotation.model_validate_json(swap_annotation(pair).to_json())
    assert captions_of(swap) == [pair.caption.text]
    assert swap.scene["swap"]["foil"] == pair.foil.text
    assert len(swap.scene["swap"]["twin"]["objects"]) == len(swap.boxes)
    statement = sample_statement(0, 0)
    stored = Annotation.model_validate_json(statement_annotation(statement).to_json())
    assert (stored.statement, stored.label) == (statement.text, statement.label)
    triple = sample_triple(0, 0)
    entailment = Annotation.model_validate_json(snli_ve_annotation(triple).to_json())
    assert (entailment.premise, entailment.hypothesis) == (triple.premise, triple.hypothesis)
    assert entailment.label == triple.label
    assert entailment.scene["cover"] == triple.scene.cover
