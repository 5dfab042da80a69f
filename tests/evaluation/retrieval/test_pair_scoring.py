from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vlp
from evaluation.encoder import Encoder
from evaluation.retrieval import rerank as matching
from evaluation.retrieval.rerank import (
    CandidatePairs,
    PairScorer,
    match_batch_for,
    match_pairs,
    shelves,
)
from evaluation.samples import Samples
from evaluation.work_sharding import Ranks

ALL = 2**30


def collected(loaded, shards, memory=ALL, limit=None):
    loaded.model.eval()
    options = {"batch": 4, "device": torch.device("cpu"), "precision": "float32"}
    encoder = Encoder(loaded, Samples([shards], limit), memory=memory, **options)
    return encoder, encoder.collect(Ranks(), lambda samples: None)


def scores(encoder, collection, pairs, batch=3):
    scorer = PairScorer(encoder, collection)
    return match_pairs(pairs, scorer, scorer.groups(pairs), scorer.order(pairs), batch)


@pytest.fixture
def small_shelves(monkeypatch):
    monkeypatch.setattr(matching, "TOKENS_HELD", 130)
    monkeypatch.setattr(matching, "IMAGES_HELD", 7)


def some_pairs(collection, share=0.4):
    chosen = np.random.default_rng(0).random((len(collection.image), len(collection.text))) < share
    return CandidatePairs(*(index.astype(np.int64) for index in chosen.nonzero()))


def test_scores_equal_the_public_calls(model_folder, scene_shards, small_shelves):
    loaded = vlp.load(model_folder)
    encoder, collection = collected(loaded, scene_shards)
    pairs = some_pairs(collection)
    found = scores(encoder, collection, pairs)
    samples = [Samples([scene_shards]).read(place) for place in range(len(collection.image))]
    pixels = torch.stack([loaded.preprocess(sample.image) for sample in samples])
    with torch.no_grad():
        image = loaded.model.encode_image(pixels).select(torch.from_numpy(pairs.image))
        text = loaded.model.encode_text(*loaded.text(collection.captions))
        plain = loaded.model.match(image, text.select(torch.from_numpy(pairs.text))).numpy()
    assert np.ptp(plain) > 1e-3
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-5)


def test_memory_and_ranks_change_no_bit(model_folder, scene_shards, small_shelves):
    loaded = vlp.load(model_folder)
    encoder, collection = collected(loaded, scene_shards, limit=9)
    pairs = some_pairs(collection)
    expected = scores(encoder, collection, pairs)
    tight, again = collected(loaded, scene_shards, memory=0, limit=9)
    np.testing.assert_array_equal(scores(tight, again, pairs), expected)

    class Two(Ranks):
        """The work of two ranks, the second one's first."""

        def map_blocks(self, count, work):
            halves = [Ranks(rank, 2).share(count) for rank in (1, 0)]
            done = {block: work(block) for half in halves for block in half}
            return [done[block] for block in range(count)]

    scorer = PairScorer(encoder, collection)
    ranks = Two(0, 2)
    found = match_pairs(pairs, scorer, scorer.groups(pairs), scorer.order(pairs), 3, ranks=ranks)
    np.testing.assert_array_equal(found, expected)


def test_each_image_is_prepared_once_for_a_shelf(model_folder, scene_shards, small_shelves):
    loaded = vlp.load(model_folder)
    encoder, collection = collected(loaded, scene_shards)
    pairs = some_pairs(collection, 1.0)
    prepared = []
    real = encoder.itm_scorer.prepare_image
    encoder.itm_scorer.prepare_image = lambda image: prepared.append(1) or real(image)
    scores(encoder, collection, pairs)
    on_shelf = shelves(encoder.text_widths, encoder.batch, matching.TOKENS_HELD).max() + 1
    assert on_shelf > 1
    assert len(prepared) == len(collection.image) * on_shelf


@given(st.lists(st.integers(3, 12), max_size=30), st.integers(1, 5), st.integers(1, 200))
def test_shelves_are_full_but_not_too_full(widths, rows, tokens):
    widths = np.sort(np.array(widths, dtype=np.int64))
    shelf = shelves(widths, rows, tokens)
    assert len(shelf) == len(widths)
    assert set(np.diff(shelf)) <= {0, 1}
    for number in range(shelf.max(initial=-1) + 1):
        here = widths[shelf == number]
        assert len(here) == 1 or len(here) * rows * here.max() <= tokens
        following = widths[shelf == number + 1][:1]
        assert not len(following) or (len(here) + 1) * rows * following.max() > tokens


@pytest.mark.parametrize(("device", "pairs"), [("cpu", 64), ("cuda", 1024)])
def test_calls_are_as_large_as_a_device_needs_them(device, pairs):
    assert match_batch_for(torch.device(device)) == pairs
    assert match_batch_for(torch.device(device), 7) == 7
