from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_files import failures_of, json_of, said_of, samples_of

from data_tools.__main__ import main


def test_real_test_set(shared: Path, tmp_path: Path) -> None:
    data = shared / "data_tasks" / "easy_vqa"
    arguments = ["easy_vqa", "--questions", str(data / "test_questions.json"), "--processes", "1"]
    arguments += ["--answers", str(data / "answers.txt"), "--split", "test"]
    arguments += ["--images", str(data / "test_images.tar.xz"), "--out", str(tmp_path)]
    assert main(arguments) == 0
    samples = samples_of(tmp_path)
    assert len(samples) == 1000
    rows = json.loads((data / "test_questions.json").read_text())
    found = {
        int(question["id"]): [question["question"], question["answers"], said["image_id"]]
        for said in map(said_of, samples.values())
        for question in said["questions"]
    }
    assert found == {
        number: [question, [{"answer": answer, "count": 10}], f"test-{image}"]
        for number, (question, answer, image) in enumerate(rows)
    }
    assert failures_of(tmp_path) == {}


def test_empty_answer_lists_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    questions = json_of(tmp_path / "q.json", [["is it red?", "yes", 0]])
    (tmp_path / "answers.txt").write_text("\n")
    arguments = ["easy_vqa", "--questions", str(questions), "--images", str(tmp_path)]
    arguments += ["--answers", str(tmp_path / "answers.txt"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "holds no answers" in capsys.readouterr().err
