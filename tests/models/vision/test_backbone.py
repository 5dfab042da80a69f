from pathlib import Path

import pytest
import torch

from vlp.config import ConfigError, load_config
from vlp.layers.attention import CausalAttention
from vlp.models.vision.backbone import (
    BackboneConfig,
    attention_encodings,
    create_backbone,
    create_encoding,
    on_tokens,
)
from vlp.positions import causal_positions
from vlp.positions.base import PositionContext
from vlp.positions.options import PositionConfig
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


def test_what_timm_refuses_is_a_sentence():
    with pytest.raises(ConfigError, match="model resnet18: ResNet has no layer of attention"):
        dropped("resnet18")
    config = BackboneConfig.model_validate({"name": "xcit_nano_12_p16_224"})
    with pytest.raises(ConfigError, match="model xcit_nano_12_p16_224: `patch_size` should divide"):
        create_backbone(config, img_size=56)


def irpe(roles):
    return [{"name": "irpe-product", "roles": roles}]


@pytest.mark.parametrize(
    ("file", "changes", "expected"),
    [
        ("deit_tiny", {}, 5.76),  # printed: 6
        ("deit_small", {"positions": irpe("qkv")}, 22.17),  # 22
        ("deit_small", {"positions": [{"name": "shaw", "roles": "k"}]}, 22.09),  # 22
        ("deit_small", {"positions": [{"name": "huang"}]}, 22.09),  # 22
        ("deit_small", {"positions": [{"name": "sasa"}]}, 22.07),  # 22
        ("deit_small", {"positions": [{"name": "transformer-xl"}]}, 22.35),  # 23, see irpe-i19
        ("deit_base", {}, 86.61),  # 87
        ("swin_tiny", {}, 28.35),
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


WIDTH, HEADS, GRID = 8, 2, (3, 4)


def named(name, roles=None, **options):
    return PositionConfig(name=name, roles=roles, options=options)


def test_sizes_are_filled_in_and_options_win():
    positions = [named("learned-2d"), named("irpe-product", "qk"), named("alibi-2d", ratio="code")]
    irpe, alibi = attention_encodings(positions, WIDTH, HEADS, GRID)
    assert irpe.roles == ("query", "key")
    assert (alibi.heads, alibi.grid, alibi.ratio) == (HEADS, GRID, "code")


def later_tokens_matter(encodings):
    attention = CausalAttention(WIDTH, HEADS, encodings).double()
    for table in attention.positions.parameters():
        torch.nn.init.normal_(table)
    x, context = torch.randn(2, GRID[0] * GRID[1], WIDTH).double(), PositionContext(grid=GRID)
    expected = attention(x, context)
    for row in range(1, x.shape[1]):
        changed = torch.cat([x[:, :row], torch.randn_like(x[:, row:])], 1)
        if not torch.allclose(expected[:, :row], attention(changed, context)[:, :row]):
            return True
    return False


@pytest.mark.parametrize("name", causal_positions())
def test_encodings_called_causal_are(name):
    encodings = attention_encodings([named(name)], WIDTH, HEADS, GRID, causal=True)
    assert len(encodings) == 1
    assert not later_tokens_matter(encodings)


@pytest.mark.parametrize("position", [named("sape"), named("cope", causal=False)])
def test_encodings_that_see_later_tokens_are_refused_and_do(position):
    with pytest.raises(ConfigError, match=rf"{position.name} with .* sees later tokens"):
        attention_encodings([position], WIDTH, HEADS, GRID, causal=True)
    assert later_tokens_matter(attention_encodings([position], WIDTH, HEADS, GRID))


def test_wrong_names_and_options_are_refused_by_name():
    with pytest.raises(ConfigError, match="anchor acts between an image and a text"):
        on_tokens(named("anchor"))
    with pytest.raises(ConfigError, match=r"sine-2d: .*colour"):
        create_encoding(named("sine-2d", colour=1), width=WIDTH)
    with pytest.raises(ConfigError, match=r"rope-axial: .*on='q'"):
        create_encoding(named("rope-axial", "q"), width=WIDTH, heads=HEADS)
