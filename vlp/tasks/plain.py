"""A task without anything beside its parameters: no teacher, no queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from vlp.config import Precision
from vlp.objectives.loss import Loss, normalise
from vlp.tasks.task import StepOutput

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of matrix products by precision."""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward pass: off for float32, also inside a caller's autocast."""
    return torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)


class PlainTask(nn.Module):
    """Base of tasks whose state is their parameters and buffers; see `vlp.tasks.task.Task`.

    A subclass has `forward(batch, step)` and `save_model(folder, state)`.

    Args:
        precision: "bf16" and "fp16" run `autocast()` in half precision, "float32" does not.
    """

    config: Any
    is_compiled = False
    """True once `compile_task` has compiled it: its batches then keep their sizes."""

    def __init__(self, precision: Precision = "float32") -> None:
        super().__init__()
        self.precision = precision

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context that the forward pass runs in."""
        return autocast(device, self.precision)

    @property
    def static_shapes(self) -> bool:
        """Return whether every step of a training has tensors of the same sizes."""
        return False

    def networks(self) -> list[nn.Module]:
        """Return what computes in a step: the task itself, and its teachers."""
        return [self, *self.teachers()]

    def step_output(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float] | None = None,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> StepOutput:
        """Sum losses, normalised by their global counts, with their weights (1 unless named)."""
        normalised = normalise(losses)
        weights = weights or {}
        total = torch.stack([weights.get(n, 1.0) * loss for n, loss in normalised.items()]).sum()
        parts = {name: loss.detach() for name, loss in normalised.items()}
        return StepOutput(total, parts, dict(statistics or {}))

    def after_step(
        self, parameters: Callable[[], dict[str, Tensor]], applied: Tensor | None = None
    ) -> None:
        """Do nothing: there is no state beside the parameters."""

    def teachers(self) -> list[nn.Module]:
        """Return nothing."""
        return []

    def after_skip(self) -> None:
        """Do nothing: nothing was collected."""

    def extra_state(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `extra_state` gave.

        Raises:
            ValueError: it is not nothing.
        """
        if state:
            raise ValueError(f"unknown state {', '.join(sorted(state))}")
