"""Accuracy, consistency, and what is counted."""

import pytest
from pair_shards import annotated_shards, entailment_shards, statement_shards, tiny_folder

from evaluation.downstream import evaluate_task
from evaluation.downstream.task_evaluation import sentence_of
from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError
from vlp.data.schema import Annotation
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import sample_scene
from vlp.tasks.downstream.task import start_parts
from vlp.tasks.pair_classification.task import Nlvr2Config, PairClassification, SnliVeConfig


def task_of(kind, tmp_path):
    parts, _ = start_parts(str(tiny_folder(tmp_path / "model")), {})
    return PairClassification(kind.model_validate({"data": {"train": ["unused"]}}), parts)


def test_accuracy_is_the_share_of_right_predictions(tmp_path):
    shards = entailment_shards(tmp_path / "shards", 30)
    result = evaluate_task(task_of(SnliVeConfig, tmp_path), [shards], options=EvalOptions(batch=7))
    rows = result.predictions
    assert len(rows) == result.counts["items"] == 30
    right = [row["prediction"] == row["label"] for row in rows]
    assert result.figures["accuracy"].value == pytest.approx(sum(right) / 30)
    for name in ("entailment", "neutral", "contradiction"):
        own = [ok for ok, row in zip(right, rows) if row["label"] == name]
        assert result.figures[name].value == pytest.approx(sum(own) / len(own))
    most = max(sum(row["label"] == name for row in rows) for name in result.figures)
    assert result.figures["accuracy"].chance == pytest.approx(most / 30)


def test_consistency_counts_sentences_that_are_always_right(tmp_path):
    shards = statement_shards(tmp_path / "shards", 24)
    result = evaluate_task(task_of(Nlvr2Config, tmp_path), [shards])
    wrong = {row["text"] for row in result.predictions if row["prediction"] != row["label"]}
    every = {row["text"] for row in result.predictions}
    assert len(every) < 24, "some sentence comes twice"
    expected = 1 - len(wrong) / len(every)
    assert result.figures["consistency"].value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("identifier", "sentence"),
    [
        ("dev-850-0-1", "dev-850-1"),  # NLVR2: split, set, pair, sentence
        ("dev-850-3-1", "dev-850-1"),
        ("850-3", "850: There is a dog."),  # NLVR v1: sentence, image
        ("unknown", "There is a dog."),
        (None, "There is a dog."),
    ],
)
def test_a_sentence_is_what_the_official_evaluators_take_for_one(identifier, sentence):
    assert sentence_of({"identifier": identifier, "text": "There is a dog."}) == sentence


def test_bad_samples_are_counted_and_unlabelled_ones_predicted(tmp_path):
    image = encode_png(render(sample_scene(0, 0, image_size=16)))
    annotations = [
        Annotation(hypothesis="a red circle", label="neutral"),
        Annotation(hypothesis="a red circle", label="perhaps"),
        Annotation(hypothesis="a red circle"),
        Annotation(hypothesis="a blue square", label="entailment"),
    ]
    shards = annotated_shards(tmp_path / "shards", annotations, image)
    task = task_of(SnliVeConfig, tmp_path)
    result = evaluate_task(task, [shards])
    assert result.skipped == {"unknown label": 1}
    assert result.counts["items"] == 3
    assert "contradiction" not in result.figures
    unlabelled = annotated_shards(tmp_path / "test", annotations[2:3], image)
    with pytest.raises(EvaluationError, match="no sample has a label"):
        evaluate_task(task, [unlabelled])
