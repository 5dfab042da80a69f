"""PEmixer and what all token encodings share, held on every one of them."""

from __future__ import annotations

import pytest
import torch

from vlp.positions import PositionContext
from vlp.positions.base import TokenEncoding, mix
from vlp.positions.fourier import FourierPosition, MLPPosition
from vlp.positions.learned import LearnedBoxPosition, LearnedGridPosition, LearnedPosition
from vlp.positions.object import ObjectPosition
from vlp.positions.sine import MDSinePosition, SinePosition

WIDTH, GRID = 16, (2, 3)
ENCODINGS = {
    "learned-1d": lambda **options: LearnedPosition(WIDTH, grid=GRID, **options),
    "learned-2d": lambda **options: LearnedGridPosition(WIDTH, GRID, **options),
    "learned-4d": lambda **options: LearnedBoxPosition(WIDTH, GRID, **options),
    "sine-1d": lambda **options: SinePosition(1, WIDTH, **options),
    "sine-2d": lambda **options: SinePosition(2, WIDTH, GRID, **options),
    "sine-4d": lambda **options: SinePosition(4, WIDTH, GRID, mlp=5, **options),
    "md-sine": lambda **options: MDSinePosition(WIDTH, GRID, **options),
    "fourier": lambda **options: FourierPosition(WIDTH, GRID, norm=True, **options),
    "mlp": lambda **options: MLPPosition(WIDTH, GRID, **options),
    "object": lambda **options: ObjectPosition(WIDTH, GRID, **options),
}
BOXES = torch.tensor([[[0.0, 0, 2, 1], [1, 0, 2, 2]]])


def test_mix_is_reading_v8():
    tokens, positions = torch.randn(2, 5, 4).double(), torch.randn(1, 5, 4).double()
    alpha, beta = torch.randn(4).double(), torch.randn(4).double()
    out = mix(tokens, positions, alpha, beta)
    for image in range(2):
        for token in range(5):
            for channel in range(4):
                expected = alpha[channel] * tokens[image, token, channel]
                expected = expected + beta[channel] * positions[0, token, channel]
                assert out[image, token, channel] == expected
    inputs = [x.requires_grad_() for x in (tokens, positions, alpha, beta)]
    assert torch.autograd.gradcheck(mix, inputs)


def test_mix_computes_half_precision_in_float32():
    """3 * 85.5 + 1 = 257.5 rounds to 258; each step in bfloat16 would end at 256."""
    token = torch.full((1, 1, 1), 85.5, dtype=torch.bfloat16)
    position = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    alpha, beta = torch.full((1,), 3.0), torch.ones(1)
    assert alpha.bfloat16() * token + position == 256
    mixed = mix(token, position, alpha.bfloat16(), beta.bfloat16())
    assert mixed.dtype == torch.bfloat16
    assert mixed == 258


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_mixer_weighs_tokens_and_places(name):
    context = PositionContext(GRID, 1, boxes=BOXES)
    torch.manual_seed(0)
    plain = ENCODINGS[name]().double()
    mixed = ENCODINGS[name](mixer=True).double()
    assert set(mixed.state_dict()) - set(plain.state_dict()) == {"alpha", "beta"}
    mixed.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(3, 7, WIDTH).double()
    added = plain("tokens", x, context)
    assert torch.equal(added[:, :1], x[:, :1])
    assert not torch.equal(added[:, 1:], x[:, 1:])
    torch.testing.assert_close(mixed("tokens", x, context), added)  # both vectors start at 1

    with torch.no_grad():
        mixed.alpha.normal_()
        mixed.beta.normal_()
    expected = mixed.alpha * x + mixed.beta * (added - x)
    torch.testing.assert_close(mixed("tokens", x, context), expected)
    assert plain.hooks == mixed.hooks == {"tokens"}


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("mixer", [False, True])
def test_kinds_and_finite_gradients(name, mixer):
    context = PositionContext(GRID, 1, boxes=BOXES)
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        encoding = ENCODINGS[name](mixer=mixer)
        x = torch.zeros(2, 7, WIDTH, dtype=kind, requires_grad=True)
        out = encoding("tokens", x, context)
        assert out.dtype == kind
        assert out.isfinite().all()
        out.float().square().sum().backward()
        assert x.grad.isfinite().all()
        for parameter in encoding.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", ENCODINGS)
def test_tokens_of_another_shape_are_an_error(name):
    encoding = ENCODINGS[name]()
    with pytest.raises(ValueError, match=rf"{name} is for tokens .* 16\), not \(1, 6, 8\)"):
        encoding("tokens", torch.zeros(1, 6, 8), PositionContext(GRID))
    with pytest.raises(ValueError, match=rf"{name} is for tokens .* not \(6, 16\)"):
        encoding("tokens", torch.zeros(6, WIDTH), PositionContext(GRID))


def test_an_encoding_must_say_its_places():
    encoding = TokenEncoding("new", 4)
    with pytest.raises(NotImplementedError):
        encoding("tokens", torch.zeros(1, 2, 4), PositionContext())
    with pytest.raises(ValueError, match="new: width 0"):
        TokenEncoding("new", 0)


def test_places_of_another_batch_are_an_error():
    boxes = BOXES.expand(3, -1, -1)
    with pytest.raises(ValueError, match="object: places of 3 images do not fit a batch of 2"):
        ENCODINGS["object"]()(
            "tokens", torch.zeros(2, 6, WIDTH), PositionContext(GRID, 0, boxes=boxes)
        )
