"""timm models as a configuration names them: `absolute: drop` works, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vlp.config import ConfigError, load_config
from vlp.models.vision.backbone import BackboneConfig, create_backbone
from vlp.training.config import VisionConfig

CONFIGS = Path(__file__).parents[3] / "configs" / "vision"
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


def test_what_has_nothing_to_drop_is_refused():
    message = "model resnet18: ResNet has no layer of attention"
    with pytest.raises(ConfigError, match=message):
        dropped("resnet18")


def test_what_timm_asserts_is_a_sentence():
    config = BackboneConfig.model_validate({"name": "xcit_nano_12_p16_224"})
    with pytest.raises(ConfigError, match="model xcit_nano_12_p16_224: `patch_size` should divide"):
        create_backbone(config, img_size=56)


def irpe(roles):
    return [{"name": "irpe-product", "roles": roles}]


@pytest.mark.parametrize(
    ("file", "changes", "expected"),
    [
        ("deit_tiny", {}, 5.76),  # printed: 6
        ("deit_small", {"positions": irpe("k")}, 22.09),  # 22
        ("deit_small", {"positions": irpe("qk")}, 22.13),  # 22
        ("deit_small", {"positions": irpe("qkv")}, 22.17),  # 22
        ("deit_small", {"positions": [{"name": "shaw", "roles": "k"}]}, 22.09),  # 22
        ("deit_small", {"positions": [{"name": "huang"}]}, 22.09),  # 22
        ("deit_small", {"positions": [{"name": "sasa"}]}, 22.07),  # 22
        ("deit_small", {"positions": [{"name": "transformer-xl"}]}, 22.35),  # 23, see irpe-i19
        ("deit_base", {}, 86.61),  # 87
        ("swin_tiny", {}, 28.35),
        ("swin_tiny", {"positions": []}, 28.29),
        ("swin_tiny", {"positions": [], "absolute": "drop"}, 28.27),
    ],
)
def test_parameters_of_irpes_table_5_and_swin(file, changes, expected):
    """In millions, 1000 classes, as the shipped configurations make the models."""
    config = load_config(CONFIGS / f"imagenet_{file}.yaml", VisionConfig).task.model
    changed = BackboneConfig.model_validate(config.model_dump() | changes)
    with torch.device("meta"):
        model = create_backbone(changed, num_classes=1000)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert round(parameters / 1e6, 2) == expected
