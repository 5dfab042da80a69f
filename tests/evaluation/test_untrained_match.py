"""Every evaluation that uses the match score says so where it was never trained."""

from __future__ import annotations

import pytest

import vlp
from data_tools.scenes import make_sample
from evaluation.grounding.grounding import evaluate_grounding
from evaluation.options import EvalOptions
from evaluation.probes.foils import evaluate_foils
from evaluation.probes.swaps import evaluate_swaps
from evaluation.probes.word_pointing import evaluate_pointing
from evaluation.retrieval.retrieval import evaluate_retrieval
from vlp.data.shards.shard_reader import ShardWriter


@pytest.mark.parametrize(
    ("evaluate", "options"),
    [
        (evaluate_foils, {"options": EvalOptions(limit=4)}),
        (evaluate_grounding, {"options": EvalOptions(limit=4)}),
        (evaluate_pointing, {"options": EvalOptions(limit=3), "controls": True}),
        (evaluate_retrieval, {"options": EvalOptions(limit=4), "rerank": 2}),
        (evaluate_swaps, {}),
    ],
)
def test_a_match_score_that_was_never_trained_is_named(
    model_folder, scene_shards, tmp_path, monkeypatch, evaluate, options
):
    loaded, shards = vlp.load(model_folder), scene_shards
    if evaluate is evaluate_swaps:
        shards = tmp_path / "swaps"
        with ShardWriter(shards) as writer:
            one = make_sample("swaps", 0, 32, 0)
            writer.write(one.key, one.image, "png", one.annotation, one.second_image)
    words = ("never trained", "says nothing")
    assert not any(word in str(evaluate(loaded, [shards], **options).table()) for word in words)
    monkeypatch.setattr(type(loaded.model), "match_is_trained", False)
    assert any(word in str(evaluate(loaded, [shards], **options).table()) for word in words)
