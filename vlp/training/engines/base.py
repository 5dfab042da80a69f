"""Interface between the training loop and the machinery that holds the parameters.

The loop (`vlp/training/loop.py`) sees only this; `ddp.py` fulfils it with a whole copy on every
rank, `fsdp.py` with a part of each parameter, `deepspeed.py` whatever the ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vlp.data.stream.batch import Slots
from vlp.io import write_tensors
from vlp.tasks.task import StepOutput

# A checkpoint's files and the names in them, the same for every engine.
WEIGHTS, OPTIMISER = "weights.safetensors", "optimiser.safetensors"
MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"


class Update(NamedTuple):
    """Outcome of one optimiser step; the same on every rank.

    `gradient_norm` is the global norm before clipping (inf where a gradient was not finite; then
    `applied` is False: weights and optimiser state are as before and the gradients are gone). Both
    are 0-d tensors where the device has not come so far yet and need not be waited for.
    `loss_scale` is the one that the step had, None without loss scaling.
    """

    applied: bool | Tensor
    gradient_norm: float | Tensor
    loss_scale: float | None = None


class Engine(Protocol):
    """Parameters, gradients and optimiser state of one task on all ranks.

    Every method is collective: all ranks call it, in the same order.
    """

    rank: int
    world_size: int
    device: torch.device
    module: nn.Module

    def forward(self, batch: Slots, step: int) -> StepOutput:
        """Run the task on this rank's share of a global batch."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` (scalar); they are averaged over ranks and micro-steps."""

    def step(self, learning_rate: float) -> Update:
        """Clip, apply AdamW once after the last micro-step's `backward`, clear the gradients."""

    def parameters(self) -> dict[str, Tensor]:
        """Return float32 parameters by name, full size or sharded; valid until `step`."""

    def gather(self) -> dict[str, Tensor]:
        """Return full float32 parameters by name, on each rank's device; valid until `step`."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full float32 state, with buffers, on rank 0's CPU; empty elsewhere."""

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the state by file and name, rank-free, on rank 0's CPU; else empty."""

    def load(self, folder: Path | None) -> None:
        """Take back the files of `snapshot`, on any number of ranks; only rank 0 has a folder."""


@runtime_checkable
class ShardedEngine(Engine, Protocol):
    """An engine whose ranks can write and read the state as they hold it."""

    def held(self) -> dict[str, dict[str, Tensor]]:
        """Return the state by file and name, full size or sharded; valid until `step`.

        What is written into these tensors is the engine's, but for what `settle` takes.
        """

    def settle(self, optimiser: Mapping[str, Tensor]) -> None:
        """Take the step count, and the loss scale where there is one, from loaded tensors."""


def write_snapshot(engine: Engine, folder: Path) -> None:
    """Write the files that `Engine.load` reads; collective, and rank 0 writes."""
    for file, tensors in engine.snapshot().items():
        if engine.rank == 0:
            write_tensors(folder / file, tensors)


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return persistent buffers by name."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return {name: tensor for name, tensor in state.items() if name not in parameters}
