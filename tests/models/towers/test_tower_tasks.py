"""Both towers from outside, in re-ranking, in evaluation and in fine-tuning."""

from __future__ import annotations

import pytest
import torch
from pretraining_batch import batch
from tests_support import TINY_MODEL, tiny_text

import vlp
from vlp.config import ConfigError
from vlp.data.image.transforms import Preprocessing
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.config import ModelConfig
from vlp.models.decoder import AnswerDecoder, AnswerDecoderConfig, start_decoder
from vlp.models.folder import save_pretrained
from vlp.models.itm_scorer import ITMScorer
from vlp.models.vlp import VLPModel
from vlp.objectives.config import ObjectivesConfig
from vlp.tasks.pretraining import Pretraining

TEXT = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32}  # fmt: skip
IMAGE = {
    "architecture": {
        **{"name": "vit_small_patch14_reg4_dinov2", "embed_dim": 24, "depth": 2, "num_heads": 2}
    },
    **{"patch_size": 14, "image_size": 56, "width": 16, "pool": 2},
}


def tower_folder(folder, text: TextProcessor, deviation=0.3):
    """A model folder of both towers, the image's of 8 tokens more than the pooled grid."""
    tower = {"model_type": "bert", "vocab_size": text.vocab_size, **TEXT}
    sizes = {"architecture": tower, "vocab_size": text.vocab_size, "width": 16, "max_tokens": 24}
    torch.manual_seed(0)
    model = VLPModel(ModelConfig.model_validate(TINY_MODEL | {"text": sizes, "image": IMAGE}))
    for name, parameter in model.named_parameters():
        if deviation and "cross_encoder" in name:
            torch.nn.init.normal_(parameter, std=deviation)
    model.anchor_threshold.fill_(0.1)
    preprocess = Preprocessing(56, *model.config.image.statistics)
    save_pretrained(folder, model.config, model.state_dict(), text, preprocess)
    return folder


@torch.no_grad()
def test_shared_parts_of_scores_are_those_of_the_model(tmp_path):
    text = tiny_text(24)
    loaded = vlp.load(tower_folder(tmp_path, text))
    images = loaded.model.encode_image(torch.randn(2, 3, 56, 56))
    assert images.tokens.shape == (2, 4, 8)
    texts = loaded.model.encode_text(*text(["a red circle", "a small blue square above a star"]))
    plain = loaded.model.match(images.select(torch.tensor([1, 1])), texts)
    scorer = ITMScorer(loaded.model)
    prepared = scorer.prepare_image(images.select(torch.tensor([1])))
    shared = scorer.match(prepared, scorer.prepare_texts(texts))
    assert plain.std() > 1e-4
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)


def test_answers_are_not_written_by_a_tower(tmp_path):
    folder = tower_folder(tmp_path / "start", tiny_text())
    model = vlp.load(folder).model
    decoder = AnswerDecoder(AnswerDecoderConfig(), model.config, torch.nn.Linear(16, 64))
    with pytest.raises(ConfigError, match=r"text\.architecture: answers and captions"):
        start_decoder(decoder, model)


def counted(monkeypatch, vit, passes):
    """Note every pass of a tower."""
    forward = vit.forward_features

    def noted(pixels):
        passes.append(len(pixels))
        return forward(pixels)

    monkeypatch.setattr(vit, "forward_features", noted)


def test_frozen_tower_runs_once_for_student_and_teacher(monkeypatch):
    sizes = TINY_MODEL | {"image": IMAGE | {"trainable": 0}}
    objectives = {"mim": None, "itm": {"group": 4}, "teacher": {"queue": 8}}
    losses = []
    for stored in (False, True):
        torch.manual_seed(0)
        task = Pretraining(
            ModelConfig.model_validate(sizes), ObjectivesConfig.model_validate(objectives), "-"
        )
        passes = []
        for model in (task.model, task.teacher.average.module["model"]):
            counted(monkeypatch, model.image_encoder.vit, passes)
        pixels = torch.randn(4, 3, 56, 56, generator=torch.Generator().manual_seed(5))
        pixels = task.model.image_encoder.tower(pixels) if stored else pixels
        losses.append(task(batch(4)._replace(pixels=pixels), 0).loss)
        assert passes == [4]
    assert torch.equal(*losses)
