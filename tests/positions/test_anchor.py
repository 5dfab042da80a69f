"""The anchor path against its definition, four loops deep."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.positions.anchor import (
    anchor_distance,
    anchor_path,
    embed_path,
    group_similarity,
    mean_over_patches,
    mean_over_words,
)


def patch_distance(a, b, metric):
    down, right = abs(a[0] - b[0]), abs(a[1] - b[1])
    return {"euclidean": math.hypot(down, right), "manhattan": down + right}.get(
        metric, max(down, right)
    )


def slow_path(distance, grid, mask, text_window, patch_window, metric):
    """Eq. 7 word for word, for one pair and one group at a time."""
    patches, tokens, groups = distance.shape
    rows, columns = grid
    places = [(row, column) for row in range(rows) for column in range(columns)]
    side = math.isqrt(patch_window) // 2 if patch_window else max(grid)
    reach = text_window // 2 if text_window else tokens
    path = torch.zeros_like(distance)
    reachable = torch.zeros_like(distance, dtype=torch.bool)
    for m in range(patches):
        for n in range(tokens):
            for g in range(groups):
                best = math.inf
                for i in range(patches):
                    if (
                        max(abs(places[m][0] - places[i][0]), abs(places[m][1] - places[i][1]))
                        > side
                    ):
                        continue
                    for j in range(tokens):
                        if abs(j - n) > reach or not mask[j] or not mask[n]:
                            continue
                        length = (
                            patch_distance(places[m], places[i], metric)
                            + float(distance[i, j, g])
                            + abs(j - n)
                        )
                        best = min(best, length)
                if math.isfinite(best):
                    path[m, n, g], reachable[m, n, g] = best, True
    return path, reachable


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    tokens=st.integers(1, 6),
    text_window=st.sampled_from([1, 3, 5, None]),
    patch_window=st.sampled_from([1, 9, 25, None]),
    metric=st.sampled_from(["euclidean", "manhattan", "chebyshev"]),
    threshold=st.sampled_from([0.05, 0.3, 0.7]),
    seed=st.integers(0, 1000),
)
def test_path_is_equation_7(
    rows, columns, tokens, text_window, patch_window, metric, threshold, seed
):
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(rows * columns, tokens, 2, generator=generator, dtype=torch.float64)
    similarity = similarity * 2 - 1
    mask = torch.rand(tokens, generator=generator) > 0.3
    distance = anchor_distance(similarity, threshold)
    arguments = ((rows, columns), mask, text_window, patch_window, metric)
    path, reachable = anchor_path(distance, *arguments)
    slow, slow_reachable = slow_path(distance, *arguments)
    assert torch.equal(reachable, slow_reachable)
    torch.testing.assert_close(path, slow, rtol=0, atol=1e-9)


def test_similarity_is_a_cosine_per_contiguous_block():
    image, text = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(2, 4, 12).double()
    similarity = group_similarity(image, text, 3)
    assert similarity.shape == (2, 3, 4, 3)
    for group in range(3):
        block = slice(4 * group, 4 * group + 4)
        expected = torch.cosine_similarity(image[:, :, None, block], text[:, None, :, block], -1)
        torch.testing.assert_close(similarity[..., group], expected)


def test_distance_is_the_inverse_at_anchors_only():
    similarity = torch.tensor([0.05, 0.0499, 0.5, -1.0, 0.0, 1.0], dtype=torch.float64)
    distance = anchor_distance(similarity, 0.05)
    assert distance.tolist() == [20.0, math.inf, 2.0, math.inf, math.inf, 1.0]


def test_gradients_pass_and_stay_finite():
    image = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    text = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False, True])

    def both(image, text):
        distance = anchor_distance(group_similarity(image, text, 2), 0.05)
        return anchor_path(distance, (2, 3), mask)[0]

    assert torch.autograd.gradcheck(both, (image, text))


@pytest.mark.parametrize("case", ["zero vectors", "all padding", "nothing reachable", "one each"])
def test_edges_are_safe_in_value_and_gradient(case):
    patches, tokens = (1, 1) if case == "one each" else (4, 3)
    image = torch.randn(2, patches, 8)
    if case == "zero vectors":
        image.zero_()
    image.requires_grad_()
    text = torch.randn(2, tokens, 8, requires_grad=True)
    mask = torch.full((2, tokens), case != "all padding")
    threshold = 2.0 if case == "nothing reachable" else 0.05
    distance = anchor_distance(group_similarity(image, text, 2), threshold)
    grid = (1, 1) if case == "one each" else (2, 2)
    path, reachable = anchor_path(distance, grid, mask)
    if case != "one each":
        assert not reachable.any()
        assert path.eq(0).all()
    path.sum().backward()
    assert image.grad.isfinite().all()
    assert text.grad.isfinite().all()


def test_half_precision_is_computed_in_float32():
    image, text = torch.randn(4, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        similarity = group_similarity(image, text, 2)
    assert similarity.dtype == torch.bfloat16
    exact = group_similarity(image.float(), text.float(), 2)
    torch.testing.assert_close(similarity, exact.bfloat16(), rtol=0, atol=0)


def test_means_of_equation_10_divide_by_words_and_patches():
    path = torch.rand(2, 5, 4, 3, dtype=torch.float64)
    words = torch.tensor([[True, True, False, False], [False] * 4])
    path = path * words[:, None, :, None]
    table = torch.randn(3, 7, dtype=torch.float64)
    embedded = embed_path(path, table)
    by_patch = embedded.sum(2) / torch.tensor([2.0, 1.0])[:, None, None]
    torch.testing.assert_close(mean_over_words(path, words) @ table, by_patch)
    torch.testing.assert_close(mean_over_patches(path) @ table, embedded.mean(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_window": 4}, "odd number of tokens, not 4"),
        ({"patch_window": 8}, "odd square of patches .* not 8"),
        ({"patch_window": 16}, "not 16"),
        ({"metric": "cosine"}, "unknown patch metric 'cosine'"),
        ({"grid": (2, 3)}, "2 x 3 has 6 patches, the distances have 4"),
    ],
)
def test_impossible_options_are_named(change, message):
    options = {"grid": (2, 2)} | change
    with pytest.raises(ValueError, match=message):
        anchor_path(torch.rand(4, 3, 2), **options)


def test_groups_must_divide_the_width():
    with pytest.raises(ValueError, match="3 groups do not divide 8 channels"):
        group_similarity(torch.rand(2, 8), torch.rand(2, 8), 3)
    with pytest.raises(ValueError, match="positive"):
        anchor_distance(torch.rand(1), 0.0)
