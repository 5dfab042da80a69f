"""VQA accuracy against the known answers of the two evaluators, and by hand."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlp.tasks.vqa.metrics import ENOUGH, normalise_answer, vqa_accuracy


def folder(shared):
    return shared / "data_tasks" / "vqa_v2"


def by_leaving_out(prediction, people):
    """The definition, one person after another; for answers that need no normalisation."""
    parts = []
    for number in range(len(people)):
        others = people[:number] + people[number + 1 :]
        parts.append(min(1.0, others.count(prediction) / ENOUGH))
    return sum(parts) / len(parts)


def test_normalisation_of_real_answers(shared):
    pairs = json.loads((folder(shared) / "eval_check" / "normalisation_pairs.json").read_text())
    assert len(pairs) == 3000
    assert [pair for pair in pairs if normalise_answer(pair[0]) != pair[1]] == []


@pytest.mark.parametrize("version", ["official", "albef_copy"])
def test_the_evaluators_figures(shared, version):
    place = folder(shared)
    with gzip.open(place / "annotations_test.json.gz") as file:
        questions = {one["question_id"]: one for one in json.load(file)["annotations"]}
    expected = json.loads((place / "eval_check" / "expected_accuracy.json").read_text())[version]
    results = json.loads((place / "eval_check" / "results.json").read_text())
    values = []
    for row in results:
        question = questions[row["question_id"]]
        said = Counter(one["answer"] for one in question["answers"])
        values.append(100 * vqa_accuracy(row["answer"], list(said.items()), version))
    assert round(sum(values) / len(values), 4) == expected["overall"]
    found = {str(row["question_id"]): round(value, 4) for row, value in zip(results, values)}
    assert found == expected["perQuestion"]


@given(st.lists(st.sampled_from(["red", "blue", "green"]), min_size=4, max_size=12))
def test_counts_are_people(people):
    for prediction in ("red", "black"):
        found = vqa_accuracy(prediction, list(Counter(people).items()))
        assert found == pytest.approx(by_leaving_out(prediction, people))


@pytest.mark.parametrize(
    ("agree", "other", "value"),
    [(1, 0, 1), (0, 1, 0), (2, 0, 1), (1, 1, 1 / 2), (3, 0, 1), (2, 1, 2 / 3), (1, 2, 1 / 3),
     (4, 0, 1), (3, 1, 3 / 4), (2, 2, 1 / 2)],
)  # fmt: skip
def test_few_people(agree, other, value):
    answers = [("yes", agree), ("no", other)]
    assert vqa_accuracy("yes", answers) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("The Dont-Know!", "don't know"),
        ("couldntve shouldn'tve couldnt've", "couldntve shouldn't've couldn't've"),
        ("let's see whos there, oclock", "let's see who's there o'clock"),
        ("1,000 ten none", "1000 10 0"),
        ("2.5 a.m. at 10:30", "2.5 am at 10:30"),
        ("a an the", ""),
        ("", ""),
    ],
)
def test_normalisation_by_hand(answer, normal):
    assert normalise_answer(answer) == normal


def test_the_versions_differ_where_all_agree():
    agreed = [("the yes", 10)]
    assert vqa_accuracy("The Yes", agreed) == 1  # as they said, but for case
    assert vqa_accuracy("yes", agreed) == 0
    assert vqa_accuracy("the yes", agreed, "albef_copy") == 0  # predictions alone lose articles
    assert vqa_accuracy("a yes!", [("yes", 10)], "albef_copy") == 1
    assert vqa_accuracy("a yes!", [("yes", 10)]) == 0
    assert vqa_accuracy("two", [("two", 9), ("2", 1)]) == 1
    assert vqa_accuracy("two", [("two", 9), ("2", 1)], "albef_copy") == pytest.approx(0.3)


def test_answers_that_nobody_gave_do_not_count():
    assert vqa_accuracy("red", [("red", 4), ("blue", 0)]) == 1
    with pytest.raises(ValueError, match="nobody answered"):
        vqa_accuracy("red", [("red", 0)])
    with pytest.raises(ValueError, match="unknown version 'new'"):
        vqa_accuracy("red", [("red", 1)], "new")
