import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vlp.positions.anchor import (
    anchor_distance,
    anchor_path,
    group_similarity,
    longest_path,
    mean_over_patches,
    mean_over_words,
)


def patch_distance(a, b, metric):
    down, right = abs(a[0] - b[0]), abs(a[1] - b[1])
    distances = {"euclidean": math.hypot(down, right), "manhattan": down + right}
    return distances.get(metric, max(down, right))


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
                    if patch_distance(places[m], places[i], "chebyshev") > side:
                        continue
                    for j in range(tokens):
                        if abs(j - n) > reach or not mask[j] or not mask[n]:
                            continue
                        steps = patch_distance(places[m], places[i], metric) + abs(j - n)
                        best = min(best, steps + float(distance[i, j, g]))
                if math.isfinite(best):
                    path[m, n, g], reachable[m, n, g] = best, True
    return path, reachable


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.sampled_from([1, 3, 5, None]),
       st.sampled_from([1, 9, 25, None]), st.sampled_from(["euclidean", "manhattan", "chebyshev"]),
       st.sampled_from([0.05, 0.3, 0.7]), st.integers(0, 1000))  # fmt: skip
@example(2, 3, 2, 3, None, "chebyshev", 0.3, 0)
def test_path_is_equation_7(
    rows, columns, tokens, text_window, patch_window, metric, threshold, seed
):
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(rows * columns, tokens, 2, generator=generator, dtype=torch.float64)
    similarity = similarity * 2 - 1
    mask = torch.rand(tokens, generator=generator) > 0.3
    distance = anchor_distance(similarity, threshold)
    arguments = ((rows, columns), mask, text_window, patch_window, metric)
    slow, slow_reachable = slow_path(distance, *arguments)
    kept = distance.clone()
    for needs_gradient in (False, True):  # in place, and as a graph
        path, reachable = anchor_path(distance.requires_grad_(needs_gradient), *arguments)
        assert torch.equal(reachable, slow_reachable)
        torch.testing.assert_close(path.detach(), slow, rtol=0, atol=1e-9)
    assert torch.equal(distance, kept)
    longest = longest_path(threshold, (rows, columns), tokens, text_window, patch_window, metric)
    assert (slow <= longest + 1e-9).all()


@pytest.mark.parametrize(
    ("windows", "steps"), [((5, 9), 2 + 2**0.5), ((3, 1), 1), ((None, None), 6 + 5)]
)
def test_longest_path_is_that_to_the_corner_of_the_windows(windows, steps):
    """The only anchor has the least similarity that an anchor can have."""
    similarity = torch.full((20, 7, 1), -1.0, dtype=torch.float64)
    similarity[0, 0] = 0.25
    path, _ = anchor_path(anchor_distance(similarity, 0.25), (4, 5), None, *windows)
    longest = longest_path(torch.tensor(0.25), (4, 5), 7, *windows)
    assert float(path.max()) == pytest.approx(4 + steps)
    assert float(longest) == pytest.approx(4 + steps)


def test_similarity_is_a_cosine_per_contiguous_block():
    image, text = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(2, 4, 12).double()
    similarity = group_similarity(image, text, 3)
    assert similarity.shape == (2, 3, 4, 3)
    for group in range(3):
        block = slice(4 * group, 4 * group + 4)
        expected = torch.cosine_similarity(image[:, :, None, block], text[:, None, :, block], -1)
        torch.testing.assert_close(similarity[..., group], expected)


def test_a_large_batch_is_worked_off_in_parts():
    generator = torch.Generator().manual_seed(5)
    similarity = torch.rand(9, 8, 14 * 14, 30, generator=generator).movedim(1, -1) * 2 - 1
    similarity = similarity.repeat(torch.get_num_threads(), 1, 1, 1)  # parts grow with threads
    distance = anchor_distance(similarity, 0.9)
    mask = torch.rand(len(distance), 30, generator=generator) > 0.2
    path, reachable = anchor_path(distance, (14, 14), mask)
    single = [anchor_path(*pair) for pair in zip(distance, [(14, 14)] * len(mask), mask)]
    assert torch.equal(path, torch.stack([pair[0] for pair in single]))
    assert torch.equal(reachable, torch.stack([pair[1] for pair in single]))


@pytest.mark.parametrize("lead", [(), (3,), (3, 2)])
def test_leading_axes_and_masks_of_a_batch(lead):
    similarity = torch.rand(*lead, 6, 4, 2, dtype=torch.float64)
    distance = anchor_distance(similarity, 0.6)
    masks = torch.tensor([[True] * 4, [False, True, True, False], [True, True, False, False]])
    mask = masks if lead else masks[1]
    path, reachable = anchor_path(distance, (2, 3), mask)
    assert path.shape == reachable.shape == distance.shape
    expanded = mask[:, None].expand(*lead, 4) if len(lead) == 2 else mask
    slow = [
        slow_path(d, (2, 3), m, 5, 9, "euclidean")
        for d, m in zip(distance.view(-1, 6, 4, 2), expanded.reshape(-1, 4))
    ]
    torch.testing.assert_close(path.reshape(-1, 6, 4, 2), torch.stack([p for p, _ in slow]))
    assert torch.equal(reachable.reshape(-1, 6, 4, 2), torch.stack([r for _, r in slow]))


@pytest.mark.parametrize("grid", [(2, 4), (1, 1)])
@pytest.mark.parametrize("windows", [(5, 9), (3, 1), (3, 25), (None, 9), (3, None), (None, None)])
@pytest.mark.parametrize("metric", ["euclidean", "manhattan", "chebyshev"])
def test_gradcheck_of_the_path(grid, windows, metric):
    # Fractions of different primes: no two paths are equally long, so the minimum has a gradient.
    entries = grid[0] * grid[1] * 5 * 2
    distance = (torch.arange(1, entries + 1, dtype=torch.float64) * math.sqrt(7)).frac() * 19 + 1
    distance = distance.view(grid[0] * grid[1], 5, 2)
    distance[::3, ::2] = math.inf
    anchors = torch.isfinite(distance)
    mask = torch.tensor([True, True, False, True, True])

    def path(values):
        distances = distance.masked_scatter(anchors, values)
        return anchor_path(distances, grid, mask, *windows, metric)[0]

    values = distance[anchors].requires_grad_()
    assert torch.autograd.gradcheck(path, values)


def test_gradcheck_of_the_other_functions():
    image = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    text = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    similarity = torch.rand(3, 4, 2, dtype=torch.float64) * 1.9 - 0.9
    similarity.requires_grad_()
    threshold = torch.tensor(0.31, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, y: group_similarity(x, y, 4), (image, text))

    def anchors_only(s):
        return anchor_distance(s, threshold)[s >= threshold]

    assert torch.autograd.gradcheck(anchors_only, similarity)
    assert torch.autograd.gradcheck(lambda s: anchor_distance(s, 0.31, False, 2.0), similarity)
    path = torch.rand(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    words = torch.tensor([[True, True, False, True], [True, False, False, False]])
    assert torch.autograd.gradcheck(lambda p: mean_over_words(p, words), path)
    assert torch.autograd.gradcheck(mean_over_patches, path)


@pytest.mark.parametrize(
    "windows", [(5, 9, "euclidean"), (None, None, "manhattan"), (None, None, "chebyshev")]
)
@pytest.mark.parametrize("case", ["zero vectors", "all padding", "nothing reachable", "one each"])
def test_edges_are_safe_in_value_and_gradient(case, windows):
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
    path, reachable = anchor_path(distance, grid, mask, *windows)
    if case != "one each":
        assert not reachable.any()
        assert path.eq(0).all()
    path.sum().backward()
    assert image.grad.isfinite().all()
    assert text.grad.isfinite().all()


def test_entries_beside_the_threshold():
    delta = 0.05
    beside = torch.tensor([delta - 1e-9, delta, delta + 1e-9], dtype=torch.float64)
    hard = anchor_distance(beside, delta)
    assert hard[0] == math.inf
    torch.testing.assert_close(hard[1:], 1 / beside[1:])
    assert hard[1] == 20
    soft = anchor_distance(beside, delta, hard=False)
    torch.testing.assert_close(soft[0].item(), 20 * math.exp(1e4 * 1e-9), rtol=1e-6, atol=0)
    assert torch.equal(soft[1:], hard[1:])
    path, reachable = anchor_path(hard.view(1, 3, 1), (1, 1), text_window=1)
    assert reachable.flatten().tolist() == [False, True, True]
    assert path.flatten().tolist() == [0, *hard[1:].tolist()]
    # A 0-d tensor, as a running quantile gives it, decides as the number does.
    assert torch.equal(anchor_distance(beside, torch.tensor(delta, dtype=torch.float64)), hard)


@settings(max_examples=50, deadline=None)
@given(st.floats(-1, 1), st.floats(0.01, 0.5), st.floats(0.1, 50))
def test_soft_form_is_equations_4_and_6(similarity, delta, tau):
    shrunk = similarity if similarity >= delta else delta * math.exp(tau * (similarity - delta))
    soft = anchor_distance(torch.tensor(similarity, dtype=torch.float64), delta, False, tau)
    assert soft.item() == pytest.approx(1 / shrunk, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_soft_form_stays_finite_in_value_and_gradient(dtype):
    similarity = torch.tensor([-1.0, 0.0, 0.03, 0.0499, 0.05, 1.0], dtype=dtype)
    similarity.requires_grad_()
    distance = anchor_distance(similarity, 0.02, hard=False)
    assert distance.dtype == dtype
    assert (distance[:2] > 1 / 0.02 * 100).all()
    path, reachable = anchor_path(distance.view(6, 1, 1), (2, 3))
    assert reachable.all()
    assert (path.float().expand(6, 64, 8).sum() * torch.ones(3)).isfinite().all()
    path.sum().backward()
    assert similarity.grad.isfinite().all()
    distance = anchor_distance(similarity, 0.02, hard=False)
    (gradient,) = torch.autograd.grad(distance.sum(), similarity)
    assert gradient.isfinite().all()
    assert gradient[0] == 0  # where the exponent has stopped


def test_half_precision_is_computed_in_float32_and_autocast_leaves_float32():
    image, text = torch.randn(2, 6, 8), torch.randn(2, 4, 8)
    words = torch.tensor([[True, True, True, False], [True, False, False, False]])

    def everything():
        similarity = group_similarity(image, text, 2)
        distance = anchor_distance(similarity)
        path, _ = anchor_path(distance, (2, 3), words)
        soft = anchor_distance(similarity, hard=False)
        means = mean_over_words(path, words), mean_over_patches(path)
        return similarity, distance, soft, path, *means

    exact = everything()
    with torch.autocast("cpu", torch.bfloat16):
        under = everything()
    for a, b in zip(exact, under):
        assert b.dtype == torch.float32
        assert torch.equal(a, b)
    low = image.bfloat16(), text.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        similarity = group_similarity(*low, 2)
    exact = group_similarity(*(x.float() for x in low), 2).bfloat16()
    torch.testing.assert_close(similarity, exact, rtol=0, atol=0)


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


def test_impossible_groups_thresholds_and_taus_are_named():
    with pytest.raises(ValueError, match="3 groups do not divide 8 channels"):
        group_similarity(torch.rand(2, 8), torch.rand(2, 8), 3)
    with pytest.raises(ValueError, match="width 8, text features 6"):
        group_similarity(torch.rand(2, 8), torch.rand(2, 6), 2)
    for threshold in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=f"threshold must be positive, not {threshold}"):
            anchor_distance(torch.rand(1), threshold)
    with pytest.raises(ValueError, match=r"tau must be positive, not -1\.0"):
        anchor_distance(torch.rand(1), hard=False, tau=-1.0)
