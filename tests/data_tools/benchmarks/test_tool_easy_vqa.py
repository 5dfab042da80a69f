from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_files import failures_of, json_of, photo, said_of, samples_of, tar_of

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


def test_rows_that_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [
        ["is it red?", "yes", 0],
        ["is it red?", "maybe", 0],
        ["is it red?", "no"],
        ["is it red?", "", 0],
        ["is it blue?", "no", 4],
    ]
    questions = json_of(tmp_path / "q.json", rows)
    answers = tmp_path / "answers.txt"
    answers.write_text("yes\nno\n")
    images = tar_of(tmp_path / "p.tar", {"images/0.png": photo(kind="png")})
    arguments = ["easy_vqa", "--questions", str(questions), "--answers", str(answers)]
    arguments += ["--images", str(images), "--out", str(tmp_path / "out"), "--processes", "1"]
    assert main(arguments) == 0
    assert list(samples_of(tmp_path / "out")) == ["0"]
    failures = failures_of(tmp_path / "out")
    assert [text.partition(": ")[0] for text in failures.pop("row of another layout")] == [
        f"{questions}, row 3",
        f"{questions}, row 4",
    ]
    assert failures == {
        "unknown answer": ["1 (maybe)"],
        "missing image": ["4"],
        "question of a missing image": ["4"],
    }
    answers.write_text("\n")
    assert main(arguments) == 2
    assert "holds no answers" in capsys.readouterr().err
    json_of(questions, [{"question": "?"}])
    assert main([*arguments[:3], *arguments[5:]]) == 2
    assert "row 1: not [question, answer, image's number]" in capsys.readouterr().err
