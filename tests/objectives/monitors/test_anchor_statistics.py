import pytest
import torch

from vlp.objectives.monitors import anchor_statistics


def test_equals_the_loop():
    shape = (3, 4, 5, 2)
    similarity = torch.rand(shape, dtype=torch.float64) * 2 - 1
    reachable = torch.rand(shape) < 0.6
    path = (torch.rand(shape, dtype=torch.float64) * 10 + 1) * reachable
    word_mask = torch.rand(3, 5) < 0.7
    word_mask[0, 0] = True
    valid = torch.tensor([True, True, False])
    result = anchor_statistics(similarity, 0.3, path, reachable, word_mask, valid)
    for g in range(2):
        passing, reached, entries, spreads = 0, 0, 0, []
        for b in range(2):
            for n in range(5):
                if not word_mask[b, n]:
                    continue
                entries += 4
                passing += sum(similarity[b, m, n, g].item() >= 0.3 for m in range(4))
                values = [path[b, m, n, g].item() for m in range(4) if reachable[b, m, n, g]]
                reached += len(values)
                if len(values) >= 2:
                    mean = sum(values) / len(values)
                    spreads.append((sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5)
        assert result.anchors[g].item() == pytest.approx(passing / entries)
        assert result.reachable[g].item() == pytest.approx(reached / entries)
        assert result.spread[g].item() == pytest.approx(sum(spreads) / len(spreads))


def test_constant_path_has_no_spread_and_infinite_distances_do_not_matter():
    similarity = torch.full((1, 4, 2, 1), 0.5)
    path = torch.full((1, 4, 2, 1), 3.0)
    path[0, 0] = torch.inf
    reachable = path.isfinite()
    result = anchor_statistics(similarity, torch.tensor(0.5), path, reachable, torch.ones(1, 2) > 0)
    assert result.spread.item() == 0
    assert result.anchors.item() == 1
    assert result.reachable.item() == 0.75


def test_no_word_at_all_is_zero():
    x = torch.ones(1, 4, 2, 3)
    result = anchor_statistics(x, 0.5, x, x > 0, torch.zeros(1, 2) > 0)
    assert all((value == 0).all() for value in result)
