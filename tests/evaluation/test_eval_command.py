from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from evaluation.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def test_retrieval_prints_and_writes_beside_the_model(model_folder, scene_shards, capsys):
    code = main(
        ["retrieval", "--model", str(model_folder), "--shards", str(scene_shards), "--limit", "9"]
    )
    assert code == 0
    printed = capsys.readouterr().out
    assert "Retrieval: 9 images" in printed
    written = json.loads((model_folder / "evaluation" / "retrieval.json").read_text())
    assert written["images"] == 9
    assert written["rerank"] == 0


def test_pointing_and_anchors_run(model_folder, scene_shards, tmp_path, capsys):
    common = ["--model", str(model_folder), "--shards", str(scene_shards)]
    assert main(["pointing", *common, "--limit", "5", "--out", str(tmp_path)]) == 0
    assert "colour words" in capsys.readouterr().out
    assert json.loads((tmp_path / "pointing.json").read_text())["scenes"] == 5
    picture = tmp_path / "anchors.png"
    assert main(["anchors", *common, "--count", "2", "--out", str(picture)]) == 0
    assert capsys.readouterr().out.strip() == str(picture)
    assert Image.open(picture).size[0] > 200


@pytest.mark.parametrize("missing", ["model", "shards"])
def test_a_missing_folder_is_one_line_and_code_2(model_folder, scene_shards, missing, capsys):
    folders = {"model": str(model_folder), "shards": str(scene_shards), missing: "./nowhere"}
    code = main(["retrieval", "--model", folders["model"], "--shards", folders["shards"]])
    assert code == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "nowhere" in error
    assert len(error.splitlines()) == 1


def test_a_device_that_is_none_is_refused_at_once(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["retrieval", "--model", "m", "--shards", "s", "--device", "gpu"])
    assert leaving.value.code == 2
    assert "'gpu' is no device; cpu or cuda is one" in capsys.readouterr().err


def test_overrides_stand_anywhere(tmp_path, capsys):
    config = ROOT / "configs" / "ablation" / "cross_position.yaml"
    settings = ["seeds=[0,1]", "--config", str(config), f"output={tmp_path}", "--report", "jobs=1"]
    assert main(["ablation", *settings]) == 0
    assert "variants with 2 seeds each" in capsys.readouterr().out
    assert (tmp_path / "report.md").exists()
