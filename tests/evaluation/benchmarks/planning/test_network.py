"""Time of collective calls by the model, against sums by hand."""

from __future__ import annotations

import pytest

from evaluation.benchmarks.planning.collectives import Collective
from evaluation.benchmarks.planning.network import BACKWARD, Cluster

PLAIN = Cluster(8, nvlink=100.0, network=10.0, share=1.0, call=0, hop_inside=0, hop_between=0)


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        ("all_reduce", 1, 0),
        ("all_reduce", 8, 2 * 7 / 8 * 10),
        ("all_reduce", 64, 2 * 7 / 8 * 10 + 2 * 7 / 8 * 100),
        ("all_gather", 8, 7 / 8 * 10),
        ("reduce_scatter", 16, 15 / 16 * 10 + 1 / 2 * 100),
        ("pass", 8, 10),
        ("pass", 16, 100),
    ],
)
def test_bytes_cross_the_slowest_link_once(kind: str, ranks: int, seconds: float) -> None:
    calls = Collective("", kind, 1000.0, 1)  # type: ignore[arg-type]
    assert PLAIN.seconds(calls, ranks) == pytest.approx(seconds)


def test_latency_grows_with_calls_and_hops() -> None:
    cluster = PLAIN._replace(call=1.0, hop_inside=0.1, hop_between=10.0)
    calls = Collective("", "all_reduce", 0, 3)
    assert cluster.seconds(calls, 64) == pytest.approx(3 * (1 + 6 * 0.1 + 6 * 10))
    ring = Collective("", "all_gather", 0, 1)
    assert cluster.seconds(ring, 64) == pytest.approx(1 + 7 * 0.1 + 7 * 10)


def test_what_runs_beside_a_pass_shows_only_where_it_is_longer() -> None:
    gradients = Collective("", "all_reduce", 1000.0, 1, "backward", tail=100.0)
    taken = PLAIN.seconds(gradients, 8)
    assert PLAIN.exposed([gradients], 8, compute=1000) == pytest.approx(taken / 10)
    compute = taken / BACKWARD / 2
    assert PLAIN.exposed([gradients], 8, compute) == pytest.approx(taken / 2)
    alone = gradients._replace(behind="nothing")
    assert PLAIN.exposed([alone], 8, compute=1000) == pytest.approx(taken)
