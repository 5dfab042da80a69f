import gzip
import json
from collections import Counter

import pytest
from benchmark_files import failures_of, json_of, photo, said_of, samples_of, tar_of
from test_contract import answered, asked

from data_tools.__main__ import main

HEADER = {"data_subtype": "test-dev2015"}  # a subset of test2015


def coco_name(image, subset="test2015"):
    return f"COCO_{subset}_{image:012d}.jpg"


@pytest.fixture
def images(tmp_path):
    files = {coco_name(image): photo() for image in (1, 2)}
    return tar_of(tmp_path / "images.tar", files | {"7.jpg": photo(), "8.jpg": photo()})


def test_real_files_without_a_header(shared, tmp_path, capsys):
    data = shared / "data_tasks" / "vqa_v2" / "sample"
    packed = tmp_path / "questions.json.gz"
    packed.write_bytes(gzip.compress((data / "questions_300.json").read_bytes()))
    rows = json.loads((data / "annotations_300.json").read_text())["annotations"]
    images = sorted({row["image_id"] for row in rows})
    files = {coco_name(image, "train2014"): photo() for image in images[1:]}
    arguments = ["vqa", "--questions", str(packed)]
    arguments += ["--annotations", str(data / "annotations_300.json"), "--processes", "1"]
    arguments += ["--images", str(tar_of(tmp_path / "p.tar", files)), "--out", str(tmp_path / "o")]
    assert main(arguments) == 2
    assert "has no header with data_subtype; give --subset train2014" in capsys.readouterr().err
    assert main([*arguments, "--subset", "train2014"]) == 0
    found = {
        question["id"]: (
            {one["answer"]: one["count"] for one in question["answers"]},
            question["question_type"],
            question["answer_type"],
        )
        for sample in samples_of(tmp_path / "o").values()
        for question in said_of(sample)["questions"]
    }
    lost = [str(row["question_id"]) for row in rows if row["image_id"] == images[0]]
    assert found == {
        str(row["question_id"]): (
            Counter(answer["answer"] for answer in row["answers"]),
            row["question_type"],
            row["answer_type"],
        )
        for row in rows
        if row["image_id"] != images[0]
    }
    assert failures_of(tmp_path / "o") == {
        "missing image": [coco_name(images[0], "train2014").removesuffix(".jpg")],
        "question of a missing image": lost,
    }


def test_files_that_do_not_fit_together(images, tmp_path, capsys):
    questions = json_of(tmp_path / "q.json", {**HEADER, "questions": [asked(1, 1)]})
    annotations = json_of(tmp_path / "a.json", {"annotations": [answered(77, 1, "x")]})
    arguments = ["vqa", "--questions", str(questions), "--annotations", str(annotations)]
    arguments += ["--images", str(images), "--processes", "1"]
    assert main([*arguments, "--out", str(tmp_path / "none")]) == 2
    assert "give files of the same split" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_visual_genome_beside_vqa(images, tmp_path, capsys):
    def genome(identifier, image, question, answer):
        return {"qa_id": identifier, "image_id": image, "question": question, "answer": answer}

    questions = json_of(tmp_path / "q.json", {**HEADER, "questions": [asked(1, 1)]})
    rows = [
        {
            "id": 7,
            "qas": [genome(1, 7, "What color is the clock?", "Green."), genome(2, 7, "?", ".")],
        },
        {
            "id": 8,
            "qas": [{}, genome(1, 8, "Again?", "Yes."), genome(3, 8, "Who?", "A U.S. dog. ")],
        },
    ]
    data = [{"image_id": 7, "coco_id": None}, {"image_id": 8, "coco_id": 2}]
    arguments = ["vqa", "--questions", str(questions), "--images", str(images)]
    arguments += ["--visual-genome", str(json_of(tmp_path / "qa.json", rows)), "--processes", "1"]
    arguments += ["--image-data", str(json_of(tmp_path / "image_data.json", data))]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    samples = samples_of(tmp_path / "out")
    assert {
        key: (sample.annotation.source, sample.annotation.image_id)
        for key, sample in samples.items()
    } == {
        "COCO_test2015_000000000001": ("coco", "1"),
        "vg-7": ("visual_genome", "7"),
        "vg-8": ("coco", "2"),
    }
    assert said_of(samples["vg-7"])["questions"] == [
        {
            "id": "vg-1",
            "question": "What color is the clock?",
            "answers": [{"answer": "green", "count": 10}],
        }
    ]
    assert said_of(samples["vg-8"])["questions"][0]["answers"][0]["answer"] == "a u.s. dog"
    assert failures_of(tmp_path / "out") == {
        "question id given twice": ["Visual Genome 1"],
        "question without answers": ["Visual Genome 2"],
        "part of another layout": ["Visual Genome image 8: qa_id: Field required"],
    }
    assert main(["vqa", "--images", str(images), "--out", str(tmp_path / "no")]) == 2
    assert "give --questions or --visual-genome" in capsys.readouterr().err
