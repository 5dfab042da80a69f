"""Folders with the former configuration keys are converted, and nothing else of them changes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from launch.convert_old_run import main, result_file, run_config
from vlp.config import load_config, validated
from vlp.training.config import PretrainConfig
from vlp.training.finetune_config import FinetuneConfig
from vlp.training.vision_config import VisionConfig

PRETRAIN = {
    "output": "runs/old",
    "training": {
        "batch": 8,
        "accumulation": 2,
        "epochs": 1,
        "keep": 3,
        "optimiser": {"learning_rate": 1e-3, "scales": {"model.text_encoder": 0.5}},
    },
    "start": None,
    "data": {
        "sources": [{"path": "shards/train"}],
        "vocabulary": "shards/words",
        "order": "indexed",
        "canonical_streams": 2,
        "augment": {"mirror": False},
    },
}


def downstream(kind: str, **task: object) -> dict[str, object]:
    data = {"train": ["shards/train"], "view": "picture", "augment": {"mirror": False}}
    return {
        "output": "runs/old",
        "training": {"batch": 8, "accumulation": 1, "epochs": 1, "keep": 2},
        "start": "runs/base/model",
        "task": {"kind": kind, "data": data, **task},
    }


def vision(kind: str, data: dict[str, object]) -> dict[str, object]:
    return {"output": "runs/old", "training": {"keep": 1}, "task": {"kind": kind, "data": data}}


def write(folder: Path, files: dict[str, object]) -> Path:
    for name, values in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(values, bytes):
            path.write_bytes(values)
        else:
            path.write_text(yaml.dump(values) if path.suffix == ".yaml" else json.dumps(values))
    return folder


def test_a_pretraining_configuration_is_the_present_one():
    converted = run_config(PRETRAIN)
    config = validated(converted, PretrainConfig, "config.yaml")
    assert config.training.gradient_accumulation_steps == 2
    assert config.training.keep_last == 3
    assert config.training.optimiser.lr_multipliers == {"model.text_encoder": 0.5}
    assert config.init_from is None
    assert config.data.sampler == "indexed"
    assert not config.data.augment.hflip
    assert run_config(converted) == converted


@pytest.mark.parametrize(
    ("old", "new", "more"),
    [
        ("entailment", "snli_ve", {}),
        ("statements", "nlvr2", {"pictures": 1, "panels": 3}),
        ("assignment", "nlvr2_assignment", {}),
    ],
)
def test_a_fine_tuning_configuration_is_the_present_one(old, new, more):
    converted = run_config(downstream(old, **more))
    config = validated(converted, FinetuneConfig, "config.yaml")
    assert (config.task.kind, config.init_from) == (new, "runs/base/model")
    assert config.task.data.view == "image"
    assert not config.task.data.augment.hflip
    if more:
        assert config.task.images == 1


@pytest.mark.parametrize(
    ("kind", "data", "key"),
    [
        ("detection", {"train": {"format": "scenes", "count": 4}, "mirror": False}, "hflip"),
        ("classification", {"train": "x", "augment": {"mirror": False}}, "augment"),
        ("pixels", {"train": "x", "mirror": True}, "hflip"),
    ],
)
def test_a_vision_configuration_has_the_present_keys(kind, data, key):
    converted = run_config(vision(kind, data))
    assert key in converted["task"]["data"]
    assert "mirror" not in str(converted)


def test_the_source_of_coco_has_the_present_key():
    coco = {"format": "coco", "annotations": "a.json", "pictures": "images.zip"}
    data = {"train": coco, "test": coco}
    model = {"backbone": {"name": "resnet50"}}
    values = vision("detection", data)
    values["task"]["model"] = model
    config = validated(run_config(values), VisionConfig, "config.yaml")
    assert config.task.data.train.images == config.task.data.test.images == "images.zip"


def test_a_run_is_copied_and_converted(tmp_path, capsys):
    state = {"version": 1, "config": PRETRAIN, "progress": {"step": 2}}
    step = "checkpoints/step_2"
    old = write(
        tmp_path / "old",
        {
            "config.yaml": PRETRAIN,
            f"{step}/state.json": state,
            f"{step}/weights.safetensors": b"weights",
            "model/config.json": {"model_type": "vlp", "cross": {"start": "cross"}},
            "model/task.json": {"task": downstream("entailment")["task"], "known": {}},
            "model/evaluation/entailment.json": {"task": "entailment", "pictures": 3},
            "model/evaluation/entailment.predictions.jsonl": {"picture": "a", "says": "entailment"},
            "log.jsonl": {"step": 1, "mirror": 1},
        },
    )
    sums = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted((old / step).iterdir())
    )
    (old / step / "SHA256SUMS").write_text(sums)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    new = tmp_path / "new"
    assert main([str(old), str(new)]) == 0
    assert "model/task.json" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    assert load_config(new / "config.yaml", PretrainConfig).training.keep_last == 3
    assert json.loads((new / step / "state.json").read_text())["config"] == run_config(PRETRAIN)
    for line in (new / step / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((new / step / name).read_bytes()).hexdigest() == digest
    assert json.loads((new / "model/task.json").read_text())["task"]["kind"] == "snli_ve"
    results = new / "model" / "evaluation"
    assert json.loads((results / "snli_ve.json").read_text()) == {"task": "snli_ve", "images": 3}
    row = json.loads((results / "snli_ve.predictions.jsonl").read_text())
    assert row == {"image": "a", "says": "entailment"}
    for name in ("log.jsonl", "model/config.json", f"{step}/weights.safetensors"):
        assert (new / name).read_bytes() == (old / name).read_bytes()


def test_a_result_of_another_task_keeps_its_name():
    assert result_file({"task": "retrieval", "label": "entailment"}) == {
        "task": "retrieval",
        "label": "entailment",
    }


@pytest.mark.parametrize("new", ["old", "old/inside", "there"])
def test_a_folder_is_never_written_over(tmp_path, capsys, new):
    old = write(tmp_path / "old", {"config.yaml": PRETRAIN})
    (tmp_path / "there").mkdir()
    assert main([str(old), str(tmp_path / new)]) == 2
    assert "error:" in capsys.readouterr().err
    assert not (old / "inside").exists()


def test_a_damaged_file_leaves_nothing_behind(tmp_path, capsys):
    old = write(tmp_path / "old", {"task.json": b"{"})
    assert main([str(old), str(tmp_path / "new")]) == 2
    assert "task.json" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]
