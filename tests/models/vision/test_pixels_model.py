import math
from pathlib import Path

import pytest
import torch

from vlp.config import ConfigError, load_config
from vlp.positions import create_position
from vlp.positions.base import PositionContext
from vlp.tasks.pixels.model import (
    PixelModelConfig,
    PixelPosition,
    PixelTransformer,
    ReformerLayer,
    SharedQueryAttention,
)
from vlp.training.config import VisionConfig

CONFIGS = Path(__file__).parents[3] / "configs" / "vision"
SIZE, LENGTH = 3, 27
ON_TOKENS = ("learned-1d", "learned-2d", "sine-1d", "sine-2d", "fourier", "mlp", "md-sine")
IN_ATTENTION = ("irpe-product", "alibi-2d", "rope-axial", "cope")


def config(*names, **options):
    plain = {"width": 24, "layers": 2, "heads": 2, "feed_forward": 32, "channel_width": 8}
    positions = [{"name": name} if isinstance(name, str) else name for name in names]
    return PixelModelConfig.model_validate(plain | {"positions": positions} | options)


def model(*names, **options):
    made = PixelTransformer(config(*names, **options), SIZE).double()
    for parameter in made.parameters():  # also those that start at zero
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def images(rows=2):
    return torch.randint(256, (rows, SIZE, SIZE, 3))


REFORMER = {"layer": "reformer", "head_width": 5}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in (*ON_TOKENS, *IN_ATTENTION, None)),
        *((name, REFORMER) for name in ("fourier", "learned-1d", None)),
    ],
)
def test_a_later_channel_never_changes_an_earlier_logit(name, options):
    made = model(*([name] if name else []), **options)
    values = images()
    logits = made(values).flatten(1, 3)
    for place in range(LENGTH):
        changed = values.flatten(1).clone()
        changed[:, place:] = torch.randint(256, (2, LENGTH - place))
        found = made(changed.view_as(values)).flatten(1, 3)
        torch.testing.assert_close(found[:, : place + 1], logits[:, : place + 1])
    # The channel just before it does count, else the test above says nothing.
    changed = values.flatten(1).clone()
    changed[:, 12] = 255 - changed[:, 12]
    found = made(changed.view_as(values)).flatten(1, 3)
    assert (found[:, 13] - logits[:, 13]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("names", "options"),
    [(["fourier"], {}), (["sine-2d", "irpe-cross"], {}), (["fourier"], REFORMER)],
)
def test_nats_are_the_chain_rule_by_hand(names, options):
    made, values = model(*names, **options), images()
    total = torch.zeros(2, dtype=torch.float64)
    for place in range(LENGTH):
        known = values.flatten(1).clone()
        known[:, place:] = 0  # what is not known yet
        logits = made(known.view_as(values)).detach().flatten(1, 3)[:, place]
        for row in range(2):
            shares = logits[row].exp() / logits[row].exp().sum()
            total[row] -= math.log(float(shares[int(values.flatten(1)[row, place])]))
    torch.testing.assert_close(
        made.nats(values).double().sum((1, 2, 3)), total, rtol=1e-5, atol=1e-4
    )


def test_pixel_encodings_add_the_pixels_place_and_the_channels_colour():
    places = PixelPosition(config("sine-2d"), SIZE)
    x = torch.randn(2, LENGTH, 24)
    sine = create_position("sine-2d", width=16)
    where = sine.embeddings(torch.zeros(1, 9, 16), PositionContext(grid=(SIZE, SIZE)))[0]
    added = places(x) - x
    for place in range(LENGTH):
        pixel, channel = divmod(place, 3)
        expected = torch.cat([where[pixel], places.colours[channel]])
        torch.testing.assert_close(added[0, place], expected, atol=1e-6, rtol=0)
    assert torch.allclose(added[0], added[1], atol=1e-6)


@pytest.mark.parametrize(
    ("position", "expected", "printed"),
    [
        ({"name": "learned-1d"}, 73_198_848, 73.2),
        ({"name": "learned-2d"}, 60_665_856, 60.7),
        ({"name": "sine-1d"}, 60_615_936, 60.6),
        ({"name": "sine-2d"}, 60_616_704, 60.6),
        ({"name": "md-sine"}, 60_616_704, 60.6),
        ({"name": "md-sine", "options": {"mlp": 32}}, 60_666_656, 60.7),
        ({"name": "mlp"}, 60_642_144, 60.6),
        ({"name": "fourier", "options": {"mlp": False}}, 60_617_472, 60.6),
        (None, 60_655_584, 60.7),  # the shipped one, Learnable-Fourier + MLP
    ],
)
def test_the_papers_models_have_its_parameters(position, expected, printed):
    """Table 7 of Li et al. 2021; papers.md#fourier-f14 has the layers."""
    task = load_config(CONFIGS / "pixels_imagenet64.yaml", VisionConfig).task
    chosen = {} if position is None else {"positions": [position]}
    with torch.device("meta"):
        changed = PixelModelConfig.model_validate(task.model.model_dump() | chosen)
        made = PixelTransformer(changed, task.data.image_size)
    assert sum(parameter.numel() for parameter in made.parameters()) == expected
    assert round(expected / 1e6, 1) == printed


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([], {"heads": 5}, r"model.heads 5 do not divide model.width 24"),
        ([], {"channel_width": 24}, "channel_width 24 must be above 0 and below"),
        (["sape"], {}, r"sape with .* sees later tokens"),
        (["irpe-product"], REFORMER, "irpe-product acts in attention"),
        ([], {"head_width": 5}, "head_width is only for"),
    ],
)
def test_what_does_not_fit_is_refused(names, options, message):
    with pytest.raises(ConfigError, match=message):
        PixelTransformer(config(*names, **options), SIZE)
    with pytest.raises(ValueError, match=r"not \(2, 4, 3, 3\)"):
        model()(torch.zeros(2, 4, 3, 3, dtype=torch.int64))


WIDTH, HEADS, HEAD_WIDTH = 6, 2, 5


def attention_by_loop(attention, states):
    """Kitaev et al., section 2: k = q / |q|, and no token attends to itself if it can help it."""
    out = torch.zeros_like(states)
    for row, sequence in enumerate(states):
        for place in range(len(sequence)):
            parts = []
            for head in range(HEADS):
                rows = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
                query = sequence @ attention.query.weight[rows].T
                value = sequence @ attention.value.weight[rows].T
                seen = range(place) if place else [0]
                logits = [query[place] @ query[one] / query[one].norm() for one in seen]
                shares = torch.stack(logits).softmax(0)
                parts.append(sum(share * value[one] for share, one in zip(shares, seen)))
            out[row, place] = attention.output.weight @ torch.cat(parts)
    return out


@pytest.mark.parametrize("length", [1, 2, 7])
def test_attention_is_that_of_a_loop(length):
    attention = SharedQueryAttention(WIDTH, HEADS, HEAD_WIDTH).double()
    states = torch.randn(3, length, WIDTH, dtype=torch.float64)
    expected = attention_by_loop(attention, states)
    torch.testing.assert_close(attention(states), expected)


def test_a_layer_can_be_undone():
    layer = ReformerLayer(WIDTH, HEADS, HEAD_WIDTH, 8).double()
    x = torch.randn(2, 5, 2 * WIDTH, dtype=torch.float64)
    first, second = layer(x, PositionContext()).chunk(2, -1)
    second = second - layer.feed_forward(layer.feed_forward_norm(first))
    first = first - layer.attention(layer.attention_norm(second))
    torch.testing.assert_close(torch.cat([first, second], -1), x)
