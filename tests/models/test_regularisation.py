"""Dropout, groups of texts by length, and averaged flips: off, on, and in evaluation."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from test_vlp_model import inputs
from tests_support import TINY_MODEL

from vlp.models.config import ModelConfig
from vlp.models.vlp import VLPModel


def model_with(**parts):
    config = dict(TINY_MODEL)
    for name, change in parts.items():
        config[name] = TINY_MODEL[name] | change if isinstance(change, dict) else change
    torch.manual_seed(0)
    return VLPModel(ModelConfig.model_validate(config))


def outputs(model, seed=1):
    torch.manual_seed(7)
    pixels, *text = inputs()
    torch.manual_seed(seed)
    image, text = model.encode_image(pixels), model.encode_text(*text)
    return image, text, model.cross(image, text)


DROPOUT = {"text": {"dropout": 0.5}, "cross": {"dropout": 0.5}, "feature_dropout": 0.5}


def test_dropout_acts_in_training_alone():
    plain, dropping = model_with(), model_with(**DROPOUT)
    assert [*plain.state_dict()] == [*dropping.state_dict()]
    expected, found = outputs(plain.eval()), outputs(dropping.eval())
    assert torch.equal(expected[1].states, found[1].states)
    assert torch.equal(expected[2].text, found[2].text)
    assert torch.equal(expected[0].feature, found[0].feature)
    first, again, other = (outputs(dropping.train(), seed) for seed in (1, 1, 2))
    assert torch.equal(first[2].text, again[2].text)
    assert not torch.equal(first[1].states, other[1].states)
    assert 0 < (first[0].feature == 0).float().mean() < 1
    assert torch.allclose(first[0].feature.norm(dim=-1), torch.ones(3))


@pytest.mark.parametrize("part", ["text", "cross"])
def test_each_dropout_is_its_encoder_s(part):
    dropping = model_with(**{part: DROPOUT[part]}).train()
    (image, text, crossed), (same, other, across) = outputs(dropping, 1), outputs(dropping, 2)
    assert torch.equal(image.states, same.states)
    assert torch.equal(text.states, other.states) == (part == "cross")
    assert not torch.equal(crossed.text, across.text)


def test_dropout_of_all_is_refused():
    with pytest.raises(ValidationError, match="less than 1"):
        model_with(cross={"dropout": 1.0})


@pytest.mark.parametrize("groups", [2, 3, 8])
def test_texts_in_groups_of_length_are_the_same_texts(groups):
    plain, grouped = model_with().eval(), model_with(text={"length_groups": groups}).eval()
    (_, expected, crossed), (_, found, across) = outputs(plain), outputs(grouped)
    real = expected.attention_mask
    assert torch.allclose(expected.states[real], found.states[real], atol=1e-6)
    assert torch.allclose(expected.feature, found.feature, atol=1e-6)
    assert torch.allclose(crossed.text[real], across.text[real], atol=1e-6)
    assert not found.states[:, int(real.sum(1).amax()) :].any()


def test_gradients_of_groups_are_the_same():
    sums = []
    for groups in (1, 3):
        model = model_with(text={"length_groups": groups})
        outputs(model)[1].feature.square().mul(torch.arange(8)).sum().backward()
        sums.append(model.text_encoder.embedding.word.weight.grad)
    assert torch.allclose(*sums, atol=1e-6)


def test_flips_are_averaged_in_evaluation():
    plain, averaging = model_with(), model_with(image={"average_hflip": True})
    torch.manual_seed(3)
    pixels = torch.randn(2, 3, 16, 16)
    assert torch.equal(plain.image_encoder(pixels), averaging.train().image_encoder(pixels))
    encoder = averaging.eval().image_encoder
    states, flipped = plain.eval().image_encoder(pixels), encoder.tower(pixels.flip(-1))
    found = encoder(pixels)
    assert torch.allclose(found[:, 0], (states[:, 0] + flipped[:, 0]) / 2)
    for row in range(4):
        for column in range(4):
            places = states[:, 1 + 4 * row + column], flipped[:, 1 + 4 * row + 3 - column]
            assert torch.allclose(found[:, 1 + 4 * row + column], sum(places) / 2)
    again = encoder(pixels.flip(-1))
    assert torch.allclose(again[:, 0], found[:, 0], atol=1e-6)


def test_the_adapter_of_a_frozen_tower_is_trained():
    tower = {"model_type": "bert", "vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 2, "intermediate_size": 16}  # fmt: skip
    for groups in (1, 2):
        text = {"architecture": tower, "trainable": 0, "length_groups": groups}
        model = model_with(text=text)
        outputs(model)[1].states.square().sum().backward()
        assert model.text_encoder.adapter.weight.grad.any()
        assert not any(weight.requires_grad for weight in model.text_encoder.tower.parameters())
