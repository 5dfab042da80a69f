"""The plan of a pretraining: what so many GPUs need and take, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from evaluation.benchmarks.gpu.roofline import GPU, ends
from evaluation.benchmarks.planning.collectives import Collective, engine_collectives
from evaluation.benchmarks.planning.count import StepCount, count_groups, scale, smallest_rows
from evaluation.benchmarks.planning.fake_step import meta_task
from evaluation.benchmarks.planning.live_memory import FUSED, WRITTEN
from evaluation.benchmarks.planning.network import Cluster
from evaluation.benchmarks.planning.states import MemoryPart, states
from vlp.training.config import PretrainConfig

RESERVED = (1e9, 3e9)
"""Bytes of CUDA's context, libraries and NCCL's buffers, at least and at most."""
FRAGMENTS = 0.05
"""Share of activations that PyTorch's allocator loses between blocks, at most."""
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", "gradient_reduction": "float32"},
    "ddp, bf16 reduction": {"engine": "ddp", "gradient_reduction": "bf16"},
    "deepspeed zero1": {"engine": "deepspeed", "deepspeed": "zero1"},
    "deepspeed zero3": {"engine": "deepspeed", "deepspeed": "zero3"},
}


class Range(NamedTuple):
    """A prediction's near and far end."""

    low: float
    high: float


class Plan(NamedTuple):
    """Predictions of one rank's step.

    memory: bytes by part. compute, waiting, step: seconds of an optimiser step: on the device,
    for other ranks, and both. collectives: of a step, with the seconds of each.
    """

    memory: list[MemoryPart]
    compute: Range
    waiting: Range
    collectives: list[tuple[Collective, float]]

    @property
    def total(self) -> Range:
        """Bytes of a GPU's memory."""
        return Range(sum(part.low for part in self.memory), sum(part.high for part in self.memory))

    @property
    def step(self) -> Range:
        """Seconds of an optimiser step."""
        return Range(*(sum(both) for both in zip(self.compute, self.waiting)))


def make_plan(
    config: PretrainConfig, count: StepCount, ranks: int, gpu: GPU, cluster: Cluster
) -> Plan:
    """Predict memory and time of one of so many ranks, whose step is counted.

    Raises:
        ConfigError: the ZeRO file is none.
    """
    training, rows = config.training, config.training.batch // ranks
    task = meta_task(config)
    pixels = 4 * 3 * config.model.image.image_size**2 * rows
    low, high = count.peak[FUSED], count.peak[WRITTEN]
    memory = [
        *states(task, training, ranks),
        MemoryPart("activations", low, high * (1 + FRAGMENTS)),
        MemoryPart("batches", pixels, 2 * pixels),
        MemoryPart("CUDA, NCCL", *RESERVED),
    ]
    engine = engine_collectives(task, training, ranks, count.uses)
    micro = training.gradient_accumulation_steps
    compute, waiting = [], []
    for assumption in ends(config):
        seconds = count.work[assumption.name].seconds(gpu, assumption)
        last = cluster.exposed([*count.collectives, *engine], ranks, seconds)
        every = [*count.collectives, *(one for one in engine if one.behind == "step")]
        compute.append(micro * seconds)
        waiting.append(last + (micro - 1) * cluster.exposed(every, ranks, seconds))
    listed = [(one, cluster.seconds(one, ranks)) for one in [*count.collectives, *engine]]
    return Plan(memory, Range(*compute), Range(*waiting), listed)


def with_training(config: PretrainConfig, **changes: Any) -> PretrainConfig:
    """Return a configuration with other keys of `training`."""
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def engine_plans(
    config: PretrainConfig, count: StepCount, ranks: int, gpu: GPU, cluster: Cluster
) -> Iterator[tuple[str, Plan]]:
    """Yield the plan of the same step with every engine that takes it."""
    for name, changes in ENGINES.items():
        yield name, make_plan(with_training(config, **changes), count, ranks, gpu, cluster)


def most_rows(plan: Plan, count: StepCount, rows: int, group: int, memory: float) -> int:
    """Return the largest number of pairs whose far end fits, in whole sample groups; 0 for none."""
    of_rows = sum(part.high for part in plan.memory if part.name in ("activations", "batches"))
    room = memory - (plan.total.high - of_rows)
    return max(0, math.floor(room / (of_rows / rows) / group) * group)


def smaller_plans(
    config: PretrainConfig, ranks: int, gpu: GPU, cluster: Cluster
) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Yield ways to need less memory, the cheaper first, as changes of `training` and their plan.

    They recompute blocks, then the passes of all but one chunk, then both. Of chunks the largest
    that fits is taken, or else the least.
    """
    rows, group = config.training.batch // ranks, smallest_rows(config)
    blocks = {"activation_checkpointing": "blocks"}
    if config.training.activation_checkpointing != "blocks":
        less = with_training(config, **blocks)
        yield (
            blocks,
            make_plan(less, scale(less, count_groups(less, rows), ranks), ranks, gpu, cluster),
        )
    if rows < 4 * group:
        return
    for changes in ({}, blocks):
        counts = count_groups(with_training(config, **changes, grad_cache=group), rows)
        chunk, plan = group, None
        for doubled in range(int(math.log2(rows / group)) - 1, -1, -1):
            chunk = group << doubled
            less = with_training(config, **changes, grad_cache=chunk)
            plan = make_plan(less, scale(less, counts, ranks), ranks, gpu, cluster)
            if plan.total.high <= gpu.memory:
                break
        assert plan is not None
        yield {**changes, "grad_cache": chunk}, plan
