import pytest
import torch
from tests_support import tiny_config

from benchmarks.rerank import LAYOUTS, LOOP, OURS, Sizes, measure, table

SIZES = Sizes(images=6, texts=12, nearest=4, rounds=1, match_batch=4)


def times(layout, *precisions):
    model = tiny_config(cross={"layout": layout})
    return measure(model, SIZES, torch.device("cpu"), *precisions)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_ways_agree(layout):
    result = times(layout, "float32")
    assert result.difference < 1e-3
    assert result.same_ranks == 1
    # A pair that is near in both directions is one of ours.
    assert result.pairs[LOOP] == 12 * 4 + 6 * 4
    assert 12 * 4 <= result.pairs[OURS] < result.pairs[LOOP]
    assert layout in table(layout, result)


def test_the_loop_has_the_precision_of_ours():
    assert times("text", "bf16").difference == times("text", "bf16", "bf16").difference


def test_the_loop_in_its_own_precision():
    exact, rounded = times("text", "float32"), times("text", "bf16", "float32")
    assert 10 * exact.difference < rounded.difference < 1
