"""The benchmark at a billion, made small: what it measures, and its figures."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from evaluation.benchmarks.data.billion import Scale, main, mixing, reading

SMALL = Scale(
    shards=40, shard_samples=50, ranks=4, ranks_per_node=2, streams=8, batch=32, window=20
)


def epoch(scale: Scale) -> list[tuple[int, int]]:
    """(shard, position) of every slot of the first epoch, in order."""
    sampler = scale.sampler()
    found = []
    for step in sampler.steps(0, scale.batch):
        if step.epoch:
            break
        found += [slot for slot in sampler.slots(0, step.start, scale.batch) if slot]
    return [(slot.shard, slot.position) for slot in found]


def test_mixing_is_what_the_whole_order_shows() -> None:
    mixed = mixing(SMALL, lookups=400)
    places = epoch(SMALL)
    assert len(places) == SMALL.samples == 2000
    distances = [
        abs(comes - shard * 50 - position) / 2000 for comes, (shard, position) in enumerate(places)
    ]
    assert mixed.displacement[0] == pytest.approx(sum(distances) / 2000, abs=0.03)
    spans = []
    for shard in range(40):
        times = [comes for comes, place in enumerate(places) if place[0] == shard]
        spans.append((times[-1] - times[0]) / 2000)
    # It says how far a shard can spread; most samples of a window come a little later or earlier.
    assert mixed.span[0] == pytest.approx(sum(spans) / 40, abs=0.12)
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


def test_a_longer_window_mixes_more_and_reads_more_at_a_time() -> None:
    windows = [SMALL._replace(window=window) for window in (5, 60, 250)]
    spans = [mixing(scale, lookups=1).span[0] for scale in windows]
    assert all(a < b for a, b in pairwise(spans))
    at_once = [reading(scale).rank_at_once for scale in windows]
    assert at_once[0] < at_once[-1]


def test_a_node_reads_its_own_part() -> None:
    read = reading(SMALL)
    assert 40 / 2 <= read.node <= 40 / 2 + 2
    assert 40 / 4 <= read.rank <= 40 / 4 + 2


@pytest.mark.integration
def test_the_command(capsys: pytest.CaptureFixture) -> None:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL._asdict().items()]
    assert main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("2,000 samples, 40 shards, 4 ranks x 8 workers")
    figures = {}
    for line in printed:
        if line.startswith("{"):
            figure = json.loads(line)
            assert set(figure) == {"name", "value", "unit", "target", "stretch", "device"}
            figures[figure["name"]] = figure["value"]
    assert 0 < figures["billion/index_open"] < 5
    assert figures["billion/first_batch"] > 0
    assert 20 < figures["billion/worker_memory"] < 5000
    assert figures["billion/node_bytes"] == pytest.approx(
        figures["billion/node_shards"] * 50 * 30_000 / 1e12
    )


def test_what_does_not_fit(capsys: pytest.CaptureFixture) -> None:
    assert main(["--shards=4", "--shard-samples=5", "--streams=3", "--ranks=2", "--batch=6"]) == 2
    assert "2 ranks cannot share data.canonical_streams 3" in capsys.readouterr().err
