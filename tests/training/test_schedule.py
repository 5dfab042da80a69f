import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlp.training.schedule import learning_rate


def test_paper_schedule_rises_to_its_peak_and_ends_at_its_final_rate() -> None:
    rates = [learning_rate(step, 100, 1e-4, 1e-6, 10) for step in range(100)]
    assert rates[0] == pytest.approx(1e-5)
    assert rates[9] == rates[10] == pytest.approx(1e-4)
    assert rates[-1] == pytest.approx(1e-6)
    expected = 1e-6 + (1e-4 - 1e-6) * 0.5 * (1 + math.cos(math.pi * (54 - 10) / 89))
    assert rates[54] == pytest.approx(expected)
    assert rates[54] > (1e-4 + 1e-6) / 2 > rates[55]


def test_without_warm_up_the_first_step_has_the_peak_rate() -> None:
    assert learning_rate(0, 10, 1.0, 0.1, 0) == 1.0


def test_a_run_of_one_step_moves() -> None:
    assert learning_rate(0, 1, 1.0, 0.0, 0) == 1.0
    assert learning_rate(0, 1, 1.0, 0.0, 1000) == pytest.approx(1e-3)


@given(
    total=st.integers(1, 300),
    warmup=st.integers(0, 400),
    peak=st.floats(1e-6, 1.0),
    share=st.floats(0.0, 1.0),
)
def test_rates_rise_once_then_fall_and_stay_within_bounds(
    total: int, warmup: int, peak: float, share: float
) -> None:
    final = peak * share
    rates = [learning_rate(step, total, peak, final, warmup) for step in range(total + 5)]
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates)
    turn = min(warmup, len(rates))
    assert all(a < b for a, b in pairwise(rates[:turn]))
    assert all(a >= b for a, b in pairwise(rates[turn:]))
    assert all(rate >= final * (1 - 1e-12) for rate in rates[turn:])
    if warmup < total - 1:
        assert rates[total - 1] == pytest.approx(final, rel=1e-9, abs=1e-18)
