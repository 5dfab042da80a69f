from __future__ import annotations

from vlp.data.schema import Annotation, captions_of
from vlp.scenes.annotation import (
    annotation,
    snli_ve_annotation,
    statement_annotation,
    swap_annotation,
)
from vlp.scenes.captions import captions, words_of
from vlp.scenes.graph import relation_holds
from vlp.scenes.negatives import sample_swap
from vlp.scenes.nlvr2 import sample_statement
from vlp.scenes.sample import sample_scene
from vlp.scenes.snli_ve import sample_triple


def test_everything_about_a_scene_survives_json():
    for index in range(30):
        scene = sample_scene(0, index)
        stored = Annotation.model_validate_json(annotation(scene).to_json())
        assert captions_of(stored) == [caption.text for caption in captions(scene)]
        assert (stored.source, stored.image_id) == ("scenes", f"train-0-{index}")
        assert stored.boxes == [list(obj.box) for obj in scene.objects]
        assert [each["box"] for each in stored.scene["objects"]] == stored.boxes
        assert all(expression.box in stored.boxes for expression in stored.expressions)
        assert all(question.answers for question in stored.questions)
        assert len({question.id for question in stored.questions}) == len(stored.questions)
        for first, relation, second in stored.scene["relations"]:
            assert relation_holds(scene, first, relation, second)


def test_words_point_from_captions_to_boxes():
    for index in range(30):
        stored = annotation(sample_scene(0, index))
        for word in stored.words:
            caption = captions_of(stored)[word.caption]
            assert words_of(caption)[word.index] == word.word
            owner = next(o for o in stored.scene["objects"] if o["box"] == word.box)
            assert owner[word.kind] == word.word
        per_caption = 2 * len(stored.boxes)
        assert len(stored.words) == per_caption * len(stored.captions)


def test_samples_of_the_other_tasks_are_typed():
    pair = sample_swap(0, 0, "order")
    swap = Annotation.model_validate_json(swap_annotation(pair).to_json())
    assert captions_of(swap) == [pair.caption.text]
    assert swap.scene["swap"]["foil"] == pair.foil.text
    assert len(swap.scene["swap"]["twin"]["objects"]) == len(swap.boxes)

    told = sample_statement(0, 0)
    statement = Annotation.model_validate_json(statement_annotation(told).to_json())
    assert statement.statement == told.text
    assert statement.label is told.label

    triple = sample_triple(0, 0)
    entailment = Annotation.model_validate_json(snli_ve_annotation(triple).to_json())
    assert (entailment.premise, entailment.hypothesis) == (triple.premise, triple.hypothesis)
    assert entailment.label == triple.label
    assert entailment.scene["cover"] == triple.scene.cover
