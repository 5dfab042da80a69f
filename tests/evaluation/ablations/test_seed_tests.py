"""Holm's correction and effect sizes, against slow references."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from evaluation.ablations.seed_tests import Difference, difference, effect_interval, holm


def rejected(p, level):
    """Holm's procedure by its definition: test the smallest p first, and stop at the first miss."""
    found, left = set(), dict(enumerate(p))
    while left:
        smallest = min(left, key=left.get)
        if left[smallest] > level / len(left):
            break
        found.add(smallest)
        del left[smallest]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_an_adjusted_p_is_the_smallest_level_that_rejects(seed):
    p = np.random.default_rng(seed).uniform(0, 0.3, 7).round(2).tolist()  # with ties
    adjusted = holm(p)
    for number, each in enumerate(adjusted):
        assert each >= p[number]
        if each < 1:
            assert number in rejected(p, each + 1e-9)
            assert number not in rejected(p, each - 1e-9)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("effect", "seeds"), [(1.0, 5), (0.0, 3), (-0.8, 5), (2.6, 3)])
def test_the_interval_of_an_effect_has_both_tails_of_noncentral_t(effect, seeds):
    low, high = effect_interval(effect, seeds)
    t, root = effect * math.sqrt(seeds), math.sqrt(seeds)
    assert stats.nct.cdf(t, seeds - 1, low * root) == pytest.approx(0.975, abs=1e-4)
    assert stats.nct.cdf(t, seeds - 1, high * root) == pytest.approx(0.025, abs=1e-4)


def test_the_interval_exists_where_t_is_huge():
    low, high = effect_interval(1e6, 3)
    assert 0 < low < 1e6 < high
    with pytest.raises(ValueError, match="two seeds"):
        effect_interval(1.0, 1)


def test_a_difference_tells_its_effect_and_is_plain_json():
    found = difference([3.0, 5.0, 4.0], [1.0, 1.0, 1.0])
    assert found.effect == pytest.approx(3.0)
    assert "Holm" not in found.text()
    assert "Holm 0.100, d 3.0 [" in found._replace(adjusted=0.1).text()
    same = difference([1.0, 1.0], [1.0, 1.0])
    assert same.effect is None
    assert same.to_json()["effect_interval"] is None
    lone = Difference(1.0, math.nan, math.nan, 1).to_json()
    assert json.loads(json.dumps(lone, allow_nan=False))["p"] is None
