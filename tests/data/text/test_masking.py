import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlp.data.masking import mask_patches, mask_words

SPECIAL = (0, 1, 2, 3, 4)


def masked(ids, words, probability, seed):
    rng = np.random.default_rng(seed)
    return mask_words(ids, words, probability, 50, 4, SPECIAL, rng)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.floats(0.01, 0.99), st.integers(0, 99))
def test_only_words_are_masked_and_at_least_one(words, share, seed):
    mask = np.array(words)
    ids = np.where(mask, np.arange(len(words)) + 10, 0)
    before = ids.copy()
    new, labels = masked(ids, mask, share, seed)
    chosen = labels != -100
    assert not (chosen & ~mask).any()
    assert chosen.any() == mask.any()
    assert (labels[chosen] == ids[chosen]).all()
    assert (new[~chosen] == ids[~chosen]).all()
    assert (ids == before).all()
    assert new.dtype == labels.dtype == np.int64


def test_shares_of_the_three_kinds():
    ids = np.full(20_000, 10)
    new, labels = masked(ids, np.ones(20_000, dtype=bool), 0.15, 0)
    chosen = labels != -100
    assert abs(chosen.mean() - 0.15) < 0.01
    kinds = new[chosen]
    assert abs((kinds == 4).mean() - 0.8) < 0.03
    kept = (kinds == 10).mean()
    assert abs(kept - 0.1) < 0.03
    words = kinds[(kinds != 4) & (kinds != 10)]
    assert abs(len(words) / len(kinds) - 0.1) < 0.03
    assert set(words) == set(range(5, 50)) - {10}


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 3),
    st.floats(0.05, 0.95),
    st.integers(0, 9),
)
def test_patches(rows, columns, unit, ratio, seed):
    mask = mask_patches((rows, columns), ratio, unit, np.random.default_rng(seed))
    assert mask.shape == (rows, columns)
    assert mask.dtype == bool
    count = 0
    for row in range(0, rows, unit):
        for column in range(0, columns, unit):
            square = mask[row : row + unit, column : column + unit]
            assert square.all() or not square.any()
            count += bool(square.all())
    squares = math.ceil(rows / unit) * math.ceil(columns / unit)
    assert count == math.ceil(squares * ratio)
