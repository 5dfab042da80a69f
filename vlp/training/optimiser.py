"""AdamW and its parameter groups: by weight decay, and by the scale of the learning rate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlp.config import ConfigError
from vlp.positions.decay import POSITION_PARAMETERS
from vlp.training.config import OptimiserConfig
from vlp.training.engines.base import MOMENTS, STEP

# Beside what position encodings own; matrices of the three encoders have none of these names.
POSITIONS_AND_TOKENS = re.compile(
    r"(^|[._])(pos_embed|position_embeddings?|position\.weight|(cls|dist|mask|reg)_token)"
    r"(_[a-z]+)?([._]|$)"
)


def has_decay(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter.

    None on norms, biases, temperatures (all of them vectors or scalars) and on position tables,
    global biases, and tokens of no patch or word (matrices that are told by their names).
    """
    undecayed = POSITIONS_AND_TOKENS.search(name) or POSITION_PARAMETERS.search(name)
    return parameter.ndim >= 2 and not undecayed


def lr_multiplier(name: str, lr_multipliers: Mapping[str, float]) -> float:
    """The factor of the longest prefix (whole dotted parts) that fits a parameter's name, or 1."""
    fitting = [prefix for prefix in lr_multipliers if _starts_with(name, prefix)]
    return lr_multipliers[max(fitting, key=len)] if fitting else 1.0


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    lr_multipliers: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Trainable parameters in AdamW groups of equal weight decay and learning-rate scale.

    Each group has `params`, `weight_decay` and `lr_scale`, by which `set_learning_rate` multiplies
    the schedule's rate.

    Raises:
        ConfigError: a prefix of `lr_multipliers` fits no trainable parameter.
    """
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    lr_multipliers = lr_multipliers or {}
    for prefix in lr_multipliers:
        if not any(_starts_with(name, prefix) for name, _ in trainable):
            known = sorted({".".join(name.split(".")[:2]) for name, _ in trainable})
            raise ConfigError(
                f"training.optimiser.lr_multipliers: no trainable parameter starts with "
                f"{prefix!r}; there are {', '.join(known)}"
            )
    members: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trainable:
        decay = weight_decay if has_decay(name, parameter) else 0.0
        members.setdefault((decay, lr_multiplier(name, lr_multipliers)), []).append(parameter)
    return [
        {"params": members[decay, scale], "weight_decay": decay, "lr_scale": scale}
        for decay, scale in sorted(members, reverse=True)
    ]


def build_adamw(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimiserConfig
) -> torch.optim.AdamW:
    """PyTorch's AdamW; DeepSpeed's own would be compiled at the first start of every machine.

    Raises:
        ConfigError: a prefix of `config.lr_multipliers` fits nothing.
        ValueError: there is nothing to train.
    """
    groups = parameter_groups(named, config.weight_decay, config.lr_multipliers)
    if not groups:
        raise ValueError("the task has no trainable parameters")
    on_gpu = any(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=on_gpu
    )


def create_moments(optimiser: torch.optim.AdamW, parameters: Iterable[Tensor]) -> None:
    """Zero moments from the start, so that loading a checkpoint need not wait for a first step."""
    for parameter in parameters:
        # PyTorch keeps the count beside the weights when AdamW is fused, else on the CPU.
        place = parameter.device if optimiser.defaults.get("fused") else "cpu"
        optimiser.state[parameter] = {
            STEP: torch.zeros((), dtype=torch.float32, device=place),
            **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
        }


def set_learning_rate(optimiser: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group the schedule's rate times its own scale."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]


def _starts_with(name: str, prefix: str) -> bool:
    """Whether a dotted name is the prefix or lies below it."""
    return f"{name}.".startswith(f"{prefix}.")
