"""Collectives that also work in a single process without a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    """Whether more than one rank takes part."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    """Ranks that take part; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def global_sum(x: Tensor) -> Tensor:
    """Sum over all ranks, without gradient; `x` itself is left as it is.

    Every rank must call it, with the same shape.
    """
    total = x.detach().clone()
    if is_distributed():
        dist.all_reduce(total)
    return total


def gather(x: Tensor) -> Tensor:
    """Rows of all ranks in rank order, (rows, ...) -> (world_size * rows, ...), differentiable.

    The gradient of a row is the sum of what all ranks' losses say about it. With losses scaled as
    `vlp.objectives.loss.normalise` does, averaging parameter gradients over ranks (DeepSpeed,
    DDP) then gives the gradient of the global mean. Every rank must call it, with the same shape.
    """
    if not is_distributed():
        return x
    if x.dtype == torch.bool:  # not every backend moves booleans
        return _Gather.apply(x.to(torch.uint8)).to(torch.bool)
    return _Gather.apply(x)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()  # autograd may share the incoming gradient
        dist.all_reduce(total)
        return total.narrow(0, dist.get_rank() * ctx.rows, ctx.rows)
