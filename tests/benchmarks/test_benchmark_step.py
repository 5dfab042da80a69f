import numpy as np
import pytest
from tests_support import TINY_MODEL

from benchmarks.step import QUEUE, WITH, WITHOUT, added_share, variants
from vlp.config import merge
from vlp.training.config import PretrainConfig

CONTENT = {
    "model": TINY_MODEL,
    "data": {"sources": [{"path": "shards"}], "vocabulary": "none", "canonical_streams": 2},
    "objectives": {"itm": {"group": 4}, "contrastive": {"token": {"group": 4}}},
    "training": {"batch": 4, "precision": "float32"},
}


def test_only_the_position_differs():
    weights = {"text": {"weights": "hub/bert"}, "image": {"weights": "vit"}}
    given = PretrainConfig.model_validate(merge(CONTENT, {"model": weights}))
    both = variants(given)
    with_it, without = (both[name].model_dump() for name in (WITH, WITHOUT))
    assert with_it["model"]["cross"].pop("position") == ("anchor",)
    assert without["model"]["cross"].pop("position") == ()
    assert with_it == without
    assert with_it["model"]["text"]["weights"] is with_it["model"]["image"]["weights"] is None
    assert with_it["objectives"]["teacher"]["queue"] == QUEUE
    assert with_it["objectives"]["mlm"] == given.objectives.mlm.model_dump()


def test_slow_moments_that_hit_both_do_not_move_the_share():
    generator = np.random.default_rng(0)
    moment = generator.uniform(1, 5, 40)
    without = moment * generator.normal(1, 0.01, 40)
    share, (low, high) = added_share(1.1 * moment, without)
    assert share == pytest.approx(0.1, abs=0.01)
    assert low < share < high
    assert high - low < 0.02
    assert added_share(without, without) == (0, (0, 0))
