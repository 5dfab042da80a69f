"""Base of all tasks: a loss per batch for the training loop, and extra state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vlp.config import Precision
from vlp.objectives.loss import Loss, normalise


class StepOutput(NamedTuple):
    """Result of one forward pass on one rank's share of a global batch."""

    # Weighted sum of the losses, for the backward pass. Both `loss` and `losses` are scaled so that
    # their mean over ranks is the mean over the global batch (`vlp.objectives.loss.normalise`).
    loss: Tensor
    # Detached scalars by name, without weights.
    losses: dict[str, Tensor]
    # Scalars for the log, which averages them over ranks.
    statistics: dict[str, Tensor]


# Dtype of autocast by precision.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward pass; "float32" turns a caller's autocast off."""
    return torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)


class Task(nn.Module):
    """Base of tasks: a module that computes the losses of a batch.

    A subclass adds `forward(batch, step) -> StepOutput` under `autocast`; `step` counts optimiser
    steps from 0. Parameters stay float32. Extra state lies outside of the module and is equal on
    all ranks: a momentum teacher, a key queue. By default a task has no extra state.

    Args:
        precision: of the forward pass, see `autocast`.
    """

    config: Any
    # Set by `compile_task`. A compiled task must not cut its batches to other shapes.
    is_compiled = False

    def __init__(self, precision: Precision = "float32") -> None:
        super().__init__()
        self.precision = precision

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass."""
        return autocast(device, self.precision)

    @property
    def static_shapes(self) -> bool:
        """Return whether tensors have the same shapes in all steps of a training."""
        return False

    def networks(self) -> list[nn.Module]:
        """Return the modules that run in a step: the task itself and its teachers."""
        return [self, *self.teachers()]

    def step_output(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float] | None = None,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> StepOutput:
        """Normalise losses by their global counts and sum them, with `weights` of 1 by default."""
        means = normalise(losses)
        weights = weights or {}
        total = torch.stack([weights.get(name, 1.0) * mean for name, mean in means.items()]).sum()
        detached = {name: mean.detach() for name, mean in means.items()}
        return StepOutput(total, detached, dict(statistics or {}))

    def after_step(
        self, parameters: Callable[[], dict[str, Tensor]], applied: Tensor | None = None
    ) -> None:
        """Update the extra state after an applied step, on every rank.

        Args:
            parameters: returns the new float32 parameters by name, full size. It is collective
                under ZeRO-3: call it on all ranks or on no rank.
            applied: 0-d bool, where only the device knows whether the step was applied; False must
                leave the extra state unchanged.
        """

    def after_skip(self) -> None:
        """Drop values that the forward pass collected for a step that was not applied."""

    def teachers(self) -> list[nn.Module]:
        """Return the modules of momentum teachers."""
        return []

    def extra_state(self) -> dict[str, Tensor]:
        """Return the tensors outside of parameters and buffers that a resumed run needs."""
        return {}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `extra_state`; ValueError for a tensor that the task lacks."""
        if state:
            raise ValueError(f"unknown state {', '.join(sorted(state))}")

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the public model folder; `state` is the task's full `state_dict` on the CPU."""
        raise NotImplementedError


def strip_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries with a prefix in their name, under the name without it."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
