"""timm models as a configuration names them: `absolute: drop` works, or is refused."""

from __future__ import annotations

import pytest
import torch

from vlp.config import ConfigError
from vlp.models.vision.backbone import create_backbone
from vlp.models.vision.config import BackboneConfig

SIZES = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


def dropped(name, positions=(), **options):
    config = BackboneConfig.model_validate(
        {"name": name, "options": options, "absolute": "drop", "positions": positions}
    )
    return create_backbone(config, num_classes=3).eval()


@pytest.mark.parametrize("positions", [(), ({"name": "irpe-product"}, {"name": "learned-2d"})])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"pos_embed": "none"}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vlp_vit_small_patch4_none_32", {}),
        ("vlp_vit_small_patch4_sape_k_32", {"absolute": "keep"}),
    ],
)
def test_absolute_positions_are_dropped(name, options, positions):
    model = dropped(name, positions, **SIZES, **options)
    assert model.pos_embed is None
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 3)


def test_without_any_position_patches_are_a_bag():
    model = dropped("deit_tiny_distilled_patch16_224", **SIZES)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(x.roll(4, -1)), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swin_tiny_patch4_window7_224", "SwinTransformer has no pos_embed to drop"),
        ("resnet18", "ResNet is no timm VisionTransformer"),
    ],
)
def test_what_has_nothing_to_drop_is_refused(name, message):
    with pytest.raises(ConfigError, match=f"model {name}: {message}"):
        dropped(name)
