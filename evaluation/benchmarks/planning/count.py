"""Work, memory and collective calls of a rank's step, counted at few pairs and scaled to its own.

A step is counted on fake tensors at one and at two sample groups, among as many pretended ranks as
give the contrastive loss the candidates of the whole batch. Everything is then linear in the pairs
of a rank. With `training.grad_cache` a chunk takes the place of a group, and two are counted.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

from evaluation.benchmarks.gpu.roofline import Work, WorkCount, parameter_passes
from evaluation.benchmarks.planning.collectives import (
    Behind,
    Collective,
    CollectiveTrace,
    all_blocks,
)
from evaluation.benchmarks.planning.fake_step import fake_step, pretended_ranks
from evaluation.benchmarks.planning.live_memory import LiveMemory
from vlp.objectives.running_quantile import BINS
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig

_NAMES = {
    "all_reduce": "counts of losses",
    "all_gather": "contrastive keys",
    "reduce_scatter": "gradients of keys",
}


class StepCount(NamedTuple):
    """One rank's step, by reading of what a GPU does ("fused", "as written").

    work: of forward and backward pass, optimiser and teacher. kept: bytes of activations that the
    forward pass leaves. peak: bytes of them at most. collectives: of the task itself. uses: forward
    calls of each block of `all_blocks`.
    """

    work: dict[str, Work]
    kept: dict[str, float]
    peak: dict[str, float]
    collectives: list[Collective]
    uses: list[float]


def smallest_rows(config: PretrainConfig) -> int:
    """Return the least number of pairs that makes whole sample groups."""
    objectives = config.objectives
    groups = [objectives.itm.group] if objectives.itm else []
    if objectives.contrastive and objectives.contrastive.kind == "anchor":
        groups.append(objectives.contrastive.token.group)
    return math.lcm(1, *groups)


def count_groups(config: PretrainConfig, rows: int, words: int = 15) -> list[StepCount]:
    """Count a step of one and of two sample groups, in two chunks each with `grad_cache`.

    Few rows are counted as they are. A count takes about five seconds of a CPU.
    """
    least = smallest_rows(config)
    if _chunk(config, rows) is not None:
        return [_count(with_chunk(config, n * least), 2 * n * least, words) for n in (1, 2)]
    config = with_chunk(config, None)
    each = [rows] if rows <= 2 * least else [least, 2 * least]
    return [_count(config, one, words) for one in each]


def scale(config: PretrainConfig, counts: list[StepCount], ranks: int) -> StepCount:
    """Continue the line of `count_groups` to one of so many ranks, and add what runs once a step.

    Args:
        config: whose batch the ranks share; its `grad_cache` may be any, where it has one.
        counts: of this configuration.
        ranks: all of them.
    """
    rows, least = config.training.batch // ranks, smallest_rows(config)
    chunk = _chunk(config, rows)
    counted = counts[-1]
    if chunk is not None:
        counted = _line(counts[0], counted, rows / (2 * least), chunk / least, rows / chunk / 2)
    elif len(counts) == 2:
        counted = _line(counts[0], counted, rows / least, rows / least, 1)
    passes = parameter_passes(config)
    work = {name: Work(*map(sum, zip(one, passes))) for name, one in counted.work.items()}
    own = [*counted.collectives, *_ring(config, ranks), *_threshold(config)]
    collectives = [] if ranks == 1 else own
    return counted._replace(work=work, collectives=collectives)


def _threshold(config: PretrainConfig) -> list[Collective]:
    """A running anchor threshold sums a histogram, which a fake step has no numbers for."""
    cross = config.model.cross
    if "anchor" not in cross.position or cross.anchor.threshold is not None:
        return []
    return [Collective("anchor threshold", "all_reduce", 8 * BINS, 1)]


def with_chunk(config: PretrainConfig, chunk: int | None) -> PretrainConfig:
    """Return a configuration with another `training.grad_cache`."""
    training = config.training.model_copy(update={"grad_cache": chunk})
    return config.model_copy(update={"training": training})


def _chunk(config: PretrainConfig, rows: int) -> int | None:
    """Return the pairs of a chunk; None where all of a rank's are one."""
    chunk = config.training.grad_cache
    return chunk if chunk is not None and chunk < rows else None


def _count(config: PretrainConfig, rows: int, words: int) -> StepCount:
    """Count forward and backward pass of some rows, with the candidates of the whole batch."""
    batch = config.training.batch
    memory, work, calls = LiveMemory(), WorkCount(), CollectiveTrace()
    uses: list[float] = []

    def watch(task: Pretraining) -> None:
        for network in task.networks():
            memory.leave_out([*network.parameters(), *network.buffers()])
        if task.teacher:
            memory.leave_out(task.teacher.state_dict().values())
        for number, block in enumerate(all_blocks(task)):
            uses.append(0)
            block.register_forward_pre_hook(partial(_use, uses, number))

    ring = config.objectives.contrastive and config.objectives.contrastive.kind == "sigmoid"
    with pretended_ranks(1 if ring else max(1, batch // rows)):
        fake_step(config, rows, (memory, work, calls), words, watch, memory.mark_forward)
    kinds = dict.fromkeys(kind for kind, _ in calls.calls)
    keys: Behind = "encoding" if config.objectives.teacher else "nothing"
    collectives = [
        Collective(
            _NAMES[kind], kind, *calls.total(kind), keys if kind == "all_gather" else "nothing"
        )
        for kind in kinds
    ]
    return StepCount(work.work, dict(memory.kept), dict(memory.peak), collectives, uses)


def _use(uses: list[float], number: int, *_: Any) -> None:
    uses[number] += 1


def _line(low: StepCount, high: StepCount, rows: float, chunk: float, chunks: float) -> StepCount:
    """Continue the line of two counts, of which `high` has twice the rows and the chunk of `low`.

    Args:
        low: at the unit of `rows` and of `chunk`.
        high: at two units.
        rows: on which work and what the forward pass keeps depend.
        chunk: on which what a backward pass adds for a time depends.
        chunks: times that what no row changes is done, as often as in the counts.
    """

    def at(one: float, two: float, units: float, times: float = 1) -> float:
        return (two - one) * units + (2 * one - two) * times

    kept = {name: at(low.kept[name], high.kept[name], rows) for name in low.kept}
    peak = {
        name: kept[name]
        + at(low.peak[name] - low.kept[name], high.peak[name] - high.kept[name], chunk)
        for name in kept
    }
    work = {
        name: Work(*(at(*both, rows, chunks) for both in zip(low.work[name], high.work[name])))
        for name in low.work
    }
    return high._replace(work=work, kept=kept, peak=peak)


def _ring(config: PretrainConfig, ranks: int) -> list[Collective]:
    """The sigmoid loss passes texts, their gradients, ids and marks from rank to rank."""
    contrastive = config.objectives.contrastive
    if not contrastive or contrastive.kind != "sigmoid":
        return []
    row = 2 * 4 * config.model.embed_dim + 8 + 1
    return [Collective("texts in a ring", "pass", config.training.batch * row, 4 * ranks)]
