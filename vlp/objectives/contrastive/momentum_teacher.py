"""Momentum teacher: a slow float32 copy of the student, outside the optimised parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from vlp.compute.half_weights import RoundedWeights, half_weights
from vlp.distributed import local, sharded_like, whole

Student = TypeVar("Student", bound=nn.Module)


class Teacher(Generic[Student]):
    """Exponential average of a module's weights (MoCo; ALBEF, section 3.3).

    Not an `nn.Module`: a holder that keeps one as an attribute does not register its weights, so
    neither the optimiser nor DeepSpeed nor `state_dict()` of the holder sees them. Weights are
    float32 whatever the student computes in: a bfloat16 average with momentum 0.995 never moves.
    Call it under `torch.no_grad()` through `module`.

    Args:
        student: what is copied.
        products: type in which autocast takes weights of linear and convolutional layers. From the
            first `to` on `module` holds them in it, unless they are sharded, and the float32 ones
            are beside it: autocast would cast them anew in each call.
    """

    def __init__(self, student: Student, products: torch.dtype | None = None) -> None:
        self.module: Student = copy.deepcopy(student).float().eval().requires_grad_(False)
        self._products = products
        self._rounded = RoundedWeights()
        self._device: torch.device | None = None

    @torch.no_grad()
    def to(self, device: torch.device | str) -> Teacher[Student]:
        """Move the weights to `device`."""
        device = torch.device(device)
        if device != self._device:  # else every step walks the modules
            self.module.to(device)
            self._device = device
            self._rounded.to(device)
            if self._products and not self._rounded.held():
                weights = half_weights(self.module).items()
                unsharded = {name: weight for name, weight in weights if local(weight) is weight}
                self._rounded.keep(unsharded, self._products)
        return self

    @torch.no_grad()
    def update(
        self,
        named_parameters: Mapping[str, Tensor],
        momentum: float,
        named_buffers: Mapping[str, Tensor] | None = None,
        applied: Tensor | None = None,
    ) -> None:
        """Move every weight by 1 - momentum towards the student's.

        `named_parameters` holds full-size tensors by the names they have in the student (under
        ZeRO-3 the engine gathers them), or sharded ones: where the teacher is sharded alike, each
        rank moves its part. Further names are allowed, other heads' for example. `named_buffers`
        are copied, not averaged. `applied`, 0-d bool on the device of the weights: they stay as
        they are where it is False.

        Raises:
            KeyError: a weight of the teacher is not among the names.
            ValueError: a weight has another shape, as an ungathered shard has.
        """
        teacher = {**dict(self.module.named_parameters()), **self._rounded.held()}
        _check(teacher, named_parameters)
        weights, student = [], []
        for name, weight in teacher.items():
            new = named_parameters[name].detach()
            part = local(weight)
            weights.append(part)
            student.append((whole(new) if part is weight else local(new)).to(part))
        if applied is None:
            torch._foreach_lerp_(weights, student, 1 - momentum)
        else:
            moves = torch._foreach_sub(student, weights)
            torch._foreach_mul_(moves, applied * (1 - momentum))
            torch._foreach_add_(weights, moves)
        self._rounded.give_weights()
        if named_buffers is not None:
            for name, buffer in self.module.named_buffers():
                if name in named_buffers:
                    buffer.copy_(named_buffers[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and buffers by name, sharded ones as they are, for the checkpoint."""
        return {**self.module.state_dict(), **self._rounded.held()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave; missing or unknown names are errors."""
        held = self.module.state_dict()
        self.module.load_state_dict({n: sharded_like(v, held.get(n)) for n, v in state.items()})
        for name, master in self._rounded.held().items():
            master.copy_(state[name])


def _check(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor]) -> None:
    missing = [name for name in teacher if name not in student]
    if missing:
        raise KeyError(
            f"the student has no {', '.join(missing[:3])} ({len(missing)} of {len(teacher)} "
            "teacher weights are missing)"
        )
    for name, weight in teacher.items():
        if weight.shape != student[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(student[name].shape)} in the student and "
                f"{tuple(weight.shape)} in the teacher: pass full-size (gathered) weights"
            )


def soft_target_share(step: int, alpha: float, warmup_steps: int) -> float:
    """Return the soft target's share at an optimiser step: linear from 0 to `alpha`."""
    return alpha * min(1.0, step / warmup_steps) if warmup_steps > 0 else alpha
