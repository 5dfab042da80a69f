"""Features of small shards, made by the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from tests_support import TINY_MODEL

from data_tools.__main__ import main
from vlp.config import load_config
from vlp.models.vlp import VLPModel
from vlp.training.config import PretrainConfig

FLIPS = {"randaugment": False, "crop_scale": [0.5, 1.0], "hflip": True}


@pytest.fixture
def configuration(tmp_path: Path, vocabulary: Path) -> Callable[..., Path]:
    def write(*folders: Path, augment: dict = FLIPS, **data: object) -> Path:
        model = TINY_MODEL | {"text": TINY_MODEL["text"] | {"vocab_size": 90}}
        values = {
            "model": model,
            "data": {
                "sources": [{"path": str(folder)} for folder in folders],
                "vocabulary": str(vocabulary),
                "canonical_streams": 4,
                "shuffle_window": 6,
                "workers": 0,
                "augment": augment,
                **data,
            },
            "objectives": {
                "contrastive": {"token": {"group": 4}},
                "itm": {"group": 4},
                "mim": None,
                "teacher": None,
            },
            "training": {"batch": 8, "steps": 3, "precision": "float32", "log_every": 1},
        }
        path = tmp_path / "pretrain.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def make_features() -> Callable[..., Path]:
    def make(config: Path, out: Path, *options: object) -> Path:
        arguments = ["features", "--config", config, "--out", out, "--batch", 6, *options]
        assert main([*map(str, arguments)]) == 0
        return out

    return make


@pytest.fixture
def tower_of() -> Callable[[Path], torch.nn.Module]:
    """The image tower as pretraining starts it."""

    def make(config: Path) -> torch.nn.Module:
        settings = load_config(config, PretrainConfig)
        torch.manual_seed(settings.training.seed)
        return VLPModel(settings.model).eval().image_encoder

    return make
