import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.positions.buckets import (
    bucket_ids,
    clip_index,
    piecewise_index,
    table_size,
)

METHODS = ("euclidean", "quantization", "cross", "product")
GRIDS = [(3, 4), (5, 2), (1, 7), (7, 1), (1, 1), (9, 9)]


def round_half_even(x):
    low = math.floor(x)
    if x - low != 0.5:
        return math.floor(x + 0.5)
    return low if low % 2 == 0 else low + 1


def g(x, ratio):
    alpha, beta, gamma = ratio, 2 * ratio, 8 * ratio
    if abs(x) <= alpha:
        return round_half_even(x)
    far = alpha + math.log(abs(x) / alpha) / math.log(gamma / alpha) * (beta - alpha)
    return int(math.copysign(min(beta, round_half_even(far)), x))


def h(x, ratio):
    limit = int(2 * ratio)
    return max(-limit, min(limit, round_half_even(x)))


def reference_ids(method, height, width, ratio, function, prefix, pre_round, variant, universe):
    index = g if function == "piecewise" else h
    shift = int(2 * ratio)
    side = 2 * shift + 1
    size = (side * side if method == "product" else side) + (1 if prefix else 0)
    distances = {a * a + b * b for a in range(height) for b in range(width)}
    if universe == "global":
        reach = height + width
        every = {a * a + b * b for a in range(reach) for b in range(reach)}
        distances = {d for d in every if d <= max(distances)}
    rank = {d: place for place, d in enumerate(sorted(distances))}
    tokens = prefix + height * width
    tables = 2 if method == "cross" else 1
    ids = torch.full((tables, tokens, tokens), size - 1)
    for i in range(height * width):
        for j in range(height * width):
            dy, dx = i // width - j // width, i % width - j % width
            squared = dx * dx + dy * dy
            if method == "euclidean":
                distance = math.sqrt(squared)
                found = [index(round_half_even(distance) if pre_round else distance, ratio) + shift]
            elif method == "quantization":
                found = [index(squared if variant == "squared" else rank[squared], ratio) + shift]
            elif method == "cross":
                found = [index(dy, ratio) + shift, index(dx, ratio) + shift]
            else:
                found = [(index(dy, ratio) + shift) * side + index(dx, ratio) + shift]
            ids[:, prefix + i, prefix + j] = torch.tensor(found)
    return (ids if method == "cross" else ids[0]), size


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("function", ["piecewise", "clip"])
@pytest.mark.parametrize("ratio", [0.4, 1.9])
def test_ids_are_those_of_a_loop_over_pairs(method, function, ratio):
    for (height, width), prefix in zip(GRIDS, (0, 2, 0, 2, 1, 2), strict=True):
        ids, size = bucket_ids(method, height, width, ratio, function, prefix)
        expected, expected_size = reference_ids(
            method, height, width, ratio, function, prefix, False, "rank", "grid"
        )
        assert size == expected_size == table_size(method, ratio, prefix)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, expected)
        assert ids.min() >= 0
        assert ids.max() < size


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("euclidean", {"pre_round": True}),
        ("quantization", {"variant": "squared"}),
        ("quantization", {"universe": "global"}),
    ],
)
def test_the_other_readings_are_those_of_a_loop_over_pairs(method, option):
    settings_ = {"pre_round": False, "variant": "rank", "universe": "grid"} | option
    differs = False
    for height, width in [*GRIDS, (2, 9)]:
        for ratio in (1.9, 5.0):
            ids, _ = bucket_ids(method, height, width, ratio, prefix_tokens=1, **option)
            expected, _ = reference_ids(method, height, width, ratio, "piecewise", 1, **settings_)
            assert torch.equal(ids, expected)
            default, _ = bucket_ids(method, height, width, ratio, prefix_tokens=1)
            differs = differs or not torch.equal(ids, default)
    assert differs


@pytest.mark.parametrize(
    ("method", "ratio", "used", "rows"),
    [
        ("euclidean", 20, 20, 82),
        ("quantization", 33, 51, 134),
        ("cross", 20, 56, 82),
        ("product", 1.9, 50, 50),
    ],
)
def test_bucket_counts_of_table_1(method, ratio, used, rows):
    ids, size = bucket_ids(method, 14, 14, ratio, prefix_tokens=1)
    assert sum(len(table.unique()) for table in ids.view(-1, 197, 197)) == used
    assert size == rows
    if method == "cross":
        assert [len(table.unique()) for table in ids] == [28, 28]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.floats(-300, 300), min_size=1, max_size=20), st.floats(0.3, 40))
def test_piecewise_index_is_eq_18(distances, ratio):
    found = piecewise_index(torch.tensor(distances).double(), ratio, 2 * ratio, 8 * ratio)
    expected = [g(x, ratio) for x in distances]
    for x, index, reference in zip(distances, found.tolist(), expected, strict=True):
        if abs(index - reference) == 1:  # the two logarithms may differ in the last bit
            far = ratio + math.log(abs(x) / ratio) / math.log(8) * ratio
            assert abs(abs(far) % 1 - 0.5) < 1e-9
        else:
            assert index == reference
    assert found.abs().max() <= int(2 * ratio)
    ordered = piecewise_index(torch.tensor(sorted(distances)).double(), ratio, 2 * ratio, 8 * ratio)
    assert (ordered.diff() >= 0).all()


def test_halves_go_to_the_even_neighbour_and_precision_does_not_matter():
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert piecewise_index(halves, 4, 8, 32).tolist() == [0, 2, 2, 0, -2, -2]
    assert clip_index(halves, 8.9).tolist() == [0, 2, 2, 0, -2, -2]
    assert clip_index(torch.tensor([9.0, -9.0]), 3.8).tolist() == [3, -3]
    assert piecewise_index(torch.tensor([99.0, -99.0, 0.0]), 1.9, 3.8, 15.2).tolist() == [3, -3, 0]
    distances = torch.arange(-99, 100)
    expected = piecewise_index(distances.double(), 1.9, 3.8, 15.2)
    for kind in (torch.int64, torch.float32, torch.bfloat16):
        assert torch.equal(piecewise_index(distances.to(kind), 1.9, 3.8, 15.2), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "manhattan"}, "method 'manhattan'; one of euclidean, quantization, cross"),
        ({"function": "linear"}, "function 'linear'; one of piecewise, clip"),
        ({"variant": "exact"}, "variant 'exact'; one of rank, squared"),
        ({"universe": "all"}, "universe 'all'; one of grid, global"),
        ({"prefix_tokens": -1}, "prefix_tokens must not be negative, not -1"),
        ({"ratio": 0.0}, "ratio must be positive, not 0.0"),
        ({"ratio": math.nan}, "ratio must be positive, not nan"),
        ({"height": 0}, "0 x 4 has no patches"),
    ],
)
def test_bad_options_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bucket_ids(**{"method": "product", "height": 3, "width": 4} | arguments)


@pytest.mark.parametrize("numbers", [(0, 2, 8), (2, 2, 8), (3, 2, 8), (1, 2, 1), (-1, 2, 8)])
def test_impossible_curves_are_refused(numbers):
    alpha, beta, gamma = numbers
    with pytest.raises(ValueError, match=f"alpha {alpha}, beta {beta}, gamma {gamma}"):
        piecewise_index(torch.zeros(1), alpha, beta, gamma)
    with pytest.raises(ValueError, match="-1"):
        clip_index(torch.zeros(1), -1)
