"""Time of collective calls on nodes of GPUs, by a model; nothing here is measured.

Inside a node calls run over NVLink, between nodes over one network that all GPUs of a node share.
An all-reduce is hierarchical: reduce-scatter inside the node, all-reduce of the parts between
nodes, all-gather inside, one after another. Gathers and reduce-scatters move every byte once into
each node and once into each GPU. Links reach a share of their rate. A call has a fixed latency and
one for every hop: logarithmically many of an all-reduce (a tree), linearly many of others (a ring).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from evaluation.benchmarks.planning.collectives import Collective

BACKWARD = 2 / 3
"""Share of a step's work that is the backward pass, behind which gradients travel."""
ENCODING = 0.04
"""Share that is the student's encoding of clean pairs, behind which the teacher's keys travel: of
`base`, 24 of 556 GFLOP a pair."""


class Cluster(NamedTuple):
    """Nodes of GPUs.

    Rates are bytes/s in one direction: `nvlink` of a GPU, `network` of a node (400 Gb/s); `share`
    of them is reached. `call` and both `hop` are seconds of latency.
    """

    gpus_per_node: int = 8
    nvlink: float = 450e9
    network: float = 50e9
    share: float = 0.8
    call: float = 15e-6
    hop_inside: float = 1e-6
    hop_between: float = 5e-6

    def seconds(self, calls: Collective, ranks: int) -> float:
        """Return the time of collective calls, one after another, of so many ranks."""
        if ranks == 1 or not calls.calls:
            return 0.0
        inside = min(ranks, self.gpus_per_node)
        nodes = math.ceil(ranks / self.gpus_per_node)
        size = calls.bytes / self.share
        if calls.kind == "all_reduce":
            hops = 2 * math.log2(inside), 2 * math.log2(nodes)
            moved = 2 * (inside - 1) / inside, 2 * (nodes - 1) / nodes
        elif calls.kind == "pass":
            hops, moved = (
                (float(nodes == 1), float(nodes > 1)),
                (float(nodes == 1), float(nodes > 1)),
            )
        else:
            hops = float(inside - 1), float(nodes - 1)
            moved = (ranks - 1) / ranks, (nodes - 1) / nodes
        latency = self.call + hops[0] * self.hop_inside + hops[1] * self.hop_between
        rate = moved[0] / self.nvlink + moved[1] / self.network
        return calls.calls * latency + size * rate

    def exposed(self, collectives: Iterable[Collective], ranks: int, compute: float) -> float:
        """Return the seconds by which collective calls prolong a step of `compute` seconds.

        Those that run beside a pass prolong it by what is longer than the pass, and at least by
        their tail.
        """
        waited = 0.0
        hidden = {"backward": 0.0, "step": 0.0}
        tails, encoding = dict(hidden), 0.0
        for one in collectives:
            taken = self.seconds(one, ranks)
            if one.behind == "nothing":
                waited += taken
                continue
            if one.behind == "encoding":
                encoding += taken
                continue
            hidden[one.behind] += taken
            if one.tail:
                last = one._replace(bytes=one.tail, calls=1)
                tails[one.behind] += self.seconds(last, ranks)
        room = {"backward": compute * BACKWARD, "step": compute}
        # Both kinds share the links.
        late = max(hidden["backward"] - room["backward"], sum(hidden.values()) - room["step"], 0.0)
        waited += max(0.0, encoding - compute * ENCODING)
        return waited + max(late, sum(tails.values()))
