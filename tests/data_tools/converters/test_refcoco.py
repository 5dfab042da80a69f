import json
import os
import pickle
from pathlib import Path

import pytest
from benchmark_files import failures_of, json_of, photo, said_of, samples_of, tar_of

from data_tools.__main__ import main
from data_tools.converters.refcoco import read_proposals
from vlp.config import ConfigError


def python2_pickle(value):
    """Protocol 0 as Python 2 wrote it, texts as byte strings."""

    def written(value):
        if isinstance(value, bytes):
            return b"S" + repr(value)[1:].encode() + b"\n"
        if isinstance(value, str):
            return written(value.encode())
        if isinstance(value, int):
            return b"I%d\n" % value
        if isinstance(value, list):
            return b"(l" + b"".join(written(one) + b"a" for one in value)
        return b"(d" + b"".join(written(key) + written(one) + b"s" for key, one in value.items())

    return written(value) + b"."


def reference(number, image, split, *sentences):
    return {
        "ref_id": number,
        "ann_id": 100 + number,
        "image_id": image,
        "split": split,
        "category_id": 1,
        "file_name": "ignored.jpg",
        "sent_ids": [identifier for identifier, _ in sentences],
        "sentences": [
            {"sent_id": identifier, "sent": text, "raw": text.upper(), "tokens": text.split()}
            for identifier, text in sentences
        ],
    }


def name_of(image):
    return f"COCO_train2014_{image:012d}.jpg"


class Raw:
    """The official files of a small data set."""

    def __init__(self, folder):
        folder.mkdir()
        self.refs = [
            reference(1, 5, "train", (1, "the left dog"), (2, "dog")),
            reference(2, 5, "train", (3, "cat")),
            reference(3, 6, "testA", (4, "man")),
        ]
        self.instances = {
            "images": [
                {"id": image, "file_name": name_of(image), "width": 40, "height": 20}
                for image in (5, 6, 7)
            ],
            "annotations": [
                {"id": 101, "image_id": 5, "bbox": [1.5, 2, 10, 10], "category_id": 1},
                {"id": 102, "image_id": 5, "bbox": [20, 0, 20, 20.5]},
                {"id": 103, "image_id": 6, "bbox": [0, 0, 5, 5]},
            ],
        }
        self.folder = folder
        tar_of(folder / "train2014.tar", {name_of(image): photo(40, 20) for image in (5, 6)})

    def command(self, out, *more, protocol=2):
        refs = self.folder / "refs(unc).p"
        data = python2_pickle(self.refs) if protocol is None else pickle.dumps(self.refs, protocol)
        refs.write_bytes(data)
        json_of(self.folder / "instances.json", self.instances)
        arguments = ["refcoco", "--refs", str(refs), "--processes", "1"]
        arguments += ["--instances", str(self.folder / "instances.json")]
        arguments += ["--images", str(self.folder / "train2014.tar"), "--out", str(out)]
        return [*arguments, *more]


@pytest.fixture
def raw(tmp_path):
    return Raw(tmp_path / "refcoco+")


@pytest.mark.parametrize("protocol", [None, 2, 4])
def test_the_official_files(raw, tmp_path, protocol):
    out = tmp_path / "out"
    raw.refs[0]["sentences"][1]["raw"] = b"\xe9t\xe9" if protocol is None else "été"
    assert main(raw.command(out, protocol=protocol)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["testA", "train"]
    [sample] = samples_of(out / "train").values()
    assert sample.key == "COCO_train2014_000000000005"
    ids = {"ref_id": 1, "ann_id": 101, "category_id": 1}
    assert said_of(sample) == {
        "version": 1,
        "source": "coco",
        "image_id": "5",
        "expressions": [
            {"id": "1", "text": "the left dog", "box": [1.5, 2, 10, 10], **ids},
            {"id": "2", "text": "dog", "box": [1.5, 2, 10, 10], **ids},
            {"id": "3", "text": "cat", "box": [20, 0, 20, 20], "ref_id": 2, "ann_id": 102,
             "category_id": 1},
        ],
    }  # fmt: skip
    manifest = json.loads((out / "testA" / "manifest.json").read_text())
    assert manifest["title"] == "refcoco+, testA"
    assert manifest["failures"] == {}


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_runs_nothing(raw, tmp_path, capsys):
    command = raw.command(tmp_path / "out")
    refs = Path(command[2])
    for protocol in (0, 2, 4):
        refs.write_bytes(pickle.dumps([Harmful(tmp_path / "made")], protocol))
        assert main(command) == 2
        assert not (tmp_path / "made").exists()
        assert "mkdir, which plain data does not need" in capsys.readouterr().err
    for data, message in (
        (pickle.dumps(raw.refs)[:-30], "not a pickle of references"),
        (b"{}", "not a pickle of references"),
        (pickle.dumps({"refs": 1}), "holds dict, not the list of references"),
    ):
        refs.write_bytes(data)
        assert main(command) == 2
        assert message in capsys.readouterr().err
    refs.unlink()
    assert main(command) == 2
    assert "refs(unc).p: cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_real_expressions_with_proposals(shared, tmp_path):
    path = shared / "data_tasks" / "refcoco" / "refcoco_testA_expressions_gt_dets.json"
    rows = json.loads(path.read_text())
    stems = {row["pred_boxes_img_id"][0].rpartition("_")[0] for row in rows}
    images = tar_of(tmp_path / "p.tar", {f"{stem}.jpg": photo(640, 640) for stem in stems})
    arguments = ["refcoco", "--expressions", str(path), "--images", str(images)]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--processes", "1"]) == 0
    samples = samples_of(tmp_path / "out")
    assert set(samples) == stems
    assert failures_of(tmp_path / "out") == {}
    seen = 0
    for key, sample in samples.items():
        said = said_of(sample)
        assert (said["source"], said["image_id"]) == ("coco", str(int(key.rpartition("_")[2])))
        for expression in said["expressions"]:
            row = rows[int(expression["id"])]
            assert row["sent"] == expression["text"]
            assert row["gt_box"] == expression["box"]
            assert row["pred_boxes"] == said["proposals"]
            assert row["pred_boxes_img_id"][0] == f"{key}_0.jpg"
            seen += 1
    assert seen == len(rows) == 50


@pytest.mark.parametrize(
    "content",
    [
        [{"image_id": 5, "box": [1, 2, 3, 4]}, {"image_id": 6, "box": [0, 0, 1, 1], "score": 0.5}],
        {"dets": [{"image_id": 5, "bbox": [1, 2, 3, 4]}, {"image_id": 6, "bbox": [0, 0, 1, 1]}]},
        {"5": [[1, 2, 3, 4, 0.9]], "6": [[0, 0, 1, 1, 0.8]]},
        {"5": [{"box": [1, 2, 3, 4]}], "6": [{"bbox": [0, 0, 1, 1]}]},
    ],
)
def test_layouts_of_detections(tmp_path, content):
    faults = []
    found = read_proposals(json_of(tmp_path / "dets.json", content), faults)
    assert found == {"5": [[1, 2, 3, 4]], "6": [[0, 0, 1, 1]]}
    assert faults == []


def test_detections_that_cannot_be_used(tmp_path):
    path = json_of(tmp_path / "dets.json", [{"image_id": 5, "box": [1, 2, 3, 4]}, {"image_id": 5}])
    faults = []
    assert read_proposals(path, faults) == {"5": [[1, 2, 3, 4]]}
    assert [fault.kind for fault in faults] == ["row of another layout"]
    for content, message in ((3, "neither a list"), ({"5": [[1, 2]]}, "is it the right file")):
        with pytest.raises(ConfigError, match=message):
            read_proposals(json_of(path, content), [])
