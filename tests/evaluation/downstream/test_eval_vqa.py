"""Figures of question answering: by hand, on bad data, and on any number of ranks."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest
from question_shards import AUGMENT, coloured, photo, question, toy_parts, write_shards

from evaluation.__main__ import main
from evaluation.downstream import evaluate_task
from evaluation.downstream.vqa import VqaEvaluation
from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError
from vlp.data.schema import Annotation
from vlp.tasks.vqa.metrics import vqa_accuracy
from vlp.tasks.vqa.task import VqaConfig, build


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("vqa"), coloured(12))


@pytest.fixture(scope="module")
def task(shards):
    """Untrained; the start is one whose answers differ."""
    values = {"data": {"train": [str(shards)], "canonical_streams": 1, "augment": AUGMENT,
                       "max_answer": 6}, "decoder": {"layers": 2}}  # fmt: skip
    made, _ = build(VqaConfig.model_validate(values), toy_parts(seed=3), 4, 0, "float32")
    return made


def test_figures_are_those_of_the_predictions(task, shards):
    result = evaluate_task(task, [shards], options=EvalOptions(batch=5, resamples=50))
    said = {row["question_id"]: row["answer"] for row in result.predictions}
    truth = {one.id: one for _, sample in coloured(12) for one in sample.questions}
    assert list(said) == list(truth)
    right = {
        number: vqa_accuracy(said[number], [(a.answer, a.count) for a in one.answers])
        for number, one in truth.items()
    }
    figures = result.metrics
    assert figures["accuracy"] == pytest.approx(np.mean(list(right.values())))
    for division, kind in (("answer", "yes/no"), ("answer", "other"), ("question", "what")):
        own = [
            right[n] for n, one in truth.items() if one.model_extra.get(f"{division}_type") == kind
        ]
        assert figures[f"{division}: {kind}"] == pytest.approx(np.mean(own))
    best = {n: max(one.answers, key=lambda a: a.count).answer for n, one in truth.items()}
    assert figures["exact"] == pytest.approx(np.mean([said[n] == best[n] for n in truth]))
    # `no` is said by 7 of 10 to a third of the questions, and counts 1 there.
    assert result.figures["accuracy"].chance == pytest.approx(1 / 3)
    assert "always `no`" in result.table().text()


@pytest.mark.parametrize("version", ["official", "albef_copy"])
def test_figures_by_type_are_the_evaluators(task, shared, version):
    place = shared / "data_tasks" / "vqa_v2"
    with gzip.open(place / "annotations_test.json.gz") as file:
        asked = {one["question_id"]: one for one in json.load(file)["annotations"]}
    rows = []
    for row in json.loads((place / "eval_check" / "results.json").read_text()):
        one = asked[row["question_id"]]
        answers = Counter(each["answer"] for each in one["answers"])
        types = {"answer": one["answer_type"], "question": one["question_type"]}
        rows.append({**row, "answers": answers, "types": types, "image": str(one["image_id"])})
    figures = VqaEvaluation().score(task, rows, 2, version=version).figures
    expected = json.loads((place / "eval_check" / "expected_accuracy.json").read_text())[version]
    for division, name in (("answer", "perAnswerType"), ("question", "perQuestionType")):
        assert expected[name] == {
            kind.removeprefix(f"{division}: "): round(100 * figure.value, 4)
            for kind, figure in figures.items()
            if kind.startswith(f"{division}: ")
        }


def test_the_command_writes_freely_and_takes_the_other_evaluator(task, shards, tmp_path):
    task.save_model(tmp_path, task.state_dict())
    options = ["--predict", "generate", "--version", "albef_copy"]
    assert main(["vqa", "--model", str(tmp_path), "--shards", str(shards), *options]) == 0
    table = (tmp_path / "evaluation/vqa.md").read_text()
    assert "Answers by: writing" in table
    assert "the evaluator 'albef_copy'" in table


def test_questions_without_answers_are_answered_and_not_counted(task, tmp_path):
    unanswered = Annotation(questions=[question(7, "is it red?", {})])
    answered = Annotation(questions=[question(8, "is it red?", {"yes": 1})])
    bad = Annotation(questions=[question(9, "is it red?", {"yes": 1})])
    samples = [(photo(), unanswered), (photo(), answered), (b"", bad)]
    result = evaluate_task(
        task, [write_shards(tmp_path / "some", samples)], EvalOptions(resamples=2)
    )
    assert [row["question_id"] for row in result.predictions] == ["7", "8"]
    assert result.skipped == {"unreadable image": 1}
    assert result.metrics["accuracy"] in (0.0, 1.0)
    with pytest.raises(EvaluationError, match="no question has an answer"):
        evaluate_task(task, [write_shards(tmp_path / "none", samples[:1])])


def test_intervals_are_over_images(task, tmp_path):
    """Two samples of one image are drawn together, so nothing varies."""
    image = {"source": "toy", "image_id": "1"}
    samples = [
        (photo(), Annotation(**image, questions=[question(n, "is it?", {answer: 1})]))
        for n, answer in enumerate(("yes", "no", "red", "blue", "green", "left"))
    ]
    result = evaluate_task(task, [write_shards(tmp_path, samples)], EvalOptions(resamples=100))
    figure = result.figures["accuracy"]
    assert figure.value == pytest.approx(1 / 6)
    assert figure.low == figure.high == pytest.approx(1 / 6)
