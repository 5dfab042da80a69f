"""Bytes that a rank holds of parameters, gradients, optimiser state and teacher, by engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from evaluation.benchmarks.planning.collectives import DDP_BUCKETS, FLOAT
from vlp.tasks.pretraining import Pretraining
from vlp.tasks.task import AUTOCAST
from vlp.tasks.teacher import half_weights
from vlp.training.config import TrainingConfig
from vlp.training.engines.deepspeed import deepspeed_config


class MemoryPart(NamedTuple):
    """Bytes of one thing in a GPU's memory, at least and at most."""

    name: str
    low: float
    high: float


def states(task: Pretraining, training: TrainingConfig, ranks: int) -> list[MemoryPart]:
    """Return what lies in memory in every step beside activations.

    Parameters, gradients and both moments of AdamW are float32 at every precision.

    Raises:
        ConfigError: the ZeRO file is none.
    """
    parts = _engine(task, training, ranks)
    teacher = sum(_teacher(module, training) for module in task.teachers())
    if teacher:
        parts.append(MemoryPart("teacher", teacher, teacher))
    if task.teacher:
        keys = sum(each.nbytes for each in task.teacher.queue.state_dict().values())
        parts.append(MemoryPart("queue", keys, keys))
    return parts


def _engine(task: Pretraining, training: TrainingConfig, ranks: int) -> list[MemoryPart]:
    size = FLOAT * sum(p.numel() for p in task.parameters())
    trained = FLOAT * sum(p.numel() for p in task.parameters() if p.requires_grad)
    if training.engine == "deepspeed" and ranks > 1:
        return list(_zero(size, trained, training, ranks))
    parts = [
        MemoryPart("parameters", size, size),
        MemoryPart("gradients", trained, trained),
        MemoryPart("optimiser", 2 * trained, 2 * trained),
    ]
    if training.engine == "ddp" and ranks > 1:
        halved = trained / 2 if training.gradient_reduction == "bf16" else 0
        parts.append(
            MemoryPart("buckets of gradients", trained, trained + halved + DDP_BUCKETS[-1])
        )
    return parts


def _zero(
    size: float, trained: float, training: TrainingConfig, ranks: int
) -> Iterator[MemoryPart]:
    zero = deepspeed_config(training, ranks)["zero_optimization"]
    stage, own = zero["stage"], trained / ranks
    bucket = (
        FLOAT * float(zero.get("reduce_bucket_size", 5e8)) * (1 + bool(zero.get("overlap_comm")))
    )
    bucket = min(bucket, 2 * trained)
    if stage < 3:
        copy = own if stage else 0  # AdamW works on a rank's flat part
        yield MemoryPart("parameters", size + copy, size + copy)
        yield MemoryPart("gradients", own if stage == 2 else trained, trained + own)
        yield MemoryPart(
            "optimiser", 2 * own if stage else 2 * trained, 2 * own if stage else 2 * trained
        )
    else:
        yield MemoryPart("parameters", size / ranks + own, size / ranks + own)
        yield MemoryPart("parameters, gathered", size, size)
        yield MemoryPart("gradients", own, 2 * own)
        yield MemoryPart("optimiser", 2 * own, 2 * own)
    yield MemoryPart("buckets of gradients", bucket / 2, bucket)


def _teacher(teacher: nn.Module, training: TrainingConfig) -> float:
    """Every engine holds it whole, and the weights of products in half precision beside it."""
    rounded = half_weights(teacher).values() if training.precision in AUTOCAST else ()
    return FLOAT * _numel(teacher) + FLOAT / 2 * sum(weight.numel() for weight in rounded)


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
