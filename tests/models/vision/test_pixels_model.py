"""The pixel transformer: likelihood that is one, no look ahead, and images drawn from it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from vlp.config import ConfigError, load_config
from vlp.positions import create_position
from vlp.positions.base import PositionContext
from vlp.tasks.pixels.model import (
    PixelModelConfig,
    PixelPlaces,
    PixelTransformer,
    sequence_context,
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
    [
        (["fourier"], {}),
        (["learned-1d"], {}),
        (["sine-2d", "irpe-cross"], {}),
        (["fourier"], REFORMER),
    ],
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


def test_the_likelihoods_of_all_values_sum_to_one():
    made, values = model("sine-2d"), images(1).expand(256, -1, -1, -1).clone()
    values[:, 1, 2, 1] = torch.arange(256)
    shares = (-made.nats(values)[:, 1, 2, 1]).exp()
    assert shares.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("names", [(), ("learned-2d",), ("sine-1d",), ("fourier", "alibi-2d")])
def test_an_untrained_model_needs_8_bits(names):
    made = PixelTransformer(config(*names), SIZE)
    bits = made.nats(images(8)).mean().item() / math.log(2)
    assert bits == pytest.approx(8, abs=0.02)


def test_pixel_encodings_add_the_pixels_place_and_the_channels_colour():
    places = PixelPlaces(config("sine-2d"), SIZE)
    x = torch.randn(2, LENGTH, 24)
    sine = create_position("sine-2d", width=16)
    where = sine.places(torch.zeros(1, 9, 16), PositionContext(grid=(SIZE, SIZE)))[0]
    added = places(x) - x
    for place in range(LENGTH):
        pixel, channel = divmod(place, 3)
        expected = torch.cat([where[pixel], places.colours[channel]])
        torch.testing.assert_close(added[0, place], expected, atol=1e-6, rtol=0)
    assert torch.allclose(added[0], added[1], atol=1e-6)


def test_sequence_encodings_number_the_channels_and_have_no_colours():
    places = PixelPlaces(config("learned-1d"), SIZE)
    assert {name: tuple(p.shape) for name, p in places.named_parameters()} == {
        "sequence.0.table": (LENGTH, 24)
    }
    x = torch.randn(1, LENGTH, 24)
    torch.testing.assert_close(places(x), x + places.sequence[0].table)


def test_encodings_combine():
    places = PixelPlaces(config("learned-1d", "learned-2d"), SIZE)
    x = torch.zeros(1, LENGTH, 24)
    pixel = places.pixel[0].places(torch.zeros(1, 9, 16), PositionContext(grid=(SIZE, SIZE)))
    expected = places.sequence[0].table[14] + torch.cat([pixel[0, 4], places.colours[2]])
    torch.testing.assert_close(places(x)[0, 14], expected)


def test_the_papers_encodings_have_its_parameters():
    """papers.md#fourier-f13: at 64 x 64 and width 768 of 1024."""
    sizes = {}
    for name, options in {
        "learned-2d": {},
        "fourier": {"features": 384, "hidden": 32},
        "learned-1d": {},
        "sine-2d": {},
    }.items():
        whole = {"width": 1024, "channel_width": 256}
        places = PixelPlaces(config({"name": name, "options": options}, **whole), 64)
        sizes[name] = sum(
            p.numel() for p in [*places.pixel.parameters(), *places.sequence.parameters()]
        )
        assert (places.colours is None) == (name == "learned-1d")
    assert sizes == {
        "learned-2d": 49_152,
        "fourier": 38_048,
        "learned-1d": 12_288 * 1024,
        "sine-2d": 0,
    }


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
    ("names", "options"), [(["fourier"], {}), (["irpe-product"], {}), (["fourier"], REFORMER)]
)
def test_bf16_gradients_are_finite(names, options):
    made = PixelTransformer(config(*names, **options), SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        loss = made.nats(images()).sum()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"model.heads 5 do not divide model.width 24"):
        PixelTransformer(config(heads=5), SIZE)
    with pytest.raises(ConfigError, match="channel_width 24 leaves no channels"):
        PixelTransformer(config(channel_width=24), SIZE)
    with pytest.raises(ConfigError, match=r"sape with .* sees later tokens"):
        PixelTransformer(config("sape"), SIZE)
    with pytest.raises(ConfigError, match="unknown position encoding 'sine'"):
        PixelTransformer(config("sine"), SIZE)
    with pytest.raises(ValueError, match=r"not \(2, 4, 3, 3\)"):
        model()(torch.zeros(2, 4, 3, 3, dtype=torch.int64))
    assert sequence_context(4).grid == (4, 12)


def test_reformers_layers_refuse_what_they_have_no_place_for():
    with pytest.raises(ConfigError, match="reformer has no place for irpe-product"):
        PixelTransformer(config("irpe-product", **REFORMER), SIZE)
    with pytest.raises(ConfigError, match="head_width is of layer reformer"):
        PixelTransformer(config(head_width=5), SIZE)
