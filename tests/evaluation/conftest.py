"""A tiny generated corpus and a tiny untrained model on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import vlp
from vlp.data.image.transforms import Preprocessing
from vlp.data.scenes.annotation import annotation
from vlp.data.scenes.distinct import distinct_scenes
from vlp.data.scenes.render import encode_png, render
from vlp.data.shards.shard_index import ShardWriter
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.models.config import AnchorConfig, CrossConfig, ImageConfig, ModelConfig, TextConfig
from vlp.models.folder import save_pretrained
from vlp.models.vlp import VLPModel
from vlp.objectives.mlm import MLMHead
from vlp.training.config import PretrainConfig

SCENES = 21


@pytest.fixture(scope="session")
def scene_shards(tmp_path_factory) -> Path:
    """21 scenes in three shards."""
    folder = tmp_path_factory.mktemp("scenes")
    with ShardWriter(folder, samples_per_shard=8) as writer:
        for number, scene in enumerate(distinct_scenes(0, SCENES)):
            writer.write(f"{number:05d}", encode_png(render(scene)), "png", annotation(scene))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, scene_shards) -> Path:
    """An untrained VLPModel of width 16 with its tokenizer and preprocessing."""
    texts = [text for scene in distinct_scenes(0, SCENES) for text in annotation(scene).captions]
    text = TextProcessor(train_wordpiece(texts, 200), 24)
    config = ModelConfig(
        text=TextConfig(
            vocab_size=text.vocab_size, width=16, layers=1, heads=2, intermediate=16, max_tokens=24
        ),
        image=ImageConfig(
            image_size=32, patch_size=8, width=16, layers=1, heads=2, intermediate=16
        ),
        cross=CrossConfig(layers=1, heads=2, intermediate=16, anchor=AnchorConfig(groups=2)),
        embed_dim=8,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    model, head = VLPModel(config), MLMHead(16, text.vocab_size)
    model.match_head.bias.data.fill_(0.1)  # as if it were trained; odds stay
    heads = {f"mlm_head.{name}": value for name, value in head.state_dict().items()}
    save_pretrained(folder, config, model.state_dict(), text, Preprocessing(32), heads)
    return folder


@pytest.fixture
def validated_pretraining(model_folder) -> Callable[..., PretrainConfig]:
    """Make the configuration of a pretraining of that model, in float32, that is validated."""

    def made(
        objectives: dict[str, Any], batch: int, validation: dict[str, Any], **data: Any
    ) -> PretrainConfig:
        values = {"sources": ["unused"], "canonical_streams": 1, "vocabulary": str(model_folder)}
        return PretrainConfig.model_validate(
            {
                "model": vlp.load(model_folder).model.config.model_dump(),
                "data": values | data,
                "objectives": objectives,
                "training": {"batch": batch, "precision": "float32"},
                "validation": validation,
            }
        )

    return made
