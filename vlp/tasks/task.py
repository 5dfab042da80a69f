"""Interface of a task for the training loop: a loss per batch, and state beside the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn


class StepOutput(NamedTuple):
    """Result of one forward pass on one rank's share of a global batch.

    loss: scalar to be backpropagated. losses: its named parts. Both are scaled so that their mean
    over ranks is the mean over the global batch (`vlp.objectives.loss.normalise`). statistics:
    scalars for the log, averaged over ranks as they are.
    """

    loss: Tensor
    losses: dict[str, Tensor]
    statistics: dict[str, Tensor]


@runtime_checkable
class Task(Protocol):
    """An `nn.Module` with head, losses and extra state; the loop knows nothing else of it.

    The module's parameters belong to the engine and stay float32. What lives outside of it
    (momentum teacher, key queue) is the extra state: the same tensors on every rank, or sharded.
    """

    def __call__(self, batch: Any, step: int) -> StepOutput:
        """Compute losses of a batch; `step` counts optimiser steps from 0. Autocasts."""

    def after_step(
        self, parameters: Callable[[], dict[str, Tensor]], applied: Tensor | None = None
    ) -> None:
        """Update state beside the parameters after an applied step, on every rank.

        `parameters()` gives the new float32 parameters by name, full size or sharded; it is
        collective under ZeRO-3, so a task calls it on all ranks or on none. `applied` is given
        where only the device knows yet whether the step was applied: a 0-d bool, without which
        nothing may move.
        """

    def teachers(self) -> list[nn.Module]:
        """Return copies beside the parameters, whose blocks an engine may shard like the task's."""

    def after_skip(self) -> None:
        """Replace `after_step` when the step was not finite and nothing was applied.

        What `forward` has collected for `after_step` is to be forgotten; buffers that it changed
        are put back by the loop.
        """

    def extra_state(self) -> dict[str, Tensor]:
        """Return tensors beside parameters and buffers that a resumed run needs, maybe sharded."""

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `extra_state` gave."""

    def save_model(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the public model folder; `state` is the task's full `state_dict` on the CPU."""
