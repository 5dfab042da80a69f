"""Interface between the training loop and the machinery that holds the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vlp.data.stream.batch import Slots
from vlp.io import write_tensors
from vlp.tasks.task import StepOutput

# A checkpoint's files and the names in them, the same for every engine.
WEIGHTS, OPTIMISER = "weights.safetensors", "optimiser.safetensors"
# Name of the state among the optimiser's in a checkpoint.
LOSS_SCALE = "loss_scale"

FIRST_SCALE = 2.0**16
# Applied steps in a row after which the scale doubles.
INTERVAL = 2000


class Update(NamedTuple):
    """Outcome of one optimiser step; the same on every rank.

    `gradient_norm` is the global norm before clipping, inf with a non-finite gradient; then
    `applied` is False, nothing changed and gradients are cleared. Both are 0-d tensors while a
    device still computes. `loss_scale` is the step's, None without loss scaling.
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

    def forward(self, batch: Slots, step: int) -> StepOutput:
        """Run the task on this rank's share of a global batch."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` (scalar); they are averaged over ranks and micro-steps."""

    def step(self, learning_rate: float) -> Update:
        """Clip, apply AdamW once after the last micro-step's `backward`, clear the gradients."""

    def parameters(self) -> dict[str, Tensor]:
        """Return full float32 parameters by name, on each rank's device; valid until `step`."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full float32 state, with buffers, on rank 0's CPU; empty elsewhere."""

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the state by file and name on rank 0's CPU; empty elsewhere."""

    def load(self, folder: Path | None) -> None:
        """Restore the files of `snapshot`, on any number of ranks; only rank 0 has a folder."""


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


class LossScale:
    """Factor of the loss: halved by a non-finite step, doubled after `INTERVAL` others.

    It stays 1 unless `precision` is "fp16".
    """

    # The policy of `torch.amp.GradScaler`, which itself needs whole gradients (ZeRO shards them)
    # and keeps its state on a device.

    def __init__(self, precision: str) -> None:
        self.enabled = precision == "fp16"
        self.value = FIRST_SCALE if self.enabled else 1.0
        self._applied = 0

    def update(self, applied: bool) -> float | None:
        """Count an optimiser step; return its scale, None without loss scaling."""
        if not self.enabled:
            return None
        before = self.value
        self._applied = self._applied + 1 if applied else 0
        if not applied:
            self.value = max(1.0, before / 2)
        elif self._applied == INTERVAL:
            self.value, self._applied = before * 2, 0
        return before

    def state(self) -> dict[str, Tensor]:
        """Return scale and count as one named float64 vector; nothing when it is not enabled."""
        numbers = torch.tensor([self.value, self._applied], dtype=torch.float64)
        return {LOSS_SCALE: numbers} if self.enabled else {}

    def load(self, state: Tensor) -> None:
        """Restore the vector of `state`, (2,); ignored at other precisions."""
        if self.enabled:
            self.value, applied = state.tolist()
            self._applied = int(applied)
