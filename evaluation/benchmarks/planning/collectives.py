"""Collective calls of a step: what a task makes by itself, traced, and what its engine adds.

Bytes are of the whole tensor: of an all-reduce its input, of an all-gather what every rank holds
after it, of a reduce-scatter what every rank holds before it, of a pass what a rank sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_leaves

from vlp.tasks.pretraining import Pretraining
from vlp.training.config import TrainingConfig
from vlp.training.engines.blocks import block_stacks
from vlp.training.engines.deepspeed import deepspeed_config
from vlp.training.optimiser import parameter_groups

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "pass"]
Behind = Literal["nothing", "backward", "step", "encoding"]

FLOAT = 4
DDP_BUCKETS = [2**20, 25 * 2**20]
"""Bytes of PyTorch's first and of its other buckets of gradients."""
_KINDS: dict[str, Kind] = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}


class Collective(NamedTuple):
    """Calls of one kind: bytes of all of them together, and what of the step hides their time.

    behind: "backward" may run beside the backward pass, "step" beside both passes, "encoding"
    beside the encoders' forward passes.
    tail: bytes of those that end after the backward pass all the same.
    """

    name: str
    kind: Kind
    bytes: float
    calls: float
    behind: Behind = "nothing"
    tail: float = 0


class CollectiveTrace:
    """List of collective calls of tensors, as (kind, bytes)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Kind, int]] = []

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note an operation if it is a collective call."""
        if func.namespace not in ("c10d", "_c10d_functional"):
            return
        kind = _KINDS.get(func.overloadpacket.__name__)
        if kind:
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
            self.calls.append((kind, max(x.nbytes for x in tensors)))

    def total(self, kind: Kind) -> tuple[int, int]:
        """Return bytes and number of all calls of a kind."""
        sizes = [size for one, size in self.calls if one == kind]
        return sum(sizes), len(sizes)


def engine_collectives(
    task: Pretraining, training: TrainingConfig, ranks: int, uses: Sequence[float]
) -> list[Collective]:
    """Return the calls that an engine adds to those of its task in one optimiser step.

    Args:
        task: on any device, also "meta".
        training: engine, its ZeRO file, number format of the reduction.
        ranks: all of them.
        uses: forward calls of each block of `all_blocks`, in one step.

    Raises:
        ConfigError: the ZeRO file is none.
    """
    if ranks == 1:
        return []
    if training.engine == "ddp":
        return list(_ddp(task, training))
    zero = deepspeed_config(training, ranks)["zero_optimization"]
    if zero["stage"] == 3:
        return list(_zero3(task, ranks, zero))
    return list(_zero(task, training, ranks, zero))


def all_blocks(task: Pretraining) -> list[nn.Module]:
    """Return the blocks of a task and of its teacher."""
    stacks = [stack for module in (task, *task.teachers()) for stack in block_stacks(module)]
    return [block for stack in stacks for block in stack]


def _trainable(task: nn.Module) -> list[Tensor]:
    return [parameter for parameter in task.parameters() if parameter.requires_grad]


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _ddp(task: Pretraining, training: TrainingConfig) -> Iterator[Collective]:
    width = 2 if training.gradient_reduction == "bf16" else FLOAT
    trained = [torch.empty_like(p, device="meta") for p in reversed(_trainable(task))]
    buckets, _ = dist._compute_bucket_assignment_by_size(trained, DDP_BUCKETS)
    last = width * _numel([trained[n] for n in buckets[-1]])
    size = width * _numel(trained)
    yield Collective("gradients", "all_reduce", size, len(buckets), "backward", last)
    used = 4 * len(trained)  # which parameters a rank has used, int32
    yield Collective("used parameters", "all_reduce", used, 1, "backward")


def _zero(
    task: Pretraining, training: TrainingConfig, ranks: int, zero: dict[str, Any]
) -> Iterator[Collective]:
    """Stages 0 to 2 reduce whole gradients; 1 and 2 gather what each rank has updated."""
    size = _numel(_trainable(task))
    bucket = int(zero.get("reduce_bucket_size", 5e8)) if zero["stage"] else int(5e8)
    behind: Behind = "backward" if zero["stage"] and zero.get("overlap_comm") else "nothing"
    calls = max(1, math.ceil(size / bucket))
    tail = FLOAT * min(size, bucket)
    yield Collective("gradients", "all_reduce", FLOAT * size, calls, behind, tail)
    if not zero["stage"]:
        return
    yield Collective("norm and overflow", "all_reduce", 2 * FLOAT, 2)
    optimiser = training.optimiser
    groups = parameter_groups(
        task, optimiser.weight_decay, optimiser.lr_multipliers, optimiser.layer_decay
    )
    most = int(zero.get("allgather_bucket_size", 5e8))
    gathered = [
        math.ceil(_numel([p for p in group["params"] if p.ndim]) / (2 * ranks)) * 2 * ranks
        for group in groups
    ]
    calls = sum(max(1, size // most) for size in gathered)
    yield Collective("updated parameters", "all_gather", FLOAT * sum(gathered), calls)


def _zero3(task: Pretraining, ranks: int, zero: dict[str, Any]) -> Iterator[Collective]:
    """Parameters stay whole from the forward to the end of the backward pass, below 10⁹ of them."""
    trained = _trainable(task)
    size = FLOAT * sum(math.ceil(p.numel() / ranks) * ranks for p in task.parameters())
    bucket = FLOAT * int(zero.get("stage3_prefetch_bucket_size", 5e7))
    calls = max(1, math.ceil(size / bucket))
    yield Collective("parameters", "all_gather", size, calls, "step", min(size, bucket))
    reduced = FLOAT * sum(math.ceil(p.numel() / ranks) * ranks for p in trained)
    bucket = FLOAT * int(zero.get("reduce_bucket_size", 5e8))
    calls = max(1, math.ceil(reduced / bucket))
    behind: Behind = "backward" if zero.get("overlap_comm", True) else "nothing"
    yield Collective("gradients", "reduce_scatter", reduced, calls, behind, min(reduced, bucket))
    yield Collective("norm and overflow", "all_reduce", 16, 2)
    small = int(zero.get("stage3_param_persistence_threshold", 1e5))
    kept = [math.ceil(p.numel() / ranks) * ranks for p in trained if p.numel() < small]
    if kept:
        yield Collective("small parameters", "all_gather", FLOAT * sum(kept), len(kept))
    if task.teachers():
        rest = size - FLOAT * sum(kept)
        yield Collective("parameters for the teacher", "all_gather", rest, 1 if rest else 0)
