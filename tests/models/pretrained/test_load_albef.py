"""ALBEF's names and depths at 384 px, against a plain implementation on the state dict alone."""

from __future__ import annotations

import math

import pytest
import torch
from albef_names import Sizes, albef_tensors
from torch.nn import functional

from vlp.config import ConfigError
from vlp.models.config import ModelConfig
from vlp.models.pretrained.albef import albef_config, load_albef
from vlp.models.vlp import VLPModel

# The published depths, patches and positions (257); narrower.
SIZES = Sizes(width=128, intermediate=192, embed=32, vocabulary=60, tokens=40, queue=8)
HEADS = SIZES.width // 64


def linear(state, name, x):
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def norm(state, name, x, eps):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def attention(query, key, value, keys_mask=None):
    """(B, T, width) each; every head by itself."""
    heads = []
    for q, k, v in zip(query.split(64, -1), key.split(64, -1), value.split(64, -1), strict=True):
        logits = torch.einsum("bqc,bkc->bqk", q, k) / 8
        if keys_mask is not None:
            logits = logits.masked_fill(~keys_mask[:, None], -torch.inf)
        heads.append(torch.einsum("bqk,bkc->bqc", logits.softmax(-1), v))
    return torch.cat(heads, -1)


def images(state, pixels):
    """Pre-norm ViT; the learned positions resized as ALBEF's authors resize them."""
    rows = pixels.shape[-1] // 16
    patches = pixels.unflatten(3, (rows, 16)).unflatten(2, (rows, 16))
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    weight = state["visual_encoder.patch_embed.proj.weight"].flatten(1)
    x = patches @ weight.T + state["visual_encoder.patch_embed.proj.bias"]
    places = state["visual_encoder.pos_embed"]
    grid = places[:, 1:].unflatten(1, (16, 16)).permute(0, 3, 1, 2)
    grid = functional.interpolate(grid, size=(rows, rows), mode="bicubic", align_corners=False)
    cls = (state["visual_encoder.cls_token"] + places[:, :1]).expand(len(x), -1, -1)
    x = torch.cat([cls, x + grid.flatten(2).transpose(1, 2)], 1)
    for number in range(SIZES.blocks):
        block = f"visual_encoder.blocks.{number}"
        qkv = linear(state, f"{block}.attn.qkv", norm(state, f"{block}.norm1", x, 1e-6))
        x = x + linear(state, f"{block}.attn.proj", attention(*qkv.chunk(3, -1)))
        inner = gelu(linear(state, f"{block}.mlp.fc1", norm(state, f"{block}.norm2", x, 1e-6)))
        x = x + linear(state, f"{block}.mlp.fc2", inner)
    return norm(state, "visual_encoder.norm", x, 1e-6)


def asked(state, name, x, other, mask):
    """One of BERT's attentions with its residual and norm, which come after it."""
    parts = [linear(state, f"{name}.self.query", x)]
    parts += [linear(state, f"{name}.self.{part}", other) for part in ("key", "value")]
    out = linear(state, f"{name}.output.dense", attention(*parts, mask))
    return norm(state, f"{name}.output.LayerNorm", out + x, 1e-12)


def texts(state, bert, ids, mask, image):
    """States after the text layers and after the fusion layers."""
    place = f"{bert}embeddings"
    x = state[f"{place}.word_embeddings.weight"][ids]
    x = x + state[f"{place}.position_embeddings.weight"][: ids.shape[1]]
    x = x + state[f"{place}.token_type_embeddings.weight"][0]
    x = norm(state, f"{place}.LayerNorm", x, 1e-12)
    between = None
    for number in range(12):
        layer = f"{bert}encoder.layer.{number}"
        between = x if number == 6 else between
        x = asked(state, f"{layer}.attention", x, x, mask)
        if number >= 6:
            x = asked(state, f"{layer}.crossattention", x, image, None)
        inner = gelu(linear(state, f"{layer}.intermediate.dense", x))
        out = linear(state, f"{layer}.output.dense", inner)
        x = norm(state, f"{layer}.output.LayerNorm", out + x, 1e-12)
    return between, x


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "bert"), [("pretrain", "text_encoder.bert."), ("retrieval", "text_encoder.")]
)
def test_whole_forward_at_384_pixels_from_257_positions(kind, bert):
    torch.manual_seed(7)
    state = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in albef_tensors(SIZES, kind).items()
    }
    assert state["visual_encoder.pos_embed"].shape[1] == 257
    model = VLPModel(albef_config(state, image_size=384)).eval()
    reports = load_albef(model, state, "ALBEF.pth")
    assert reports[0].resized == ["image_encoder.vit.pos_embed"]
    assert model.image_encoder.vit.pos_embed.shape[1] == 577
    pixels, ids = torch.randn(3, 3, 384, 384), torch.randint(5, SIZES.vocabulary, (3, 11))
    lengths = torch.tensor([[11], [4], [7]])
    mask = torch.arange(11) < lengths
    words = mask & (torch.arange(11) > 0) & (torch.arange(11) < lengths - 1)

    image, text = model.encode_image(pixels), model.encode_text(ids, mask, words)
    crossed = model.cross(image, text)
    photo = images(state, pixels)
    between, last = texts(state, bert, ids, mask, photo)
    itm = linear(state, "itm_head", last[:, 0])
    wanted = {
        "image": (image.states, photo),
        "text": (text.states[mask], between[mask]),
        "fusion": (crossed.text[mask], last[mask]),
        "itm": (model.match_logits(crossed), itm),
    }
    for side, states, feature in (
        ("vision", photo, image.feature),
        ("text", between, text.feature),
    ):
        projected = linear(state, f"{side}_proj", states[:, 0])
        wanted[side] = (feature, projected / projected.square().sum(-1, keepdim=True).sqrt())
    for name, (ours, theirs) in wanted.items():
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_half_precision_becomes_float32_and_is_noted():
    state = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in albef_tensors().items()
    }
    config = albef_config(state, image_size=24)
    model = VLPModel(config)
    reports = load_albef(model, state, "tiny.pth")
    assert str(reports[3]).endswith("; float16 there, float32 here")
    weight = model.match_head.weight
    assert torch.equal(weight, state["itm_head.weight"].float())
    # Resized in float32: rounding to half precision would leave the result in that format's steps.
    places = model.image_encoder.vit.pos_embed
    assert not torch.equal(places, places.half().float())


@pytest.mark.parametrize("key", ["text", "image", "cross"])
def test_other_heads_are_refused_by_name(key):
    state = albef_tensors()
    config = albef_config(state).model_dump()
    config[key]["heads"] = 4
    model = VLPModel(ModelConfig.model_validate(config))
    with pytest.raises(ConfigError, match=rf"{key}.heads is 4; set {key}.heads=2"):
        load_albef(model, state, "tiny.pth")
