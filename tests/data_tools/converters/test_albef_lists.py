import json
import pickle
from pathlib import Path

import pytest
from benchmark_files import failures_of, json_of, photo, said_of, samples_of, tar_of

from data_tools.__main__ import main


def converted(tmp_path, kind, path, names, *more):
    images = tar_of(tmp_path / "p.tar", dict.fromkeys(sorted(names), photo(640, 640)))
    arguments = ["albef", "--kind", kind, "--annotations", str(path), "--images", str(images)]
    return main([*arguments, "--out", str(tmp_path / "out"), "--processes", "1", *more])


def test_real_statements(shared, tmp_path):
    path = shared / "data_tasks" / "albef_format" / "nlvr_dev.json"
    rows = json.loads(path.read_text())
    names = {name for row in rows for name in row["images"]}
    assert converted(tmp_path, "nlvr", path, names) == 0
    samples = samples_of(tmp_path / "out")
    assert len(samples) == 300
    assert all(sample.second_image is not None for sample in samples.values())
    for number, row in enumerate(rows):
        assert said_of(samples[f"nlvr_dev-{number}"]) == {
            "version": 1,
            "source": "nlvr2",
            "image_id": row["images"][0].removeprefix("dev/").removesuffix("-img0.png"),
            "statement": row["sentence"],
            "label": row["label"] == "True",
            "row": number,
        }


def test_real_entailment(shared, tmp_path):
    path = shared / "data_tasks" / "albef_format" / "ve_dev.json"
    rows = json.loads(path.read_text())
    # One image is not there.
    names = {row["image"] for row in rows} - {rows[0]["image"]}
    assert converted(tmp_path, "ve", path, names) == 0
    samples = samples_of(tmp_path / "out")
    lost = [number for number, row in enumerate(rows) if row["image"] == rows[0]["image"]]
    assert failures_of(tmp_path / "out") == {
        "missing image": [f"ve_dev-{number}" for number in lost]
    }
    assert [said_of(sample) for sample in samples.values()] == [
        {
            "version": 1,
            "source": "flickr30k",
            "image_id": Path(row["image"]).stem,
            "hypothesis": row["sentence"],
            "label": row["label"],
            "row": number,
        }
        for number, row in enumerate(rows)
        if number not in lost
    ]


def test_real_expressions(shared, tmp_path):
    path = shared / "data_tasks" / "albef_format" / "refcoco_testA_sample.json"
    rows = json.loads(path.read_text())
    assert converted(tmp_path, "refcoco", path, {row["image"] for row in rows}) == 0
    found = {
        int(one["id"]): one
        for sample in samples_of(tmp_path / "out").values()
        for one in said_of(sample)["expressions"]
    }
    assert found == {
        number: {"id": str(number), "text": row["text"], "box": row["bbox"], "ref_id": number}
        for number, row in enumerate(rows)
    }
    assert failures_of(tmp_path / "out") == {}


def test_expressions_without_boxes(shared, tmp_path, capsys):
    image = "train2014/COCO_train2014_000000000005.jpg"
    rows = [{"image": image, "text": f"dog {number}", "ref_id": number} for number in (1, 1, 2)]
    path = json_of(tmp_path / "refcoco+_test.json", rows)
    assert converted(tmp_path, "refcoco", path, {image}) == 2
    assert "expression without a box (give --refs and --instances)" in capsys.readouterr().err
    sentences = [{"sent_id": 1, "sent": "dog"}]
    reference = {"ref_id": 1, "ann_id": 7, "image_id": 5, "split": "val", "sentences": sentences}
    (tmp_path / "refs.p").write_bytes(pickle.dumps([reference], 2))
    size = {"file_name": "a.jpg", "width": 320, "height": 320}
    instances = {"images": [{"id": 5, **size}], "annotations": [{"id": 7, "image_id": 5}]}
    instances["annotations"][0]["bbox"] = [10, 20, 30, 40]
    files = ["--refs", str(tmp_path / "refs.p")]
    assert converted(tmp_path, "refcoco", path, {image}, *files) == 2
    assert "--refs and --instances belong together" in capsys.readouterr().err
    files += ["--instances", str(json_of(tmp_path / "instances.json", instances))]
    files += ["--detections", str(json_of(tmp_path / "dets.json", {"5": [[0, 0, 32, 16]]}))]
    assert converted(tmp_path, "refcoco", path, {image}, *files) == 0
    [sample] = samples_of(tmp_path / "out").values()
    # The image that is there is twice as wide and high.
    assert said_of(sample)["expressions"] == [
        {"id": str(number), "text": "dog 1", "box": [20, 40, 60, 80], "ref_id": 1}
        for number in (0, 1)
    ]
    assert said_of(sample)["proposals"] == [[0, 0, 64, 32]]
    assert failures_of(tmp_path / "out") == {
        "expression without a box (give --refs and --instances)": [f"{path}, ref_id 2: dog 2"]
    }
    assert (
        converted(tmp_path, "refcoco", path, {image}, *files, "--annotations", *[str(path)] * 2)
        == 2
    )
    assert "two lists share a name" in capsys.readouterr().err
    assert converted(tmp_path, "ve", path, {image}, *files) == 2
    assert "belong to --kind refcoco" in capsys.readouterr().err


def test_captions_of_both_layouts(tmp_path):
    rows = [
        {"image": "flickr30k-images/7.jpg", "caption": "one", "image_id": "flickr_0"},
        {"image": "val2014/COCO_val2014_000000000009.jpg", "caption": ["a", None, "b"]},
        {"image": "flickr30k-images/7.jpg", "caption": "two", "image_id": "flickr_0"},
        {"image": "/data/other/x.1.png", "caption": "three"},
    ]
    path = json_of(tmp_path / "train.json", rows)
    assert converted(tmp_path, "retrieval", path, {row["image"] for row in rows}) == 0
    samples = samples_of(tmp_path / "out")
    assert {key: said_of(sample) for key, sample in samples.items()} == {
        "flickr30k-images_7": {
            "version": 1, "captions": ["one", "two"], "source": "flickr30k", "image_id": "7",
        },
        "val2014_COCO_val2014_000000000009": {
            "version": 1, "captions": ["a", "b"], "source": "coco", "image_id": "9",
        },
        "data_other_x_1": {
            "version": 1, "captions": ["three"], "source": "albef", "image_id": "data/other/x.1",
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("retrieval", {"image": "a.jpg"}),
        ("vqa", {"image": "a.jpg", "sentence": "x"}),
        ("nlvr", {"sentence": "x", "label": "True", "images": ["a.jpg"]}),
        ("ve", {"image": "a.jpg", "label": "neutral"}),
        ("refcoco", {"image": "a.jpg", "text": "x"}),
    ],
)
def test_lists_of_another_kind(tmp_path, capsys, kind, row):
    path = json_of(tmp_path / "list.json", [row])
    assert converted(tmp_path, kind, path, {"a.jpg"}) == 2
    error = capsys.readouterr().err
    assert "list.json, row 1" in error
    assert "is it the right file?" in error
