import cmath
import copy
import itertools
import math

import pytest
import torch

from vlp.positions.base import PositionContext
from vlp.positions.rotary import (
    RotaryAxial,
    RotaryMixed,
    RotarySequence,
    axial_angles,
    grid_positions,
    mixed_angles,
    rotate,
    sequence_angles,
)

WIDTH, HEADS = 16, 2
FORMS = [RotarySequence, RotaryAxial, RotaryMixed]
GRID_FORMS = [RotaryAxial, RotaryMixed]


def states(tokens, batch=2):
    return [torch.randn(batch, HEADS, tokens, WIDTH // HEADS).double() for _ in range(2)]


def made(form, **options):
    return form(width=WIDTH, heads=HEADS, **options).double()


def turned(x, angles, layout):
    """One complex number at a time; angles (T, d/2), x (T, d)."""
    out, half = x.clone(), x.shape[-1] // 2
    for token, pair in itertools.product(range(x.shape[0]), range(half)):
        channels = [2 * pair, 2 * pair + 1] if layout == "interleaved" else [pair, pair + half]
        number = complex(*x[token, channels]) * cmath.exp(1j * angles[token, pair].item())
        out[token, channels] = torch.tensor([number.real, number.imag], dtype=x.dtype)
    return out


@pytest.mark.parametrize("theta", [100.0, 10.0])
@pytest.mark.parametrize(("height", "width", "dim"), [(3, 2, 8), (1, 5, 4), (2, 4, 12), (1, 1, 4)])
def test_axial_angles(height, width, dim, theta):
    expected = torch.zeros(height * width, dim // 2).double()
    for row in range(height):
        for column in range(width):
            for k in range(dim // 4):
                pace = theta ** (-4 * k / dim)
                expected[row * width + column, k] = column * pace
                expected[row * width + column, dim // 4 + k] = row * pace
    angles = axial_angles(height, width, dim, theta)
    torch.testing.assert_close(angles, expected, rtol=0, atol=1e-14)


def test_theta_of_images_is_100_and_of_sequences_10000():
    assert axial_angles(2, 3, 8)[4].tolist() == pytest.approx([1, 0.1, 1, 0.1])
    for place in range(3):
        expected = [place * 10000 ** (-2 * k / 8) for k in range(4)]
        assert sequence_angles(3, 8)[place].tolist() == pytest.approx(expected, abs=1e-14)


def test_rotate_multiplies_complex_numbers():
    x, angles = torch.randn(5, 8).double(), torch.randn(5, 4).double() * 10
    expected = turned(x, angles, "interleaved")
    torch.testing.assert_close(rotate(x, angles), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_rotated_in_float32(kind):
    x = torch.randn(64, 8).to(kind)
    angles = axial_angles(8, 8, 8)
    out = rotate(x, angles)
    assert out.dtype == kind
    # the rounding of the result is the only one to half precision; float32 seldom changes it
    assert (out != rotate(x.double(), angles).to(kind)).double().mean() < 0.01


def test_large_angles_are_rounded_after_their_cosine():
    x, angles = torch.randn(2000, 8), axial_angles(1, 2000, 8)
    exact = rotate(x.double(), angles)
    torch.testing.assert_close(rotate(x, angles).double(), exact, rtol=0, atol=1e-6)


def test_mixed_angles():
    places, frequencies = torch.randn(5, 2).double(), torch.randn(2, 3, 4).double()
    angles = mixed_angles(places, frequencies)
    assert angles.shape == (3, 5, 4)
    for head in range(3):
        for token in range(5):
            x, y = places[token]
            expected = x * frequencies[0, head] + y * frequencies[1, head]
            torch.testing.assert_close(angles[head, token], expected, rtol=0, atol=1e-14)
    assert mixed_angles(places[None], frequencies).shape == (1, 3, 5, 4)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_encodings_rotate_every_head_and_leave_the_prefix(form, prefix, layout):
    grid = (2, 3)
    position = made(form, layout=layout)
    query, key = states(prefix + 6)
    new = position("rotate", query, key, PositionContext(grid, prefix))
    assert position.hooks == {"rotate"}
    for old, out in zip((query, key), new, strict=True):
        assert torch.equal(out[:, :, :prefix], old[:, :, :prefix])
        for head in range(HEADS):
            if form is RotarySequence:
                angles = sequence_angles(6, 8)
            elif form is RotaryAxial:
                angles = axial_angles(*grid, 8)
            else:
                angles = mixed_angles(grid_positions(*grid), position.frequency_table)[head]
            for sample in range(len(old)):
                expected = turned(old[sample, head, prefix:], angles, layout)
                found = out[sample, head, prefix:]
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_start_of_mixed_is_one_direction_per_head_and_its_perpendicular():
    position = RotaryMixed(width=48, heads=4)
    assert position.frequency_table.shape == (2, 4, 6)
    x, y = position.frequency_table.detach()
    pace = torch.tensor([10 ** (-4 * k / 12) for k in range(3)])
    torch.testing.assert_close(torch.hypot(x, y), pace.repeat(2).expand(4, -1))
    direction = torch.atan2(y, x)
    torch.testing.assert_close(direction[:, 0], direction[:, 2])
    turn = (direction[:, 3] - direction[:, 0]).remainder(2 * math.pi)
    torch.testing.assert_close(turn, torch.full((4,), math.pi / 2))
    assert direction[:, 0].unique().numel() == 4  # heads look elsewhere
    assert not torch.equal(RotaryMixed(width=48, heads=4).frequency_table[0], x)  # layers too
    assert "frequency_table" in position.no_weight_decay()


@pytest.mark.parametrize("form", GRID_FORMS)
def test_the_middle_of_a_patch_is_that_patch(form):
    trained, prefix = (4, 3), 1
    plain, spread = made(form, grid=trained), made(form, grid=trained, rescale=True)
    spread.load_state_dict(plain.state_dict())
    for grid, position in (((4, 3), plain), ((4, 3), spread), ((2, 6), spread), ((7, 5), spread)):
        query, key = states(prefix + grid[0] * grid[1])
        place = grid_positions(*grid)
        middle = (place + 0.5) / torch.tensor([grid[1], grid[0]])
        box = torch.cat([middle - 0.1, middle + 0.1], -1)
        expected, _ = position("rotate", query, key, PositionContext(grid, prefix))
        for coordinates in (middle[None], box.expand(2, -1, -1)):
            context = PositionContext(None, prefix, coordinates)
            for model in (plain, spread):  # coordinates mean the same with and without rescaling
                out, _ = model("rotate", query, key, context)
                torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    other = PositionContext((2, 6), prefix)
    query, key = states(13)
    first, second = (model("rotate", query, key, other)[0] for model in (plain, spread))
    assert not torch.allclose(first, second)


def test_bfloat16_weights_of_mixed_are_multiplied_in_float32():
    position = RotaryMixed(WIDTH, HEADS).bfloat16()
    query, key = (x.bfloat16() for x in states(40 * 40, batch=1))
    out, _ = position("rotate", query, key, PositionContext((40, 40)))
    exact = copy.deepcopy(position).double()
    expected, _ = exact("rotate", query.double(), key.double(), PositionContext((40, 40)))
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_another_kind_are_an_error(form):
    position, context = made(form), PositionContext((2, 3), 1)
    query, key = states(7)
    with pytest.raises(ValueError, match=r"head width 8, not \(7, 8\) and \(6, 8\)"):
        position("rotate", query, key[:, :, 1:], context)
    with pytest.raises(ValueError, match=r"head width 8, not \(7, 4\) and \(7, 4\)"):
        position("rotate", query[..., :4], key[..., :4], context)
    if form is RotarySequence:
        with pytest.raises(ValueError, match="rope-1d: 8 prefix tokens are more than the 7 tokens"):
            position("rotate", query, key, PositionContext(prefix_tokens=8))
        return
    with pytest.raises(ValueError, match=r"a 3 x 3 grid are 10 tokens .* not 7"):
        position("rotate", query, key, PositionContext((3, 3), 1))
    with pytest.raises(ValueError, match="needs a grid, in its options or in the context"):
        position("rotate", query, key, PositionContext(None, 1))
    with pytest.raises(ValueError, match="coordinates need a grid in the options"):
        position("rotate", query, key, PositionContext(None, 1, torch.rand(1, 6, 2)))
    position = made(form, grid=(2, 3))
    for shape in ((1, 7, 2), (1, 6, 3), (6, 2)):
        with pytest.raises(ValueError, match=r"need coordinates \(batch, 6, 2 or 4\), not "):
            position("rotate", query, key, PositionContext(None, 1, torch.rand(shape)))


def test_impossible_angles_are_named():
    for function, arguments, message in (
        (axial_angles, (2, 3, 6), "head width that 4 divides, not 6"),
        (sequence_angles, (3, 5), "head width that 2 divides, not 5"),
        (axial_angles, (0, 3, 8), "grid of 0 x 3"),
        (sequence_angles, (-1, 8), "sequence of -1 tokens"),
        (axial_angles, (2, 3, 8, -1), "theta must be positive, not -1"),
        (rotate, (torch.zeros(6, 8), torch.zeros(6, 3)), r"\(6, 3\) does not fit \(6, 8\)"),
        (rotate, (torch.zeros(6, 8), torch.zeros(5, 4)), r"\(5, 4\) does not fit \(6, 8\)"),
        (rotate, (torch.zeros(6, 8), torch.zeros(6, 4), "whole"), "layout 'whole'"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)
