"""PyTorch's FSDP2 behind the `Engine` protocol: every rank holds a part of each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from vlp import distributed
from vlp.data.stream.batch import Slots
from vlp.tasks.task import StepOutput
from vlp.training.config import LoopConfig
from vlp.training.engines.base import Update
from vlp.training.engines.blocks import block_stacks
from vlp.training.engines.native import NativeEngine


class FsdpEngine(NativeEngine):
    """One task whose parameters, gradients and optimiser state are cut up among all ranks.

    A block's parameters are whole while it computes forward, and from its backward pass to the end
    of that; all others from the forward pass on. Scalars, which cannot be cut, are whole on every
    rank. Blocks of momentum teachers are cut like the student's, so that each rank moves its part.
    """

    unread_steps: ClassVar[bool] = False

    def __init__(self, task: nn.Module, config: LoopConfig) -> None:
        super().__init__(task, config)
        # PyTorch updates lists of tensors at once, which are all sharded or all whole.
        self._adamw.param_groups[:] = [
            {**group, "params": alike}
            for group in self._adamw.param_groups
            for scalar in (False, True)
            if (alike := [p for p in group["params"] if (p.ndim == 0) == scalar])
        ]

    def _spread(self, task: Any) -> Callable[[Slots, int], StepOutput]:
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        halved = self._config.gradient_reduction == "bf16"
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if halved else None)
        how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        teachers: list[nn.Module] = [one.to(self.device) for one in task.teachers()]
        for module in (task, *teachers):
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)
            scalars = {parameter for parameter in module.parameters() if parameter.ndim == 0}
            for block in (block for stack in block_stacks(module) for block in stack):
                fully_shard(block, reshard_after_forward=True, ignored_params=scalars, **how)
            if module is task:  # a teacher is entered beside its call, which would gather the rest
                fully_shard(module, ignored_params=scalars, **how)
        # Both streams run through a cross-modal layer: the call that ends its backward pass first
        # must not take the weights from the other. `step` takes them.
        task.set_reshard_after_backward(False)
        return task

    def step(self, learning_rate: float) -> Update:
        """Average the scalars' gradients, as FSDP does the others'; then as every engine."""
        scalars = [p.grad for p in self._named.values() if p.ndim == 0 and p.grad is not None]
        if scalars:
            means = distributed.global_sum(torch.stack(scalars)) / self.world_size
            torch._foreach_copy_(scalars, list(means.unbind()))
        self._reshard()
        return super().step(learning_rate)

    def _clip_gradients(self, most: float) -> float:
        """Clip; return the global norm, inf where a gradient is not finite."""
        scalar = [p.ndim == 0 for p in self._named.values() if p.grad is not None]
        gradients = self._gradients()
        parts = [part for part, whole in zip(gradients, scalar, strict=True) if not whole]
        scalars = [part for part, whole in zip(gradients, scalar, strict=True) if whole]
        squares = distributed.global_sum(nn.utils.get_total_norm(parts).square())
        norm = (squares + nn.utils.get_total_norm(scalars).to(squares).square()).sqrt()
        torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp(max=1))
        return float(norm) if torch.isfinite(norm) else float("inf")

    def parameters(self) -> dict[str, Tensor]:
        """Return float32 parameters by name, as this rank holds them; valid until `step`."""
        self._reshard()  # a forward pass without a backward pass leaves some whole
        return super().parameters()

    def _reshard(self) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
