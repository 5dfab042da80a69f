"""Distillation in fine-tuning: a momentum copy of the task gives soft targets (ALBEF, section 3.3).

ALBEF's fine-tuning of SNLI-VE, NLVR2 and VQA does so. The copy is of the whole task, heads
included; it starts as the student and computes without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from vlp.compute.full_precision import full_precision
from vlp.objectives.config import MomentumConfig
from vlp.objectives.contrastive.momentum_teacher import Teacher, soft_target_share
from vlp.tasks.downstream.task import Downstream, DownstreamConfig
from vlp.tasks.plain import AUTOCAST
from vlp.tasks.pretraining.teacher import strip_prefix

_PREFIX = "teacher."


class DistillationConfig(MomentumConfig):
    """Momentum teacher of a downstream task."""

    warmup_steps: int | None = Field(
        None,
        ge=0,
        description="alpha rises linearly over these optimiser steps; null: the first epoch",
    )


class DistilledConfig(DownstreamConfig):
    """Configuration of a task that may have a teacher."""

    teacher: DistillationConfig | None = Field(
        None, description="momentum copy of the task that gives soft targets; null: none"
    )


class SoftTarget(NamedTuple):
    """Prediction of a teacher, rows that sum to 1, and its share of the target."""

    soft: Tensor
    alpha: float


class Distilled(Downstream):
    """Base of tasks that a momentum copy of themselves may teach.

    `teacher` lies beside the parameters: a checkpoint has it in the task's extra state.
    """

    config: DistilledConfig
    teacher: Teacher[Any] | None = None
    _warmup_steps = 0

    def teachers(self) -> list[nn.Module]:
        """Return the teacher, if there is one."""
        return [] if self.teacher is None else [self.teacher.module]

    def start_teacher(self, epoch_steps: int) -> None:
        """Copy the task as its teacher, where one is configured.

        Args:
            epoch_steps: optimiser steps of the first epoch.
        """
        if (settings := self.config.teacher) is not None:
            asked = settings.warmup_steps
            self._warmup_steps = epoch_steps if asked is None else asked
            self.teacher = Teacher(self, AUTOCAST.get(self.precision))

    def soft_target(
        self, step: int, device: torch.device, logits: Callable[[Self], Tensor]
    ) -> SoftTarget | None:
        """Return the teacher's softmax at an optimiser step; None without one or in evaluation.

        Args:
            step: from 0.
            device: of the batch.
            logits: computes (..., classes) logits of the batch with a task.
        """
        settings = self.config.teacher
        if self.teacher is None or settings is None or not self.training:
            return None
        with torch.no_grad():
            (found,) = full_precision(logits(self.teacher.to(device).module))
        share = soft_target_share(step, settings.alpha, self._warmup_steps)
        return SoftTarget(found.softmax(-1), share)

    def after_step(
        self, parameters: Callable[[], dict[str, Tensor]], applied: Tensor | None = None
    ) -> None:
        """Move the teacher towards the new student, if `applied` (0-d bool)."""
        if self.teacher is not None and self.config.teacher is not None:
            momentum = self.config.teacher.momentum
            self.teacher.update(parameters(), momentum, dict(self.named_buffers()), applied)

    def extra_state(self) -> dict[str, Tensor]:
        """Return the teacher by name, the same on every rank; empty without one."""
        state = {} if self.teacher is None else self.teacher.state_dict()
        return {f"{_PREFIX}{name}": value for name, value in state.items()}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `extra_state` gave.

        Raises:
            ValueError: there is a state and no teacher.
            RuntimeError: the state is of another task.
        """
        if self.teacher is None:
            super().load_extra_state(state)
        else:
            self.teacher.load_state_dict(strip_prefix(state, _PREFIX))
