"""Blocks of our encoders, timm's and transformers', and activations that are recomputed."""

import pytest
import torch
from tests_support import TINY_MODEL
from torch import nn

from vlp.config import ConfigError
from vlp.models.config import ModelConfig
from vlp.models.vlp import VLPModel
from vlp.training.engines.compile import block_stacks, checkpoint_activations

TOWERS = {
    "image": {
        "architecture": {
            **{"name": "vit_tiny_patch16_224", "depth": 2, "embed_dim": 24, "num_heads": 2}
        },
        "image_size": 32,
        "patch_size": 16,
        "trainable": 1,
    },
    "text": {
        "architecture": {
            "model_type": "distilbert",
            "vocab_size": 64,
            "dim": 24,
            "n_layers": 3,
            "n_heads": 2,
            "hidden_dim": 48,
            "max_position_embeddings": 16,
        }
    },
}


def model(**parts):
    torch.manual_seed(0)
    values = {key: {**TINY_MODEL.get(key, {}), **part} for key, part in parts.items()}
    built = VLPModel(ModelConfig.model_validate(TINY_MODEL | values))
    for name, parameter in built.named_parameters():
        if "table" in name:
            nn.init.normal_(parameter, std=0.05)
    return built.train()


def loss(built):
    torch.manual_seed(1)
    side, vocabulary = built.config.image.image_size, built.config.text.vocab_size
    mask = torch.arange(8) < torch.tensor([[8], [5], [6]])
    image = built.encode_image(torch.randn(3, 3, side, side))
    text = built.encode_text(torch.randint(5, vocabulary, (3, 8)), mask, mask)
    crossed = built.cross(image, text)
    return crossed.text.square().mean() + image.feature[0] @ text.feature[1]


def kept(built):
    total = 0

    def count(tensor):
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss(built)
    return total


@pytest.mark.parametrize("parts", [{"text": {"dropout": 0.2}, "cross": {"dropout": 0.2}}, TOWERS])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_losses_and_gradients_keep_every_bit(parts, precision):
    results, memory = [], []
    for setting in ("none", 1, "blocks"):
        built = model(**parts)
        checkpoint_activations(built, setting)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            memory.append(kept(built))
            total = loss(built)
        total.backward()
        gradients = {n: p.grad for n, p in built.named_parameters() if p.grad is not None}
        results.append((total.detach(), gradients))
    assert memory[0] > memory[1] > memory[2]
    for total, gradients in results[1:]:
        assert torch.equal(total, results[0][0])
        assert gradients.keys() == results[0][1].keys()
        assert all(torch.equal(results[0][1][name], g) for name, g in gradients.items())


def test_stacks_are_the_layers_of_the_three_encoders():
    built = model(**TOWERS)
    stacks = block_stacks(built)
    assert [len(stack) for stack in stacks] == [3, 2, built.config.cross.layers]
    assert stacks[0][0] is built.text_encoder.tower.transformer.layer[0]
    assert stacks[1][0] is built.image_encoder.vit.blocks[0]
    assert stacks[2][0] is built.cross_encoder.layers[0]


def test_a_model_without_blocks_or_with_batch_norms_is_refused():
    with pytest.raises(ConfigError, match="no transformer blocks"):
        checkpoint_activations(nn.Linear(2, 2), "blocks")
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="batch norm"):
        checkpoint_activations(nn.ModuleList([block]), "blocks")
