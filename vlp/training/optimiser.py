"""AdamW and its two parameter groups: with weight decay and without."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from vlp.training.config import OptimiserConfig

# Position tables of every kind carry one of these names; matrices of the three encoders do not.
POSITION_TABLES = re.compile(
    r"(^|[._])(pos_embed|position_embeddings?|position\.weight|cls_token|mask_token|tables?)"
    r"(_[a-z]+)?([._]|$)"
)


def has_decay(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter.

    None on norms, biases, temperatures (all of them vectors or scalars) and on position tables,
    class and mask tokens (matrices that are told by their names).
    """
    return parameter.ndim >= 2 and not POSITION_TABLES.search(name)


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, object]]:
    """Trainable parameters in two AdamW groups; a group without members is left out."""
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    groups: list[dict[str, object]] = []
    for decays in (True, False):
        members = [
            parameter for name, parameter in trainable if has_decay(name, parameter) == decays
        ]
        if members:
            groups.append({"params": members, "weight_decay": weight_decay if decays else 0.0})
    return groups


def build_adamw(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimiserConfig
) -> torch.optim.AdamW:
    """PyTorch's AdamW; DeepSpeed's own would be compiled at the first start of every machine."""
    groups = parameter_groups(named, config.weight_decay)
    if not groups:
        raise ValueError("the task has no trainable parameters")
    on_gpu = any(p.is_cuda for p in _members(groups))
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=on_gpu
    )


def _members(groups: list[dict[str, object]]) -> Iterator[nn.Parameter]:
    for group in groups:
        yield from group["params"]  # type: ignore[misc]
