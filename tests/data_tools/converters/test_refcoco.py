import json
import os
import pickle

import pytest
from benchmark_files import failures_of, json_of, photo, said_of, samples_of, tar_of
from raw_images import files_of
from test_contract import command_of

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
        if value is None:
            return b"N"
        if isinstance(value, list):
            return b"(l" + b"".join(written(one) + b"a" for one in value)
        return b"(d" + b"".join(written(key) + written(one) + b"s" for key, one in value.items())

    return written(value) + b"."


@pytest.mark.parametrize("protocol", [None, 4])
def test_pickles_of_other_protocols_make_the_same_shards(tmp_path, protocol):
    command = [*command_of("refcoco", tmp_path / "raw"), "--processes", "1", "--out"]
    assert main([*command, str(tmp_path / "expected")]) == 0
    references = pickle.loads((tmp_path / "raw" / "refs.p").read_bytes())
    references[0]["sentences"][1]["raw"] = b"\xe9t\xe9" if protocol is None else "\u00e9t\u00e9"
    data = python2_pickle(references) if protocol is None else pickle.dumps(references, protocol)
    (tmp_path / "raw" / "refs.p").write_bytes(data)
    assert main([*command, str(tmp_path / "out")]) == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_runs_nothing(tmp_path, capsys):
    command = [*command_of("refcoco", tmp_path / "raw"), "--out", str(tmp_path / "out")]
    refs = tmp_path / "raw" / "refs.p"
    references = refs.read_bytes()
    for protocol in (0, 2, 4):
        refs.write_bytes(pickle.dumps([Harmful(tmp_path / "made")], protocol))
        assert main(command) == 2
        assert not (tmp_path / "made").exists()
        assert "mkdir, which is not plain data" in capsys.readouterr().err
    for data, message in (
        (references[:-30], "not a pickle of references"),
        (b"{}", "not a pickle of references"),
        (pickle.dumps({"refs": 1}), "holds dict, not the list of references"),
    ):
        refs.write_bytes(data)
        assert main(command) == 2
        assert message in capsys.readouterr().err
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
    for content, message in ((3, "give a list"), ({"5": [[1, 2]]}, "is it the right file")):
        with pytest.raises(ConfigError, match=message):
            read_proposals(json_of(path, content), [])
