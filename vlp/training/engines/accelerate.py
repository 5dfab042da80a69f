"""Accelerate behind the `Engine` protocol: one CPU or GPU, or several with whole copies.

Checkpoints have the same form as the DeepSpeed engine's: full-size float32 tensors by name.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlp import distributed
from vlp.data.stream.batch import Slots
from vlp.distributed import broadcast_tensors
from vlp.io import write_tensors
from vlp.tasks.task import StepOutput
from vlp.training.config import LoopConfig
from vlp.training.engines.base import MOMENTS, OPTIMISER, STEP, WEIGHTS, Update, saved_buffers
from vlp.training.optimiser import build_adamw, create_moments, set_learning_rate


class AccelerateEngine:
    """One task on Accelerate; the process group must be up (`distributed.start`).

    Raises:
        ConfigError: the ranks do not divide the batch, or a learning-rate scale fits no parameter.
    """

    def __init__(self, task: nn.Module, config: LoopConfig) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        self.rank = distributed.rank()
        self.world_size = distributed.world_size()
        config.require_equal_shares(self.world_size)
        # Heads leave parts of a pretrained model unused (its projections, say), and every rank
        # keeps buffers by itself: the loop puts them back after a skipped step.
        options = DistributedDataParallelKwargs(
            find_unused_parameters=True, broadcast_buffers=False
        )
        accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[options])
        self._accelerator = accelerator
        self.device = torch.device(accelerator.device)
        self.module = task.to(self.device)
        self._clip, self._gradient_accumulation_steps = (
            config.optimiser.clip,
            config.gradient_accumulation_steps,
        )
        self._micro_step = 0
        self._adamw = build_adamw(task, config.optimiser)
        self._named = {n: p for n, p in task.named_parameters() if p.requires_grad}
        self._wrapped: Any = accelerator.prepare_model(task) if self.world_size > 1 else task
        create_moments(self._adamw, self._named.values())

    def forward(self, batch: Slots, step: int) -> StepOutput:
        """Run the task on this rank's share of a global batch."""
        self._micro_step += 1
        last = self._micro_step == self._gradient_accumulation_steps
        # Gradients travel once, with the last micro-step.
        with nullcontext() if last else self._accelerator.no_sync(self._wrapped):
            output: StepOutput = self._wrapped(batch, step)
        return output

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar loss, averaged over ranks and micro-steps."""
        self._accelerator.backward(loss / self._gradient_accumulation_steps)

    def step(self, learning_rate: float) -> Update:
        """Clip and apply AdamW once; nothing changes when a gradient is not finite."""
        self._micro_step = 0
        set_learning_rate(self._adamw, learning_rate)
        most = float("inf") if self._clip is None else self._clip
        norm = torch.nn.utils.clip_grad_norm_(self._named.values(), most)
        applied = bool(torch.isfinite(norm))
        if applied:
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return Update(applied, float(norm) if applied else float("inf"))

    def gather(self) -> dict[str, Tensor]:
        """Return full float32 parameters by name, on each rank's device; valid until `step`."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full float32 state, with buffers, on rank 0's CPU; empty elsewhere."""
        if self.rank:
            return {}
        return {name: value.detach().cpu().clone() for name, value in self._state().items()}

    def save(self, folder: Path | None) -> None:
        """Write `weights.safetensors` and `optimiser.safetensors`.

        Raises:
            OSError: on rank 0 alone.
        """
        if folder is None:
            return
        write_tensors(folder / WEIGHTS, self._state())
        write_tensors(folder / OPTIMISER, self._moments())

    @torch.no_grad()
    def load(self, folder: Path | None) -> None:
        """Take back what `save` wrote on any number of ranks.

        Raises:
            KeyError: a tensor is missing or unknown: the checkpoint is of another model.
        """
        for file, here in ((WEIGHTS, self._state()), (OPTIMISER, self._moments())):
            missing = set(here)
            for name, value in broadcast_tensors(None if folder is None else folder / file):
                missing.remove(name)
                here[name].copy_(value)
            if missing:
                raise KeyError(f"the checkpoint lacks {sorted(missing)}")
        for state in self._adamw.state.values():
            state[STEP].copy_(here[STEP])

    def _state(self) -> dict[str, Tensor]:
        """Return parameters, each by one name, and saved buffers."""
        return {**dict(self.module.named_parameters()), **saved_buffers(self.module)}

    def _moments(self) -> dict[str, Tensor]:
        states = {name: self._adamw.state[parameter] for name, parameter in self._named.items()}
        moments = {
            f"{moment}.{name}": state[moment]
            for moment in MOMENTS
            for name, state in states.items()
        }
        # AdamW passes over parameters that a head leaves unused; their count stays behind.
        return moments | {STEP: torch.stack([state[STEP] for state in states.values()]).max()}
