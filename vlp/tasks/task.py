"""Interface of a task for the training loop: a loss per batch, and extra state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vlp.config import Precision
from vlp.objectives.loss import Loss, normalise


class StepOutput(NamedTuple):
    """Result of one forward pass on one rank's share of a global batch."""

    # Scalar to be backpropagated and its named parts, scaled so that their mean over ranks is the
    # mean over the global batch (`vlp.objectives.loss.normalise`).
    loss: Tensor
    losses: dict[str, Tensor]
    # Scalars for the log, averaged over ranks.
    statistics: dict[str, Tensor]


@runtime_checkable
class Task(Protocol):
    """An `nn.Module` with head, losses and extra state.

    Parameters belong to the engine and stay float32. Extra state (momentum teacher, key queue) lies
    outside of the module: the same tensors on every rank.
    """

    def __call__(self, batch: Any, step: int) -> StepOutput:
        """Compute losses of a batch; `step` counts optimiser steps from 0. Autocasts."""

    def after_step(
        self, parameters: Callable[[], dict[str, Tensor]], applied: Tensor | None = None
    ) -> None:
        """Update the extra state after an applied step, on every rank.

        `parameters()` gives the new float32 parameters by name, full size; it is collective under
        ZeRO-3, so a task calls it on all ranks or on no rank. `applied`, a 0-d bool, is passed
        where only the device knows whether the step was applied; nothing may move where it is
        False.
        """

    def after_skip(self) -> None:
        """Drop the values of a step that was not applied; the loop restores its buffers."""

    def extra_state(self) -> dict[str, Tensor]:
        """Return the tensors outside of parameters and buffers that a resumed run needs."""

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of `extra_state`."""

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the public model folder; `state` is the task's full `state_dict` on the CPU."""


# Type of matrix products by precision.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward pass: off for float32, also inside a caller's autocast."""
    return torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)


class PlainTask(nn.Module):
    """Base of tasks without extra state; a subclass has `forward(batch, step)` and `save_model`.

    Args:
        precision: "bf16" and "fp16" run `autocast()` in half precision, "float32" does not.
    """

    config: Any
    # True once `compile_task` has compiled it: its batches then keep their sizes.
    is_compiled = False

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
        """Return the modules that compute in a step: the task itself, and its teachers."""
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
        """Do nothing, as there is no extra state."""

    def teachers(self) -> list[nn.Module]:
        """Return nothing."""
        return []

    def after_skip(self) -> None:
        """Do nothing: nothing was collected."""

    def extra_state(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of `extra_state`; ValueError if it is not empty."""
        if state:
            raise ValueError(f"unknown state {', '.join(sorted(state))}")
