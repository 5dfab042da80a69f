import json
from pathlib import Path

import pytest
import ranks
from tests_support import TINY_MODEL

from benchmarks.__main__ import main
from benchmarks.scale import Scale, mixing, shards_of_node, task_collectives
from vlp.training.config import PretrainConfig

SCRIPT = Path(__file__).with_name("collective_ranks.py")
SMALL = Scale(
    shards=40, shard_samples=50, ranks=4, ranks_per_node=2, streams=8, batch=32, window=20
)
GROUP = 4


def epoch(scale):
    """(shard, position) of every slot of the first epoch, in order."""
    sampler = scale.sampler()
    found = []
    for batch in sampler.global_batches(0, scale.batch):
        if batch.epoch:
            break
        found += [slot for slot in sampler.rows(0, batch.start, scale.batch) if slot]
    return [(slot.shard, slot.position) for slot in found]


def test_mixing_is_what_the_whole_order_shows():
    mixed = mixing(SMALL, lookups=400)
    places = epoch(SMALL)
    assert len(places) == SMALL.samples == 2000
    distances = [
        abs(comes - shard * 50 - position) / 2000 for comes, (shard, position) in enumerate(places)
    ]
    assert mixed.displacement[0] == pytest.approx(sum(distances) / 2000, abs=0.03)
    batches = [places[start : start + 32] for start in range(0, 1984, 32)]
    shares = [
        sum(a[0] == b[0] for a in batch for b in batch if a is not b) / (32 * 31)
        for batch in batches
    ]
    assert min(shares) <= mixed.pairs[0] <= max(shares)
    assert min(len({s for s, _ in batch}) for batch in batches) <= mixed.distinct[0]
    assert mixed.distinct[0] <= max(len({s for s, _ in batch}) for batch in batches)
    assert mixed.displacement[1] == pytest.approx(1 / 3)
    assert mixed.pairs[1] == pytest.approx(49 / 1999)
    assert 40 / 2 <= shards_of_node(SMALL) <= 40 / 2 + 2


@pytest.mark.nightly
def test_a_rank_starts_and_resumes(capsys):
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL._asdict().items()]
    assert main(["scale", *arguments]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("2,000 samples, 4 ranks")
    lines = [json.loads(line) for line in printed if line.startswith("{")]
    figures = {line["name"]: line["value"] for line in lines}
    assert all(figures[f"scale/{name}"] > 0 for name in ("index_open", "first_batch", "resume"))


@pytest.mark.parametrize("world", [64, 1024])
def test_the_task_itself_makes_few_calls_whose_bytes_grow_with_the_batch(world):
    """Of each pair two keys of 8 float32, ids of image and caption, a mark; counts of 7 losses."""
    settings = {
        "model": TINY_MODEL,
        "data": {"sources": ["none"], "canonical_streams": 1},
        "objectives": {
            "contrastive": {"token": {"group": GROUP}},
            "itm": {"group": GROUP},
            "teacher": {"queue": 8},
        },
        "training": {"batch": GROUP * world, "precision": "float32"},
    }
    trace = task_collectives(PretrainConfig.model_validate(settings), world)
    assert trace.calls == {"all_gather": 2, "all_reduce": 1}
    assert trace.bytes == {
        "all_gather": GROUP * world * (2 * 8 * 4 + 2 * 8 + 8),
        "all_reduce": 8 * 7,
    }


@pytest.mark.nightly
def test_calls_of_engines_on_two_ranks():
    """Beside the task's own: two sums and two gathers, of counts, histogram and keys."""
    lines = ranks.run([SCRIPT, "ddp,zero1,zero3"], 2).splitlines()
    traces = [json.loads(line) for line in lines if line.startswith('{"engine"')]
    assert {trace["engine"]: trace["calls"] for trace in traces} == {
        "ddp": {"all_reduce": 4, "all_gather": 2},
        "zero1": {"all_reduce": 5, "all_gather": 4},
        "zero3": {"all_reduce": 4, "all_gather": 142, "reduce_scatter": 1},
    }
