import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from vlp.layers.attention import Attention, CausalAttention
from vlp.models.itm_scorer import attend_shared_image
from vlp.positions import attach, create_position
from vlp.positions.base import PositionContext

WIDTH, HEADS, GRID = 16, 2, (2, 3)
CONTEXT = PositionContext(GRID)


class Alone(nn.Sequential):
    """A wrapper that forwards calls of several arguments, and no attributes."""

    def forward(self, *arguments):
        return self[0](*arguments)


WRAPPERS = {
    "checkpoint": checkpoint_wrapper,
    "compile": lambda encoding: torch.compile(encoding, backend="eager"),
    "other": Alone,
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def filled(name, **options):
    encoding = create_position(name, width=WIDTH, heads=HEADS, **options)
    for parameter in encoding.parameters():
        nn.init.normal_(parameter)
    return encoding


def states(tokens=6):
    return torch.randn(2, tokens, WIDTH)


def calls(wrapper):
    seen = []
    wrapper.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    return seen


@every_wrapper
@pytest.mark.parametrize("layer", [Attention, CausalAttention])
@pytest.mark.parametrize("name", ["irpe-product", "rope-mixed"])
def test_wrapped_encodings_count(wrap, layer, name):
    options = {"roles": ("query", "key", "value")} if name == "irpe-product" else {}
    encoding, x = filled(name, **options), states()
    bare = layer(WIDTH, HEADS, positions=[encoding])
    wrapped = layer(WIDTH, HEADS, positions=[wrap(encoding)])
    wrapped.load_state_dict(bare.state_dict(), strict=False)
    expected = bare(x, context=CONTEXT)
    seen = calls(wrapped.positions[0])
    torch.testing.assert_close(wrapped(x, context=CONTEXT), expected)
    assert seen
    bare.positions = nn.ModuleList()
    assert not torch.allclose(bare(x, context=CONTEXT), expected, atol=1e-3)


@every_wrapper
@torch.no_grad()
def test_wrapped_encodings_count_where_texts_share_an_image(wrap):
    encoding = create_position("alibi-2d", heads=HEADS)
    bare = Attention(WIDTH, HEADS, positions=[encoding])
    wrapped = Attention(WIDTH, HEADS, positions=[wrap(encoding)])
    wrapped.load_state_dict(bare.state_dict(), strict=False)
    keys, values = torch.randn(2, HEADS, 6, WIDTH // HEADS)
    x = states()
    out = [attend_shared_image(one, x, keys, values, CONTEXT, None) for one in (bare, wrapped)]
    torch.testing.assert_close(*out)
    bare.positions = nn.ModuleList()
    assert not torch.allclose(attend_shared_image(bare, x, keys, values, CONTEXT, None), out[0])


def test_modules_that_hold_no_encoding_are_refused():
    layer = Attention(WIDTH, HEADS, positions=[filled("irpe-product")])
    layer.positions[0] = nn.Identity()
    with pytest.raises(TypeError, match="Identity is no PositionEncoding and wraps none"):
        layer(states(), context=CONTEXT)


def vit():
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": HEADS}
    model = attach(VisionTransformer(**sizes, num_classes=3).eval(), "irpe-product", on="qkv")
    for name, parameter in model.named_parameters():
        if "positions" in name:
            nn.init.normal_(parameter)
    return model


@every_wrapper
def test_an_attached_encoding_may_be_wrapped(wrap):
    model, images = vit(), torch.randn(2, 3, 16, 16)
    expected = model(images)
    for block in model.blocks:
        block.attn.positions[0] = wrap(block.attn.positions[0])
    torch.testing.assert_close(model(images), expected)


def test_peft_trains_and_saves_an_attached_encoding():
    peft = pytest.importorskip("peft")
    images = torch.randn(2, 3, 16, 16)
    expected = vit()(images)
    config = peft.LoraConfig(target_modules=["qkv"], modules_to_save=["positions.0"])
    model = peft.get_peft_model(vit(), config)
    out = model(images)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    trained = [p for key, p in model.named_parameters() if "positions" in key and p.requires_grad]
    assert trained
    assert all(parameter.grad.abs().sum() > 0 for parameter in trained)
