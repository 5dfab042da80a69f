import math

import pytest
import torch
from sinusoids_by_hand import added, close, slow_sinusoid

from vlp.positions import PositionContext
from vlp.positions.sine import MDSinePosition, SinePosition, md_sinusoid, sinusoid


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("temperature", [10_000.0, 10.0])
def test_equation_1(layout, temperature):
    positions = torch.tensor([[0.0, 1.0, 2.5], [-3.0, 100.0, 7.0]]).double()
    out = sinusoid(positions, 6, temperature, layout)
    assert out.shape == (2, 3, 6)
    for i in range(2):
        for j in range(3):
            close(out[i, j], slow_sinusoid(positions[i, j].item(), 6, layout, temperature))


def test_kinds():
    positions = torch.arange(4)
    assert sinusoid(positions, 4).dtype == torch.float32
    half = sinusoid(positions.bfloat16() * 60, 6)
    assert half.dtype == torch.bfloat16
    exact = sinusoid(positions.double() * 60, 6)
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=0.005)
    x = torch.rand(3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinusoid(x, 6), x)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (4, 2)])
def test_sine_2d_gives_rows_the_first_half(grid, prefix, layout):
    encoding = SinePosition(2, 8, (3, 4) if prefix else grid, layout=layout)
    context = PositionContext(grid if prefix else None, prefix)
    out = added(encoding, context, prefix + grid[0] * grid[1])
    assert not out[0, :prefix].any()
    for row in range(grid[0]):
        for column in range(grid[1]):
            down = slow_sinusoid(row, 4, layout)
            right = slow_sinusoid(column, 4, layout)
            close(out[0, prefix + row * grid[1] + column], down + right)


@pytest.mark.parametrize("extent", [None, 100.0])
def test_sine_4d_gives_quarters_to_top_left_bottom_right(extent):
    rows, columns = grid = (2, 3)
    encoding = SinePosition(4, 16, temperature=100.0, extent=extent)
    out = added(encoding, PositionContext(grid), 6)
    down, right = (1, 1) if extent is None else (extent / rows, extent / columns)
    for row in range(rows):
        for column in range(columns):
            edges = [row * down, column * right, (row + 1) * down, (column + 1) * right]
            expected = [
                value for edge in edges for value in slow_sinusoid(edge, 4, temperature=100.0)
            ]
            close(out[0, row * columns + column], expected)


def test_sine_1d_numbers_the_tokens():
    encoding = SinePosition(1, 6)
    for context, tokens in [
        (PositionContext((2, 3), 2), 8),
        (PositionContext((3, 2), 2), 8),
        (PositionContext(prefix_tokens=2), 8),
        (PositionContext(prefix_tokens=2, coordinates=torch.rand(1, 6, 4)), 8),
    ]:
        out = added(encoding, context, tokens)
        assert not out[0, :2].any()
        for token in range(tokens - 2):
            close(out[0, 2 + token], slow_sinusoid(token, 6))
    assert added(encoding, PositionContext(prefix_tokens=2), 2).eq(0).all()


def test_extent_normalises():
    encoding = SinePosition(2, 8, extent=2 * math.pi)
    out = added(encoding, PositionContext((2, 4)), 8)
    for row in range(2):
        for column in range(4):
            down = slow_sinusoid((row + 0.5) / 2 * 2 * math.pi, 4)
            right = slow_sinusoid((column + 0.5) / 4 * 2 * math.pi, 4)
            close(out[0, row * 4 + column], down + right)
    sequence = added(SinePosition(1, 4, extent=10.0), PositionContext(), 4)
    for token in range(4):
        close(sequence[0, token], slow_sinusoid((token + 0.5) * 2.5, 4))


def test_boxes_of_the_context():
    encoding = SinePosition(4, 16, (3, 3))
    boxes = torch.rand(2, 5, 4).double()
    context = PositionContext(prefix_tokens=1, coordinates=boxes)
    out = added(encoding, context, 6, batch=2)
    for image in range(2):
        for token in range(5):
            left, top, right, bottom = (3 * boxes[image, token]).tolist()
            expected = [v for edge in (top, left, bottom, right) for v in slow_sinusoid(edge, 4)]
            close(out[image, 1 + token], expected)


@pytest.mark.parametrize(("dimensions", "groups"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_an_mlp_serves_every_group(dimensions, groups):
    encoding = SinePosition(dimensions, 16, mlp=5, groups=groups).double()
    plain = SinePosition(dimensions, 16)
    context = PositionContext((2, 3))
    waves = added(plain, context, 6)
    share = 16 // groups
    parts = [encoding.mlp(waves[..., i * share : (i + 1) * share]) for i in range(groups)]
    torch.testing.assert_close(added(encoding, context, 6), torch.cat(parts, -1))
    assert not list(plain.parameters())
    count = sum(parameter.numel() for parameter in encoding.parameters())
    assert count == share * 5 + 5 + 5 * share + share


def test_md_sine_with_frequencies_of_its_own():
    freqs = [[0.5, 1.0], [2.0, -0.25], [0.0, 3.0]]
    encoding = MDSinePosition(6, freqs=freqs, layout="interleaved")
    out = added(encoding, PositionContext((2, 3)), 6)
    for row in range(2):
        for column in range(3):
            angles = [fx * column + fy * row for fx, fy in freqs]
            expected = [wave(angle) for angle in angles for wave in (math.sin, math.cos)]
            close(out[0, row * 3 + column], expected)
    assert encoding.double().to(torch.bfloat16).freqs == freqs  # never rounded with the module


def test_md_sine_on_boxes_and_with_an_mlp():
    boxes = torch.rand(2, 3, 4).double()
    context = PositionContext(coordinates=boxes)
    plain = MDSinePosition(8, dimensions=4, extent=10.0)
    out = added(plain, context, 3, batch=2)
    for image in range(2):
        for token in range(3):
            close(out[image, token], slow_sinusoid(10 * boxes[image, token].sum().item(), 8))
    encoding = MDSinePosition(8, dimensions=4, extent=10.0, mlp=5).double()
    torch.testing.assert_close(added(encoding, context, 3, batch=2), encoding.mlp(out))


def test_md_sine_on_meta_has_its_numbers():
    with torch.device("meta"):
        made = [MDSinePosition(8), MDSinePosition(8, freqs=[1.0, 2.0, 3.0, 4.0])]
    assert made[0].freqs == MDSinePosition(8).freqs
    assert made[1].freqs == [1.0, 2.0, 3.0, 4.0]


def test_angles_are_exact_under_autocast():
    coords = torch.tensor([[200.0, 131.0]])
    freqs = torch.tensor([[1.0, 0.7], [0.3, -1.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [md_sinusoid(coords, freqs), sinusoid(coords, 4)]
    exact = [md_sinusoid(coords.double(), freqs.double()), sinusoid(coords.double(), 4)]
    for low, high in zip(found, exact):
        torch.testing.assert_close(low.double(), high, rtol=0, atol=1e-4)
