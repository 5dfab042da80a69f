"""AdamW and its parameter groups, by weight decay and learning-rate multiplier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlp.config import ConfigError
from vlp.layers.weight_decay import no_weight_decay
from vlp.training.engines.base import MOMENTS, STEP
from vlp.training.engines.optimiser_config import OptimiserConfig


def undecayed(module: nn.Module) -> set[str]:
    """Return the names of parameters without weight decay.

    These are norms, biases and temperatures (vectors and scalars), and what modules declare by
    `no_weight_decay()`: position tables, global position biases, class and distillation tokens.
    """
    vectors = {name for name, parameter in module.named_parameters() if parameter.ndim < 2}
    return vectors | no_weight_decay(module)


def lr_multiplier(name: str, lr_multipliers: Mapping[str, float]) -> float:
    """Return the factor of the longest prefix, in whole dotted parts, of a name; 1 without any."""
    fitting = [prefix for prefix in lr_multipliers if _starts_with(name, prefix)]
    return lr_multipliers[max(fitting, key=len)] if fitting else 1.0


def layer_distances(module: nn.Module) -> dict[str, int]:
    """Collect what `layer_distances()` of a module's encoders says, by name in the module."""
    return {
        f"{place}.{name}".removeprefix("."): distance
        for place, part in module.named_modules()
        if callable(ask := getattr(part, "layer_distances", None))
        for name, distance in ask().items()
    }


def parameter_groups(
    module: nn.Module,
    weight_decay: float,
    lr_multipliers: Mapping[str, float] | None = None,
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Sort a module's trainable parameters into groups of equal weight decay and learning rate.

    Each group has `params`, `weight_decay` and `lr_scale`, by which `set_learning_rate` multiplies
    the schedule's rate.

    Raises:
        ConfigError: a prefix of `lr_multipliers` fits no trainable parameter, or no encoder is
            there for `layer_decay`.
    """
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    lr_multipliers = lr_multipliers or {}
    for prefix in lr_multipliers:
        if not any(_starts_with(name, prefix) for name, _ in trainable):
            known = sorted({".".join(name.split(".")[:2]) for name, _ in trainable})
            raise ConfigError(
                f"training.optimiser.lr_multipliers: no trainable parameter starts with "
                f"{prefix!r}; there are {', '.join(known)}"
            )
    distances = layer_distances(module)
    if layer_decay != 1 and not distances:
        raise ConfigError("training.optimiser.layer_decay is of image-text models; leave it at 1")
    without = undecayed(module)
    members: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trainable:
        decay = 0.0 if name in without else weight_decay
        scale = lr_multiplier(name, lr_multipliers) * layer_decay ** distances.get(name, 0)
        members.setdefault((decay, scale), []).append(parameter)
    return [
        {"params": members[decay, scale], "weight_decay": decay, "lr_scale": scale}
        for decay, scale in sorted(members, reverse=True)
    ]


def build_adamw(module: nn.Module, config: OptimiserConfig) -> torch.optim.AdamW:
    """Make PyTorch's AdamW; DeepSpeed's own would be compiled at the first start of every machine.

    Raises:
        ConfigError: `config.lr_multipliers` or `config.layer_decay` fits nothing.
        ValueError: there is nothing to train.
    """
    groups = parameter_groups(
        module, config.weight_decay, config.lr_multipliers, config.layer_decay
    )
    if not groups:
        raise ValueError("the task has no trainable parameters")
    on_gpu = any(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=on_gpu
    )


def create_moments(optimiser: torch.optim.AdamW, parameters: Iterable[Tensor]) -> None:
    """Create zero moments at once, so that loading a checkpoint need not wait for a first step."""
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
    """Return whether a dotted name is the prefix or lies below it."""
    return f"{name}.".startswith(f"{prefix}.")
