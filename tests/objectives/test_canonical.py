import pytest
import torch

from vlp.objectives.canonical_correlation import (
    CanonicalCorrelation,
    PairMoments,
    mean_reciprocal_rank,
)


def pairs(count=400, seed=0):
    torch.manual_seed(seed)
    shared = torch.randn(count, 3).double()
    sides = (torch.cat([shared, torch.randn(count, 4).double()], 1) for _ in range(2))
    return tuple(side @ torch.randn(7, width).double() + 5 for side, width in zip(sides, (6, 5)))


def solved(x, y, channels, shrinkage, parts=1):
    moments = PairMoments(x.shape[1], y.shape[1])
    for one, other in zip(x.chunk(parts), y.chunk(parts)):
        moments.add(one, other)
    return CanonicalCorrelation(moments).projections(channels, shrinkage)


def test_directions_solve_the_generalised_eigenproblem():
    """Written out: Cxy (Cyy + r)^-1 Cyx w = rho^2 (Cxx + r) w, and norms are rho w' (C + r) w."""
    x, y = pairs()
    left, _ = solved(x, y, 5, 0.2)
    cx, cy = x - x.mean(0), y - y.mean(0)
    xx, yy, xy = cx.T @ cx / len(x), cy.T @ cy / len(y), cx.T @ cy / len(x)
    xx += 0.2 * xx.diagonal().mean() * torch.eye(6, dtype=xx.dtype)
    yy += 0.2 * yy.diagonal().mean() * torch.eye(5, dtype=yy.dtype)
    for weight in left.weight:
        squared = (weight @ xx @ weight).item()  # rho^2, as directions have length rho
        found = xy @ torch.linalg.inv(yy) @ xy.T @ weight
        assert found == pytest.approx((squared * (xx @ weight)).numpy(), abs=1e-9)
    assert (left.weight @ x.T).mean(1) + left.bias == pytest.approx(0, abs=1e-9)


def test_parts_of_the_data_and_wider_spaces_change_nothing():
    x, y = pairs()
    for whole, parts in zip(solved(x, y, 4, 0.1), solved(x, y, 4, 0.1, parts=7)):
        # A direction's sign is free; both sides share it.
        products = [layer.weight.T @ layer.weight for layer in (whole, parts)]
        assert products[0] == pytest.approx(products[1].numpy(), abs=1e-9)
    wide, narrow = solved(x, y, 9, 0.1)[0], solved(x, y, 5, 0.1)[0]
    assert wide.weight[:5].abs() == pytest.approx(narrow.weight.abs().numpy(), abs=1e-9)
    assert not wide.weight[5:].any()


def test_a_constant_channel_does_no_harm_and_one_pair_is_refused():
    x, y = pairs()
    x[:, 0] = 3.0
    for layer in solved(x, y, 4, 0.1):
        assert layer.weight.isfinite().all()
        assert layer.bias.isfinite().all()
    with pytest.raises(ValueError, match="1 pairs have no covariance"):
        solved(x[:1], y[:1], 4, 0.1)


def test_moments_of_two_parts_add_up():
    x, y = pairs()
    whole, first, second = (PairMoments(6, 5) for _ in range(3))
    whole.add(x, y)
    first.add(x[:150], y[:150])
    second.add(x[150:], y[150:])
    for one, other in zip(whole.mean_and_covariance(), (first + second).mean_and_covariance()):
        torch.testing.assert_close(one, other)


def test_reciprocal_ranks_are_those_of_a_loop_and_spare_pairs_of_one_image():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(30, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = (torch.arange(30) // 3)[:, None].expand(-1, 2)
    found = []
    for one, other in ((x, y), (y, x)):
        for i in range(30):
            own = torch.cosine_similarity(one[i], other[i], dim=0)
            better = sum(
                int(torch.cosine_similarity(one[i], other[j], dim=0) >= own)
                for j in range(30)
                if ids[j, 0] != ids[i, 0]
            )
            found.append(1 / (1 + better))
    assert mean_reciprocal_rank(x, y, ids) == pytest.approx(sum(found) / 60)
    assert mean_reciprocal_rank(x, x, ids) == 1
    # Equal vectors tell nothing: every wrong answer comes first.
    assert mean_reciprocal_rank(torch.ones(30, 2), torch.ones(30, 2), ids) == pytest.approx(1 / 28)
