"""What `attach` takes as an encoding, and what it says of anything else."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vlp.positions import PositionEncoding, attach, create_position

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}


class Scaled(PositionEncoding):
    def __init__(self, heads: int, strength: float = 1.0):
        super().__init__()
        self.heads, self.strength = heads, strength

    def bias(self, query, key, context):
        return None


class Passing(Scaled):
    """Passes on options that its constructor does not name."""

    def __init__(self, heads: int, **options):
        super().__init__(heads, **options)


def vit():
    return VisionTransformer(**SIZES, num_classes=3)


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        (create_position("alibi-2d", heads=2), "a DirectionalDistance is no .* every layer"),
        (nn.Linear(2, 2), "a Linear is no encoding to be made: give its name or class, a module"),
        (nn.Identity, "Identity is no encoding to be made: give its name or class, a module is"),
        (dict, "dict is no encoding to be made"),
        (None, "a NoneType is no encoding to be made"),
        (lambda: nn.Identity(), "<lambda> makes no PositionEncoding, but Identity"),
    ],
)
def test_what_makes_no_encoding_is_refused(encoding, message):
    model = vit()
    with pytest.raises(TypeError, match=message):
        attach(model, encoding)
    assert type(model) is VisionTransformer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strenght": 2.0}, r"'Scaled': no option 'strenght' \(did you mean 'strength'\?\)"),
        ({"strength": "high"}, "'Scaled': the option 'strength' takes float, not 'high'"),
    ],
)
def test_options_of_a_class_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        attach(vit(), Scaled, **options)


@pytest.mark.parametrize(
    "make", [Scaled, Passing, lambda heads, **options: Scaled(heads, **options)]
)
def test_options_reach_the_constructor(make):
    model = attach(vit(), make, strength=2.0)
    assert [block.attn.positions[0].strength for block in model.blocks] == [2.0, 2.0]
    model(torch.randn(1, 3, 16, 16))
