"""PyTorch's DistributedDataParallel as an `Engine`: each rank has the whole state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from vlp import distributed
from vlp.data.stream.batch import RankBatch
from vlp.tasks.task import StepOutput
from vlp.training.config import TrainingConfig
from vlp.training.engines.engine import (
    LOSS_SCALE,
    OPTIMISER,
    WEIGHTS,
    LossScale,
    Update,
    read_tensors,
    saved_buffers,
)
from vlp.training.optimiser import MOMENTS, STEP, build_adamw, create_moments, set_learning_rate


class DdpEngine:
    """DDP of one task; a single rank runs the task itself and needs no process group."""

    def __init__(self, task: nn.Module, config: TrainingConfig) -> None:
        self.rank = distributed.rank()
        self.world_size = distributed.world_size()
        self.device = distributed.default_device()
        self.module = task.to(self.device)
        self._clip = config.optimiser.clip
        self._micro_steps = config.gradient_accumulation_steps
        self._micro_step = 0  # of the current optimiser step, from 1
        self._scale = LossScale(config.precision)
        self._forward = self._wrap(task, reduce_in_bf16=config.engine == "ddp-bf16")
        self._trainable = {n: p for n, p in task.named_parameters() if p.requires_grad}
        self._adamw = build_adamw(task, config.optimiser)
        create_moments(self._adamw, self._trainable.values())

    def _wrap(
        self, task: nn.Module, reduce_in_bf16: bool
    ) -> Callable[[RankBatch, int], StepOutput]:
        """Wrap the task by DDP, which copies rank 0's weights; return its forward pass."""
        if self.world_size == 1:
            return task
        ddp = DistributedDataParallel(
            task,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            # A head may leave parts of a pretrained model unused, such as its projections.
            find_unused_parameters=True,
            # The loop restores each rank's buffers after a skipped step.
            broadcast_buffers=False,
        )
        if reduce_in_bf16:
            ddp.register_comm_hook(None, bf16_compress_hook)

        def forward(batch: RankBatch, step: int) -> StepOutput:
            # Gradients are reduced only in the backward pass of the last micro-step.
            is_last = self._micro_step == self._micro_steps
            with nullcontext() if is_last else ddp.no_sync():
                return ddp(batch, step)

        return forward

    def forward(self, batch: RankBatch, step: int) -> StepOutput:
        """Run the task on this rank's share of a global batch."""
        self._micro_step += 1
        return self._forward(batch, step)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar loss, averaged over ranks and micro-steps."""
        # On this thread, as autograd's thread for the GPU acquires the GIL for each Python hook and
        # kernel: a tenth of a step's host time.
        with torch.autograd.set_multithreading_enabled(False):
            (loss / self._micro_steps * self._scale.value).backward()

    def step(self, learning_rate: float) -> Update:
        """Clip gradients, apply AdamW unless a gradient is not finite, and clear the gradients."""
        self._micro_step = 0
        set_learning_rate(self._adamw, learning_rate)
        if self._adamw.defaults["fused"] and not self._scale.enabled:
            return self._step_on_device()
        if self._scale.enabled:
            torch._foreach_mul_(self._gradients(), 1 / self._scale.value)
        max_norm = float("inf") if self._clip is None else self._clip  # inf: compute the norm only
        norm = nn.utils.clip_grad_norm_(self._trainable.values(), max_norm)
        applied = bool(torch.isfinite(norm))
        if applied:
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return Update(
            applied, float(norm) if applied else float("inf"), self._scale.update(applied)
        )

    def _step_on_device(self) -> Update:
        """Do what `step` does with fused AdamW, which skips a step without waiting for the GPU."""
        norm = nn.utils.get_total_norm(self._gradients())
        applied = norm.isfinite()
        # Fused AdamW reads the attributes that `torch.amp.GradScaler` sets: it divides gradients by
        # `grad_scale` (here the divisor of `clip_grad_norm_`), and skips the update if `found_inf`
        # is 1.
        adamw: Any = self._adamw
        adamw.found_inf = applied.logical_not().float()
        if self._clip is not None:
            adamw.grad_scale = ((norm + 1e-6) / self._clip).clamp(min=1)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return Update(applied, norm)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trainable.values() if p.grad is not None]

    def parameters(self) -> dict[str, Tensor]:
        """Return full float32 parameters by name, on each rank's device; valid until `step`."""
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full float32 state, with buffers, on rank 0's CPU; empty elsewhere."""
        return distributed.rank_0_copies(self._state())

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the state by file and name on rank 0's CPU; empty elsewhere."""
        optimiser = self._moments() | self._scale.state()
        return {WEIGHTS: self.state_dict(), OPTIMISER: distributed.rank_0_copies(optimiser)}

    @torch.no_grad()
    def load(self, folder: Path | None) -> None:
        """Restore the files of `snapshot` on any number of ranks; KeyError for another model."""
        # The DeepSpeed engine has the same files: full-size float32 tensors by name.
        moments = self._moments()
        for file, tensors in ((WEIGHTS, self._state()), (OPTIMISER, moments)):
            for name, value in read_tensors(folder, file, tensors):
                if name == LOSS_SCALE:
                    self._scale.load(value)
                else:
                    tensors[name].copy_(value)
        for state in self._adamw.state.values():
            state[STEP].copy_(moments[STEP])  # which is a copy, unlike the other `moments`

    def _state(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by name; tied weights once."""
        return {**self.parameters(), **saved_buffers(self.module)}

    def _moments(self) -> dict[str, Tensor]:
        """Return AdamW's moments as `MOMENT.PARAMETER`, and a copy of its step count."""
        states = {name: self._adamw.state[parameter] for name, parameter in self._trainable.items()}
        moments = {
            f"{moment}.{name}": state[moment]
            for moment in MOMENTS
            for name, state in states.items()
        }
        # AdamW skips parameters without a gradient, whose own step count is then smaller.
        return moments | {STEP: torch.stack([state[STEP] for state in states.values()]).max()}
