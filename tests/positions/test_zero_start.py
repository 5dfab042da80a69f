"""Encodings that are silenced leave a pretrained model as it was, and can be trained from there."""

from __future__ import annotations

import pytest
import timm
import torch

from vlp.positions import attach
from vlp.positions.zero_start import zero_start

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def made(name=None, **options):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, class_token=True, **SIZES)
    return model.eval() if name is None else attach(model.eval(), name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(name, {}) for name in ("fourier", "mlp", "rope-mixed")],
        *[(f"learned-{dimensions}d", {}) for dimensions in (1, 2, 4)],
        ("learned-2d", {"mixer": True}),
        ("fourier", {"mlp": False, "projection": True}),
        ("sine-2d", {"mlp": 8}),
    ],
)
def test_the_function_stays_and_the_encoding_learns(name, options):
    images = torch.randn(2, 3, 32, 32)
    expected, model = made()(images), made(name, **options)
    assert (model(images) - expected).abs().max() > 1e-4
    zero_start(model)
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    model(images).square().sum().backward()
    own = {n: p for n, p in model.named_parameters() if "positions" in n}
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in own.values())


@pytest.mark.parametrize(
    ("name", "options"), [("sape", {}), ("fourier", {"mlp": False, "projection": False})]
)
def test_what_cannot_be_silenced_stays(name, options):
    model = made(name, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero_start(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
