"""Retrieval from stored features: no image is decoded, and the tower must be the model's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import vlp
from data_tools.__main__ import main as data_tools
from evaluation import samples
from evaluation.__main__ import main
from evaluation.retrieval.retrieval import evaluate_retrieval
from vlp.config import ConfigError
from vlp.data.shards.shard_reader import ShardWriter
from vlp.scenes.annotation import annotation
from vlp.scenes.distinct import distinct_scenes
from vlp.scenes.render import encode_png, render


@pytest.fixture(scope="module")
def features(model_folder, scene_shards, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    model = json.loads((model_folder / "config.json").read_text())
    del model["model_type"]
    values = {
        "init_from": str(model_folder),
        "model": model,
        "data": {"sources": [{"path": str(scene_shards)}], "vocabulary": str(model_folder)},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    command = ["features", "--config", folder / "config.yaml", "--out", folder / "out"]
    assert data_tools([*map(str, command)]) == 0
    return folder / "out"


def test_ranks_are_those_of_pixels_but_for_rounding(
    model_folder, scene_shards, features, monkeypatch
):
    loaded = vlp.load(model_folder)
    plain = evaluate_retrieval(loaded, [scene_shards], rerank=4, batch=8)
    monkeypatch.setattr(samples, "decode_image", None)
    stored = evaluate_retrieval(loaded, [scene_shards], rerank=4, batch=8, features=[features])
    assert (stored.images, stored.texts, stored.skipped) == (plain.images, plain.texts, {})
    assert [row | {"ranks": 0} for row in stored.predictions] == [
        row | {"ranks": 0} for row in plain.predictions
    ]
    ranks = [
        np.array([row["ranks"]["dual"] for row in found.predictions]) for found in (plain, stored)
    ]
    assert (ranks[0] == ranks[1]).mean() > 0.9
    assert np.abs(ranks[0] - ranks[1]).max() <= 3


def test_several_folders_hold_features_together(
    model_folder, scene_shards, features, tmp_path, capsys
):
    """Of the evaluated images and of the bank's; one of them alone is not enough."""
    other = tmp_path / "other"
    with ShardWriter(other) as writer:
        for number, scene in enumerate(distinct_scenes(50, 5)):
            writer.write(f"{number}", encode_png(render(scene)), "png", annotation(scene))
    model = json.loads((model_folder / "config.json").read_text())
    del model["model_type"]
    data = {"sources": [{"path": str(other)}], "vocabulary": str(model_folder)}
    values = {"init_from": str(model_folder), "model": model, "data": data}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    command = ["features", "--config", tmp_path / "config.yaml", "--out", tmp_path / "features"]
    assert data_tools([*map(str, command)]) == 0
    ask = ["retrieval", "--model", str(model_folder), "--shards", str(scene_shards)]
    ask += ["--bank", str(other), "--features", str(features)]
    assert main(ask) == 2
    assert f"holds no features of {other}" in capsys.readouterr().err
    assert main([*ask, str(tmp_path / "features")]) == 0
    table = capsys.readouterr().out
    assert "normalised by the queries" in table
    assert "are in the bank" not in table


def test_another_tower_or_other_shards_are_refused(
    model_folder, scene_shards, features, tmp_path, capsys
):
    command = ["retrieval", "--model", model_folder, "--shards", scene_shards, "--limit", 9]
    command = [*map(str, command), "--out", str(tmp_path / "out")]
    assert main([*command, "--features", str(features)]) == 0
    assert main([*command, "--features", str(tmp_path)]) == 2
    assert "features.json: cannot be read" in capsys.readouterr().err
    loaded = vlp.load(model_folder)
    with torch.no_grad():
        loaded.model.image_encoder.vit.norm.bias += 1
    with pytest.raises(ConfigError, match=r"weights is '\w+' there, '\w+' here"):
        evaluate_retrieval(loaded, [scene_shards], features=[features])
