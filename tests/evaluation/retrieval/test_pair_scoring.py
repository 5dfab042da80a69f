import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vlp
from evaluation.encoder import Encoder
from evaluation.options import EvalOptions
from evaluation.retrieval import rerank as matching
from evaluation.retrieval.rerank import (
    CandidatePairs,
    PairScorer,
    Search,
    assign_buckets,
    listwise_losses,
    look_up,
    match_pairs,
    nearest_pairs,
    reranked_ranks,
    search,
    similarity,
)
from evaluation.samples import Samples
from evaluation.work_sharding import ProcessGroup
from vlp.metrics import pessimistic_ranks

ALL = 2**30


def collected(loaded, shards, memory=ALL, limit=None):
    loaded.model.eval()
    options = EvalOptions(batch=4, precision="float32")
    encoder = Encoder(loaded, Samples([shards], limit), options, torch.device("cpu"), memory)
    return encoder, encoder.collect(ProcessGroup())


def scores(encoder, collection, pairs, **how):
    scorer = PairScorer(encoder, collection)
    return match_pairs(pairs, scorer, scorer.groups(pairs), scorer.order(pairs), 3, **how)


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(matching, "MAX_BUCKET_TOKENS", 130)
    monkeypatch.setattr(matching, "IMAGES_PER_PASS", 7)


def some_pairs(collection, share=0.4):
    chosen = (
        np.random.default_rng(0).random(
            (len(collection.image_features), len(collection.text_features))
        )
        < share
    )
    return CandidatePairs(*(index.astype(np.int64) for index in chosen.nonzero()))


def test_scores_equal_the_public_calls(model_folder, scene_shards, small_buckets):
    loaded = vlp.load(model_folder)
    encoder, collection = collected(loaded, scene_shards)
    pairs = some_pairs(collection)
    found = scores(encoder, collection, pairs)
    samples = [
        Samples([scene_shards]).read(place) for place in range(len(collection.image_features))
    ]
    pixels = torch.stack([loaded.preprocess(sample.image) for sample in samples])
    with torch.no_grad():
        image = loaded.model.encode_image(pixels).select(torch.from_numpy(pairs.image))
        text = loaded.model.encode_text(*loaded.text(collection.captions))
        plain = loaded.model.match(image, text.select(torch.from_numpy(pairs.text))).numpy()
    assert np.ptp(plain) > 1e-3
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-5)


def test_memory_and_ranks_change_no_bit(model_folder, scene_shards, small_buckets):
    loaded = vlp.load(model_folder)
    encoder, collection = collected(loaded, scene_shards, limit=9)
    pairs = some_pairs(collection)
    expected = scores(encoder, collection, pairs)
    tight, again = collected(loaded, scene_shards, memory=0, limit=9)
    np.testing.assert_array_equal(scores(tight, again, pairs), expected)

    class Two(ProcessGroup):
        def map_blocks(self, count, work):
            halves = [ProcessGroup(rank, 2).share(count) for rank in (1, 0)]
            done = {block: work(block) for half in halves for block in half}
            return [done[block] for block in range(count)]

    found = scores(encoder, collection, pairs, processes=Two(0, 2))
    np.testing.assert_array_equal(found, expected)


def test_each_image_is_prepared_once_for_a_bucket(model_folder, scene_shards, small_buckets):
    loaded = vlp.load(model_folder)
    encoder, collection = collected(loaded, scene_shards)
    pairs = some_pairs(collection, 1.0)
    scorer, prepared = encoder.itm_scorer, []
    image, texts = scorer.prepare_image, scorer.prepare_texts
    scorer.prepare_image = lambda part: prepared.append("image") or image(part)
    scorer.prepare_texts = lambda part: prepared.append("texts") or texts(part)
    scores(encoder, collection, pairs)
    buckets = assign_buckets(encoder.text_lengths, encoder.batch, 130).max() + 1
    assert buckets > 1
    assert prepared.count("image") == len(collection.image_features) * buckets
    # Every block of texts is prepared once for seven images.
    passes = -(-len(collection.image_features) // 7)
    assert prepared.count("texts") == len(encoder.text_lengths) * passes


@given(st.lists(st.integers(3, 12), max_size=30), st.integers(1, 5), st.integers(1, 200))
def test_buckets_are_full_but_not_too_full(widths, rows, tokens):
    widths = np.sort(np.array(widths, dtype=np.int64))
    bucket = assign_buckets(widths, rows, tokens)
    assert len(bucket) == len(widths)
    assert set(np.diff(bucket)) <= {0, 1}
    for number in range(bucket.max(initial=-1) + 1):
        here = widths[bucket == number]
        assert len(here) == 1 or len(here) * rows * here.max() <= tokens
        following = widths[bucket == number + 1][:1]
        assert not len(following) or (len(here) + 1) * rows * following.max() > tokens


def random_positives(generator, queries, candidates, most):
    table = np.full((queries, most), -1, dtype=np.int64)
    for row in table:
        count = generator.integers(1, most + 1)
        row[:count] = generator.choice(candidates, size=count, replace=False)
    return table


def full_mask(table, candidates):
    mask = np.zeros((len(table), candidates), dtype=bool)
    for row, right in enumerate(table):
        mask[row, right[right >= 0]] = True
    return mask


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(3, 40), st.integers(0, 45))
@settings(max_examples=60, deadline=None)
def test_chunks_give_the_ranks_and_order_of_the_full_matrix(seed, queries, candidates, top):
    generator = np.random.default_rng(seed)
    # Halves and few channels: many exact ties.
    query = torch.from_numpy(generator.integers(-2, 3, (queries, 3)) / 2).float()
    candidate = torch.from_numpy(generator.integers(-2, 3, (candidates, 3)) / 2).float()
    positives = random_positives(generator, queries, candidates, 3)
    found = search(query, candidate, positives, top, query_chunk=4, candidate_chunk=7)
    scores = (query @ candidate.T).numpy()
    mask = full_mask(positives, candidates)
    assert found.ranks.tolist() == pessimistic_ranks(scores, mask).tolist()
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    assert found.nearest.tolist() == order.tolist()
    np.testing.assert_array_equal(found.similarities, np.take_along_axis(scores, order, axis=1))


def test_equal_images_tie_wherever_they_stand():
    """A float32 product gives equal columns different last bits in some places of a matrix."""
    torch.manual_seed(1)
    query = torch.nn.functional.normalize(torch.randn(50, 256), dim=-1)
    one = torch.nn.functional.normalize(torch.randn(1, 256), dim=-1)
    candidate = one.repeat(101, 1)
    found = search(query, candidate, np.full((50, 1), 3), query_chunk=7, candidate_chunk=11)
    assert found.ranks.tolist() == [100] * 50
    assert found.nearest.shape == (50, 0)


def test_similarity_stays_float32_under_autocast():
    query, candidate = torch.randn(6, 64), torch.randn(9, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = similarity(query, candidate)
        rounded = query @ candidate.T
    assert rounded.dtype == torch.bfloat16  # what autocast does to a bare product
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, query @ candidate.T)


def test_nan_counts_against_the_model():
    query = torch.tensor([[1.0], [float("nan")]])
    candidate = torch.tensor([[3.0], [float("nan")], [1.0]])
    found = search(query, candidate, np.array([[0], [0]]), 2)
    assert found.ranks.tolist() == [1, 2]
    assert found.nearest[0].tolist() == [0, 2]


@pytest.mark.parametrize("value", [-3.5, -0.0, 0.0, 1e-30, 2.5])
def test_scores_survive_their_packing(value):
    found = search(torch.tensor([[value]]), torch.ones(1, 1), np.array([[0]]), 1)
    assert found.similarities.item() == np.float32(value)


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
    share = sum(np.exp(s) for c, s in zip(order, scores) if c in positive) / np.exp(scores).sum()
    loss = listwise_losses(found.nearest, np.array([scores], float), padded)
    np.testing.assert_allclose(loss, -np.log(share) if share else np.nan, atol=1e-12)


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
