"""Interface of engines, which hold parameters and optimiser state for the training loop."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vlp.data.stream.batch import RankBatch
from vlp.distributed import broadcast_tensors
from vlp.tasks.task import StepOutput

# Files of a checkpoint; all engines read those of any engine.
WEIGHTS, OPTIMISER = "weights.safetensors", "optimiser.safetensors"
# Name of the loss scale's state in `OPTIMISER`.
LOSS_SCALE = "loss_scale"

INITIAL_SCALE = 2.0**16
# Applied steps in a row after which the loss scale doubles.
GROWTH_INTERVAL = 2000


class Update(NamedTuple):
    """Result of one optimiser step; the same on every rank.

    Attributes:
        applied: False if a gradient is not finite, which leaves weights and optimiser state as they
            were.
        gradient_norm: the global norm before clipping; not finite if the step was not applied.
        loss_scale: loss scale of the step; None without loss scaling.

    `applied` and `gradient_norm` are 0-d tensors while a device still computes them.
    """

    applied: bool | Tensor
    gradient_norm: float | Tensor
    loss_scale: float | None = None


class Engine(Protocol):
    """Parameters, gradients and optimiser state of a task on all ranks; methods are collective."""

    rank: int
    world_size: int
    device: torch.device
    module: nn.Module

    def forward(self, batch: RankBatch, step: int) -> StepOutput:
        """Run the task on this rank's share of a global batch."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` (scalar); they are averaged over ranks and micro-steps."""

    def step(self, learning_rate: float) -> Update:
        """Clip gradients, apply AdamW and clear the gradients, after the last `backward`."""

    def parameters(self) -> dict[str, Tensor]:
        """Return full float32 parameters by name, on each rank's device; valid until `step`."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full float32 state, with buffers, on rank 0's CPU; empty elsewhere."""

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the state by file and name on rank 0's CPU; empty elsewhere."""

    def load(self, folder: Path | None) -> None:
        """Restore the files of `snapshot` on any number of ranks; only rank 0 has a folder."""


def read_tensors(
    folder: Path | None, file: str, names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of a checkpoint's file on every rank's CPU; only rank 0 has a folder.

    KeyError unless the file has exactly the tensors `names`, and perhaps `LOSS_SCALE`.
    """
    missing = set(names)
    for name, value in broadcast_tensors(None if folder is None else folder / file):
        if name != LOSS_SCALE:
            missing.remove(name)
        yield name, value
    if missing:
        raise KeyError(f"the checkpoint lacks {sorted(missing)}")


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return persistent buffers by name."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return {name: tensor for name, tensor in state.items() if name not in parameters}


class LossScale:
    """Factor of an fp16 loss.

    A skipped step halves it, `GROWTH_INTERVAL` applied steps in a row double it.
    """

    # The policy of `torch.amp.GradScaler`, which itself needs whole gradients, while ZeRO shards
    # them, and keeps its state on a device.

    def __init__(self, precision: str) -> None:
        self.enabled = precision == "fp16"
        self.value = INITIAL_SCALE if self.enabled else 1.0
        self._applied_steps = 0  # since the last change

    def update(self, applied: bool) -> float | None:
        """Set the scale of the next step; return this step's scale, None without loss scaling."""
        if not self.enabled:
            return None
        scale = self.value
        self._applied_steps = self._applied_steps + 1 if applied else 0
        if not applied:
            self.value = max(1.0, scale / 2)
        elif self._applied_steps == GROWTH_INTERVAL:
            self.value, self._applied_steps = scale * 2, 0
        return scale

    def state(self) -> dict[str, Tensor]:
        """Return scale and applied steps as float64 (2,) by name; empty without loss scaling."""
        state = torch.tensor([self.value, self._applied_steps], dtype=torch.float64)
        return {LOSS_SCALE: state} if self.enabled else {}

    def load(self, state: Tensor) -> None:
        """Restore the vector of `state`, (2,); ignore it without loss scaling."""
        if self.enabled:
            self.value, applied_steps = state.tolist()
            self._applied_steps = int(applied_steps)
