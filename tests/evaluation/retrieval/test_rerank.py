from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.retrieval.rerank import (
    CandidatePairs,
    Search,
    look_up,
    match_pairs,
    nearest_pairs,
    reranked_ranks,
)


def slow_rank(order, scores, dual, positive):
    """Near candidates by new score, then the others by old; ties place wrong ones first."""
    near = sorted(order, key=lambda c: (-scores[order.index(c)], c in positive))
    far = [c for c in range(len(dual)) if c not in order]
    far.sort(key=lambda c: (-dual[c], c in positive))
    return next(place for place, c in enumerate([*near, *far]) if c in positive)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_ranks_equal_sorting_the_whole_list(data):
    candidates = data.draw(st.integers(2, 8))
    top = data.draw(st.integers(1, candidates))
    # Distinct dual scores: which of equal candidates comes into the list is the search's choice.
    dual = np.array(data.draw(st.permutations(range(candidates))), dtype=np.float32)
    order = np.argsort(-dual)[:top].tolist()
    scores = data.draw(st.lists(st.integers(-2, 2), min_size=top, max_size=top))
    positive = data.draw(st.sets(st.integers(0, candidates - 1), min_size=1, max_size=3))
    padded = np.array([[*positive, *[-1] * (3 - len(positive))]])
    best = max(dual[list(positive)])
    ranks = np.array([sum(dual[c] >= best and c not in positive for c in range(candidates))])
    found = Search(ranks, np.array([order]), dual[order][None])
    expected = slow_rank(order, scores, dual, positive)
    assert reranked_ranks(found, np.array([scores], float), padded).tolist() == [expected]


def test_nan_scores_count_against_the_model():
    found = Search(np.array([0, 0]), np.array([[0, 1], [0, 1]]), np.zeros((2, 2), np.float32))
    scores = np.array([[np.nan, 0.0], [1.0, np.nan]])
    assert reranked_ranks(found, scores, np.array([[0], [0]])).tolist() == [1, 1]


def test_pairs_near_in_both_directions_are_matched_once():
    to_image = Search(np.zeros(3, int), np.array([[0], [1], [0]]), np.zeros((3, 1), np.float32))
    to_text = Search(np.zeros(2, int), np.array([[0, 2], [1, 0]]), np.zeros((2, 2), np.float32))
    pairs = nearest_pairs(to_image, to_text)
    assert list(zip(pairs.image.tolist(), pairs.text.tolist())) == [(0, 0), (0, 2), (1, 0), (1, 1)]


def test_matching_keeps_to_groups_and_returns_the_order_of_the_pairs():
    generator = np.random.default_rng(0)
    code = np.unique(generator.integers(0, 12 * 20, size=90))
    pairs = CandidatePairs(code // 20, code % 20)
    group, length = (pairs.image * 7) % 12, generator.permutation(20)
    calls = []

    def match(image, text):
        calls.append((image, text))
        return (100 * image + text).astype(np.float32)

    values = match_pairs(pairs, match, group, length[pairs.text], 4)
    np.testing.assert_array_equal(values, 100 * pairs.image + pairs.text)
    assert all(len(set(image)) == 1 for image, _ in calls)
    assert [7 * image[0] % 12 for image, _ in calls] == sorted(7 * i[0] % 12 for i, _ in calls)
    sizes = [len(text) for _, text in calls]
    assert max(sizes) <= 4
    # Cut evenly: five pairs are three and two, not four and one.
    counts = np.bincount(pairs.image)
    assert sorted(sizes) == sorted(
        len(part) for n in counts for part in np.array_split(range(n), -(-n // 4)) if n
    )
    for _, text in calls:
        assert (np.diff(length[text]) > 0).all()
    image, text = pairs.image[::-1][:6].reshape(2, 3), pairs.text[::-1][:6].reshape(2, 3)
    np.testing.assert_array_equal(look_up(pairs, values, 20, image, text), 100 * image + text)


def test_nothing_to_match_calls_nobody():
    none = np.zeros(0, dtype=np.int64)
    assert len(match_pairs(CandidatePairs(none, none), None, none, none, 4)) == 0
