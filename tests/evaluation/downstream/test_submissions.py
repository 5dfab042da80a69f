from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.downstream.submissions import (
    write_captions,
    write_nlvr2,
    write_refcoco,
    write_snli_ve,
    write_vqa,
)
from evaluation.samples import EvaluationError

Writer = Callable[..., None]


def test_vqa_as_the_official_results(shared: Path, tmp_path: Path) -> None:
    published = json.loads((shared / "data_tasks/vqa_v2/eval_check/results.json").read_text())
    rows = [{**row, "question_id": str(row["question_id"]), "score": 0.5} for row in published]
    path = tmp_path / "deep" / "results.json"
    write_vqa(path, rows)
    assert json.loads(path.read_text()) == [
        {"question_id": row["question_id"], "answer": row["answer"]} for row in published
    ]
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_nlvr2_as_the_official_script_reads_it(shared: Path, tmp_path: Path) -> None:
    with gzip.open(shared / "data_tasks/nlvr2/dev.json.gz", "rt") as file:
        official = [json.loads(line) for line in file]
    path = tmp_path / "dev.csv"
    rows = [{"identifier": row["identifier"], "label": row["label"] == "True"} for row in official]
    write_nlvr2(path, rows)
    read = dict(line.split(",") for line in path.read_text().splitlines())
    assert read == {row["identifier"]: row["label"] for row in official}


def test_snli_ve(tmp_path: Path) -> None:
    rows = [{"pairID": "7.jpg#2r1c", "label": "neutral"}, {"pairID": "é", "label": "entailment"}]
    write_snli_ve(tmp_path / "test.jsonl", rows)
    lines = (tmp_path / "test.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows


def test_refcoco_and_captions(tmp_path: Path) -> None:
    write_refcoco(tmp_path / "s.json", [{"sent_id": "3", "ref_id": 1, "box": (1, 2, 3.5, 4)}])
    assert json.loads((tmp_path / "s.json").read_text()) == [{"sent_id": 3, "box": [1, 2, 3.5, 4]}]
    write_refcoco(tmp_path / "r.json", [{"ref_id": 1, "box": [0, 0, 1, 1]}])
    assert json.loads((tmp_path / "r.json").read_text()) == [{"ref_id": 1, "box": [0, 0, 1, 1]}]
    write_captions(tmp_path / "c.json", [{"image_id": "000042", "caption": "a dog"}])
    assert json.loads((tmp_path / "c.json").read_text()) == [{"image_id": 42, "caption": "a dog"}]


BOX = [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("write", "rows", "message"),
    [
        (
            write_vqa,
            [{"question_id": "scenes-1-what", "answer": "no"}],
            "'scenes-1-what' is no num",
        ),
        (write_vqa, [{"question_id": True, "answer": "no"}], "True is no number"),
        (write_vqa, [{"question_id": 1.5, "answer": "no"}], "1.5 is no number"),
        (write_vqa, [{"question_id": "²", "answer": "no"}], "'²' is no number"),
        (write_vqa, [{"question_id": 1, "answer": None}], "answer None is no text"),
        (write_vqa, [{"answer": "no"}], "without question_id"),
        (write_vqa, [{"question_id": n, "answer": ""} for n in (1, "1", 2)], "once: question_id 1"),
        (write_captions, [{"image_id": "a", "caption": ""}], "image_id 'a' is no number"),
        (write_captions, [{"image_id": 1, "caption": ""}] * 2, "more than once: image_id 1"),
        (write_nlvr2, [{"identifier": "a-1", "label": "True"}], "'True' of a-1 is not True or"),
        (write_nlvr2, [{"identifier": "a,b", "label": True}], "does not fit into a CSV line"),
        (write_nlvr2, [{"identifier": "", "label": True}], "identifier is empty"),
        (write_nlvr2, [{"identifier": "a", "label": True}] * 2, "more than once: identifier a"),
        (write_snli_ve, [{"pairID": "a", "label": "-"}], "label '-' of a is not entailment"),
        (write_snli_ve, [{"pairID": "a", "label": "neutral"}] * 2, "more than once: pairID a"),
        (write_refcoco, [{"ref_id": 1, "box": [1, 2, 3]}], "of ref_id 1 is not [x, y, width"),
        (write_refcoco, [{"ref_id": 1, "box": [1, 2, 0, 3]}], "of ref_id 1 is not"),
        (write_refcoco, [{"ref_id": 1, "box": [1, 2, float("nan"), 3]}], "of ref_id 1 is not"),
        (write_refcoco, [{"ref_id": 1, "box": None}], "box None of ref_id 1"),
        (write_refcoco, [{"sent_id": 1, "box": BOX}, {"ref_id": 2, "box": BOX}], "without sent_id"),
        (write_refcoco, [{"ref_id": 7, "box": BOX}] * 2, "more than once: ref_id 7"),
    ],
)
def test_rows_that_a_benchmark_would_refuse(
    tmp_path: Path, write: Writer, rows: list[dict[str, Any]], message: str
) -> None:
    path = tmp_path / "out"
    path.write_text("from before")
    with pytest.raises(EvaluationError) as problem:
        write(path, rows)
    assert message in str(problem.value)
    assert str(path) in str(problem.value)
    assert path.read_text() == "from before"
