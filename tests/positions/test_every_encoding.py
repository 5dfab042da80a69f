"""What must hold for every name: it trains in a ViT and in the cross-modal encoder."""

from __future__ import annotations

import pytest
import timm
import torch
from pydantic import ValidationError
from tests_support import TINY_MODEL, ace

from vlp.models.config import CrossConfig, ModelConfig
from vlp.models.vlp import VLPModel
from vlp.positions import (
    CROSS_MODAL,
    PositionEncoding,
    attach,
    create_position,
    list_positions,
)

NAMES = list_positions()
WITHIN = [name for name in NAMES if name not in CROSS_MODAL]
STEPS = 10
DESIGN = (
    *("learned-1d", "learned-2d", "learned-4d", "sine-1d", "sine-2d", "sine-4d", "md-sine"),
    *("mlp", "fourier", "object", "rope-1d", "rope-axial", "rope-mixed", "alibi-2d"),
    *("irpe-euclidean", "irpe-quantization", "irpe-cross", "irpe-product", "shaw"),
    *("transformer-xl", "huang", "sasa", "cope", "sape", "anchor", "uniform"),
    "alignment",
)


def vit(image_size=16, **options):
    sizes = {"img_size": image_size, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **sizes, **options)


def train(model, loss, steps=STEPS):
    """Losses of so many steps; every gradient must be finite."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        value = loss()
        value.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name
        optimiser.step()
        optimiser.zero_grad()
        losses.append(value.item())
    return losses


def test_the_names_are_those_of_the_design():
    assert sorted(NAMES) == sorted(DESIGN)
    with pytest.raises(ValueError, match=r"unknown position encoding 'rope' .*; known: alibi-2d"):
        create_position("rope")
    with pytest.raises(ValueError, match="options: "):
        create_position("rope-axial", width=8, heads=2, wrong=1)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WITHIN)
def test_it_trains_in_a_vit(name, precision):
    torch.manual_seed(0)
    model = attach(vit(), name, absolute="drop")
    pixels, labels = torch.randn(6, 3, 16, 16), torch.arange(6) % 3
    own = [(n, p.clone()) for n, p in model.named_parameters() if "positions" in n]

    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            logits = model(pixels)
        return torch.nn.functional.cross_entropy(logits.float(), labels)

    losses = train(model, loss)
    assert losses[-1] < losses[0]
    after = dict(model.named_parameters())
    # Its tables are trained: of each kind of them at least some move.
    assert not own or any(not torch.equal(after[n], before) for n, before in own)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_in_the_cross_modal_encoder(name):
    torch.manual_seed(0)
    positions = [name] if name in CROSS_MODAL else [name, "anchor"]
    cross = TINY_MODEL["cross"] | {"position": positions}
    model = VLPModel(ModelConfig.model_validate(TINY_MODEL | {"cross": cross}))
    model.anchor_threshold.fill_(0.2)
    pixels = torch.randn(4, 3, 16, 16)
    ids = torch.randint(5, 40, (4, 12))
    attention = torch.arange(12) < torch.tensor([6, 8, 4, 12])[:, None]
    words = attention & (torch.arange(12) > 0)
    labels = torch.tensor([0, 1, 0, 1])

    def loss():
        crossed = model.cross(model.encode_image(pixels), model.encode_text(ids, attention, words))
        return torch.nn.functional.cross_entropy(model.match_logits(crossed), labels)

    losses = train(model, loss)
    assert losses[-1] < losses[0]
    # Evaluation cuts texts to the longest of a block.
    if name == "irpe-quantization":  # ranks are of one grid
        return
    text = model.encode_text(ids[:, :8], attention[:, :8], words[:, :8])
    assert model.match(model.encode_image(pixels), text).isfinite().all()


@pytest.mark.parametrize("name", CROSS_MODAL)
def test_cross_modal_encodings_are_refused_within_a_image(name):
    with pytest.raises(ValueError, match=f"{name} lies between an image and a text"):
        attach(vit(), name)


@pytest.mark.parametrize(
    ("cross", "message"),
    [
        ({"position": ["rope"]}, "did you mean 'rope-1d'"),
        ({"position": ["sape"], "layout": "text"}, "position `sape` needs layout `ace`"),
        ({"position": ["anchor"], "options": {"sape": {}}}, "options of sape, which position does"),
        ({"position": ["ape"], "options": {"anchor": {}}}, "options of anchor"),
        ({"options": {"anchor": {"mod": "bias"}}}, r"options\.anchor\.mod: .*did you mean 'mode'"),
        ({"options": {"anchor": {"roles": []}}}, r"options\.anchor: roles must name"),
        ({"position": ["anchor"], "options": {"alignment": {}}}, "options of alignment"),
        ({"position": ["alignment", "uniform"]}, "`alignment` and `uniform` exclude each other"),
        ({"position": ["anchor", "anchor-soft"]}, "names an encoding twice: anchor, anchor"),
        ({"position": ["anchor-soft"], "anchor": 5}, "should be a valid dictionary"),
        ({**ace(tau=5, unreachable="far")}, "far is of hard anchors"),
        ({"position": ["anchor-sof"]}, "did you mean 'anchor-soft'"),
    ],
)
def test_what_cannot_be_in_the_cross_modal_encoder_is_named(cross, message):
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(TINY_MODEL | {"cross": TINY_MODEL["cross"] | cross})


def test_soft_anchors_have_a_name():
    """It is stored as what it stands for, and settings that are given stay."""
    cross = TINY_MODEL["cross"] | {"position": ["alignment", "anchor-soft"]}
    cross |= {"anchor": {"groups": 2}}
    named = ModelConfig.model_validate(TINY_MODEL | {"cross": cross}).cross
    assert named.position == ("alignment", "anchor")
    assert (named.anchor_options.tau, named.anchor.groups) == (5, 2)
    assert CrossConfig.model_validate(named.model_dump()) == named
    cross["options"] = {"anchor": {"tau": 2}}
    assert ModelConfig.model_validate(TINY_MODEL | {"cross": cross}).cross.anchor_options.tau == 2
    # Over a stored configuration, which has every setting.
    stored = CrossConfig().model_dump() | {"position": ("anchor-soft",)}
    assert CrossConfig.model_validate(stored).anchor_options.tau == 5


@pytest.mark.parametrize("name", WITHIN)
def test_trained_at_one_size_it_runs_at_another_or_names_both(name):
    """32 px and 48 px, as patches of 4: encodings bound to a grid say so."""
    torch.manual_seed(0)
    model = attach(vit(32, dynamic_img_size=True), name, absolute="drop").eval()
    assert model(torch.randn(1, 3, 32, 32)).isfinite().all()
    bound = {"learned-1d", "learned-2d", "irpe-quantization"}
    if name in bound:
        with pytest.raises(ValueError, match=r"8 x 8|12 x 12|64|145"):
            model(torch.randn(1, 3, 48, 48))
    else:
        assert model(torch.randn(1, 3, 48, 48)).isfinite().all()
        assert model(torch.randn(1, 3, 32, 48)).isfinite().all()


def test_all_of_them_work_together():
    """Every pair would be many; a ViT with all hooks in use at once stands for them."""
    torch.manual_seed(0)
    model = vit()
    for name in ("sine-2d", "fourier", "rope-axial", "irpe-product", "sape", "alibi-2d", "shaw"):
        attach(model, name)
    hooks = set()
    for module in model.modules():
        if isinstance(module, PositionEncoding):
            hooks |= module.hooks
    assert hooks == {"tokens", "rotate", "bias", "value"}
    pixels, labels = torch.randn(6, 3, 16, 16), torch.arange(6) % 3
    losses = train(model, lambda: torch.nn.functional.cross_entropy(model(pixels), labels))
    assert losses[-1] < losses[0]
