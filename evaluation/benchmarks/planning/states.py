"""Bytes that a rank holds of parameters, gradients, optimiser state and teacher, by engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from evaluation.benchmarks.planning.collectives import DDP_BUCKETS, FLOAT
from vlp.compute.half_weights import half_weights
from vlp.tasks.pretraining import Pretraining
from vlp.tasks.task import AUTOCAST
from vlp.training.config import LoopConfig
from vlp.training.engines.blocks import block_stacks
from vlp.training.engines.deepspeed_config import deepspeed_config


class MemoryPart(NamedTuple):
    """Bytes of one thing in a GPU's memory, at least and at most."""

    name: str
    low: float
    high: float


def states(task: Pretraining, training: LoopConfig, ranks: int) -> list[MemoryPart]:
    """Return what lies in memory in every step beside activations.

    Parameters, gradients and both moments of AdamW are float32 at every precision.

    Raises:
        ConfigError: the ZeRO file is none.
    """
    parts = _engine(task, training, ranks)
    teacher = sum(_teacher(module, training, ranks) for module in task.teachers())
    if teacher:
        parts.append(MemoryPart("teacher", teacher, teacher))
    if task.teacher:
        keys = sum(each.nbytes for each in task.teacher.queue.state_dict().values())
        parts.append(MemoryPart("queue", keys, keys))
    return parts


def _engine(task: Pretraining, training: LoopConfig, ranks: int) -> list[MemoryPart]:
    size = FLOAT * sum(p.numel() for p in task.parameters())
    trained = FLOAT * sum(p.numel() for p in task.parameters() if p.requires_grad)
    if training.engine == "deepspeed" and ranks > 1:
        return list(_zero(size, trained, training, ranks))
    if training.engine == "fsdp" and ranks > 1:
        blocks = [block for stack in block_stacks(task) for block in stack]
        within = [FLOAT * _numel(block) for block in blocks]
        root = size - sum(within)
        # Those outside of blocks and two blocks; at the end of the backward pass all are whole.
        least = root + sum(sorted(within)[-2:])
        return [
            MemoryPart("parameters", size / ranks, size / ranks),
            MemoryPart("parameters, gathered", least, size),
            MemoryPart("gradients", trained / ranks, trained / ranks + max(root, *within)),
            MemoryPart("optimiser", 2 * trained / ranks, 2 * trained / ranks),
        ]
    parts = [
        MemoryPart("parameters", size, size),
        MemoryPart("gradients", trained, trained),
        MemoryPart("optimiser", 2 * trained, 2 * trained),
    ]
    if training.weights == "bf16":  # beside their masters; tables of words stay float32
        parts.append(MemoryPart("weights in bf16", 0, trained / 2))
    if training.engine == "ddp" and ranks > 1:
        halved = trained / 2 if training.gradient_reduction == "bf16" else 0
        parts.append(
            MemoryPart("buckets of gradients", trained, trained + halved + DDP_BUCKETS[-1])
        )
    return parts


def _zero(size: float, trained: float, training: LoopConfig, ranks: int) -> Iterator[MemoryPart]:
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


def _teacher(teacher: nn.Module, training: LoopConfig, ranks: int) -> float:
    """Engine fsdp cuts the teacher's blocks like the student's; others hold it whole.

    They also keep the weights of products in half precision.
    """
    size = FLOAT * _numel(teacher)
    if training.engine != "fsdp":
        rounded = half_weights(teacher).values() if training.precision in AUTOCAST else ()
        return size + FLOAT / 2 * sum(weight.numel() for weight in rounded)
    cut = FLOAT * sum(_numel(block) for stack in block_stacks(teacher) for block in stack)
    return size - cut + cut / ranks


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
