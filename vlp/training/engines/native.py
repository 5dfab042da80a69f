"""Engines of PyTorch alone: AdamW on parameters that are whole (DDP) or sharded (FSDP2).

Checkpoints have the same form as the DeepSpeed engine's: full-size float32 tensors by name.
Weights that compute in bf16 (`training.weights`) are there as their masters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlp import distributed
from vlp.data.stream.batch import Slots
from vlp.distributed import broadcast_tensors
from vlp.tasks.task import StepOutput
from vlp.training.config import LoopConfig
from vlp.training.engines.base import MOMENTS, OPTIMISER, STEP, WEIGHTS, Update, saved_buffers
from vlp.training.engines.loss_scale import LOSS_SCALE, LossScale
from vlp.training.engines.masters import Masters
from vlp.training.optimiser import build_adamw, create_moments, set_learning_rate


class NativeEngine(ABC):
    """One task on PyTorch's data parallelism; the process group must be up (`distributed.start`).

    Raises:
        ConfigError: the ranks do not divide the batch, or a learning-rate scale fits no parameter.
    """

    unread_steps: ClassVar[bool] = True
    """True if fused AdamW may be told by tensors what to do, as sharded parameters may not."""

    def __init__(self, task: nn.Module, config: LoopConfig) -> None:
        self.rank = distributed.rank()
        self.world_size = distributed.world_size()
        config.require_equal_shares(self.world_size)
        self.device = distributed.default_device()
        self.module = task.to(self.device)
        self._config = config
        self._clip = config.optimiser.clip
        self._micro_steps = config.gradient_accumulation_steps
        self._micro_step = 0
        self._scale = LossScale(config.precision)
        self._masters = Masters()
        if config.weights == "bf16":
            self._masters.take(task)
        self._forward = self._spread(task)
        # Sharding puts other parameters in place of the task's, under the same names.
        trained = {n: p for n, p in task.named_parameters() if p.requires_grad}
        self._named: dict[str, Tensor] = {**trained, **self._masters.held()}
        self._adamw = build_adamw(task, config.optimiser)
        self._masters.replace(self._adamw)
        create_moments(self._adamw, self._named.values())

    @abstractmethod
    def _spread(self, task: nn.Module) -> Callable[[Slots, int], StepOutput]:
        """Give every rank rank 0's weights, whole or its shards; return the forward pass."""

    def forward(self, batch: Slots, step: int) -> StepOutput:
        """Run the task on this rank's share of a global batch."""
        self._micro_step += 1
        return self._forward(batch, step)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar loss, averaged over ranks and micro-steps.

        On this thread: a thread of the GPU's own takes Python's lock anew for each hook and kernel
        written in Python, a tenth of a step's host time.
        """
        with torch.autograd.set_multithreading_enabled(False):
            (loss / self._micro_steps * self._scale.value).backward()

    def step(self, learning_rate: float) -> Update:
        """Clip and apply AdamW once; nothing changes when a gradient is not finite."""
        self._micro_step = 0
        set_learning_rate(self._adamw, learning_rate)
        self._masters.take_gradients()
        update = self._apply()
        self._masters.give_weights()
        return update

    def _apply(self) -> Update:
        if self.unread_steps and self._adamw.defaults["fused"] and not self._scale.enabled:
            return self._step_unread()
        if self._scale.enabled:
            torch._foreach_mul_(self._gradients(), 1 / self._scale.value)
        norm = self._clip_gradients(float("inf") if self._clip is None else self._clip)
        applied = norm != float("inf")
        if applied:
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return Update(applied, norm, self._scale.update(applied))

    def _step_unread(self) -> Update:
        """Clip and apply AdamW where the gradients are finite, without a wait for the device.

        Fused AdamW takes both from tensors, by the attributes that `torch.amp.GradScaler` sets: it
        divides gradients by `grad_scale`, and leaves everything as it is where `found_inf` is 1.
        """
        norm = nn.utils.get_total_norm([p.grad for p in self._named.values() if p.grad is not None])
        applied = norm.isfinite()
        adamw: Any = self._adamw
        adamw.found_inf = applied.logical_not().float()
        if self._clip is not None:
            adamw.grad_scale = ((norm + 1e-6) / self._clip).clamp(min=1)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return Update(applied, norm)

    def _clip_gradients(self, most: float) -> float:
        """Clip; return the global norm, inf where a gradient is not finite."""
        norm = nn.utils.clip_grad_norm_(self._named.values(), most)
        return float(norm) if torch.isfinite(norm) else float("inf")

    def _gradients(self) -> list[Tensor]:
        """Return what this rank holds of the gradients."""
        return [distributed.local(p.grad) for p in self._named.values() if p.grad is not None]

    def parameters(self) -> dict[str, Tensor]:
        """Return float32 parameters by name, as this rank holds them; valid until `step`."""
        weights = {name: p.detach() for name, p in self.module.named_parameters()}
        return weights | self._masters.held()

    def gather(self) -> dict[str, Tensor]:
        """Return full float32 parameters by name, on each rank's device; valid until `step`."""
        return {name: distributed.whole(held) for name, held in self.parameters().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full float32 state, with buffers, on rank 0's CPU; empty elsewhere."""
        return distributed.on_rank_0(self._state())

    def held(self) -> dict[str, dict[str, Tensor]]:
        """Return the state by file and name, as this rank holds it; valid until `step`."""
        return {WEIGHTS: self._state(), OPTIMISER: self._moments() | self._scale.state()}

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the state by file and name on rank 0's CPU; empty elsewhere."""
        return {file: distributed.on_rank_0(tensors) for file, tensors in self.held().items()}

    @torch.no_grad()
    def load(self, folder: Path | None) -> None:
        """Take back the files of `snapshot` on any number of ranks.

        Raises:
            KeyError: a tensor is missing or unknown: the checkpoint is of another model.
        """
        for file, here in ((WEIGHTS, self._state()), (OPTIMISER, self._moments())):
            missing = set(here)
            for name, value in broadcast_tensors(None if folder is None else folder / file):
                if name == LOSS_SCALE:
                    here[name] = value
                    continue
                missing.remove(name)
                distributed.put(here[name], value)
            if missing:
                raise KeyError(f"the checkpoint lacks {sorted(missing)}")
        self.settle(here)

    @torch.no_grad()
    def settle(self, optimiser: Mapping[str, Tensor]) -> None:
        """Take the step count, and the loss scale where there is one, from loaded tensors.

        What was loaded into masters goes to their weights.
        """
        self._masters.give_weights()
        for state in self._adamw.state.values():
            state[STEP].copy_(optimiser[STEP])
        if LOSS_SCALE in optimiser:
            self._scale.load(optimiser[LOSS_SCALE])

    def _state(self) -> dict[str, Tensor]:
        """Return parameters, each by one name, and saved buffers."""
        return {**self.parameters(), **saved_buffers(self.module)}

    def _moments(self) -> dict[str, Tensor]:
        states = {name: self._adamw.state[parameter] for name, parameter in self._named.items()}
        moments = {
            f"{moment}.{name}": state[moment]
            for moment in MOMENTS
            for name, state in states.items()
        }
        # AdamW passes over parameters that a head leaves unused; their count stays behind.
        return moments | {STEP: torch.stack([state[STEP] for state in states.values()]).max()}
