"""AdamW's parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vlp.config import Config, ConfigError
from vlp.layers.blocks import no_weight_decay

# Names in AdamW's state and in checkpoints.
MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimiserConfig(Config):
    """AdamW with a cosine schedule; steps are optimiser steps."""

    learning_rate: float = Field(1e-4, gt=0, description="peak, at the end of the warm-up")
    final_learning_rate: float = Field(1e-6, ge=0, description="at the end of the cosine schedule")
    warmup_steps: int | None = Field(
        None,
        ge=0,
        description="steps of linear warm-up; null: 1000, or a tenth of the run where that is less",
    )
    weight_decay: float = Field(
        0.02, ge=0, description="decoupled weight decay of AdamW; biases and norms are exempt"
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), description="decay rates of AdamW's first and second moments"
    )
    epsilon: float = Field(1e-8, gt=0, description="added to AdamW's denominator")
    clip: float | None = Field(
        1.0, gt=0, description="maximum global gradient norm; null: no clipping"
    )
    lr_multipliers: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="learning-rate factors by prefix of parameter names, as "
        "`model.text_encoder: 0.1`; the longest matching prefix counts",
    )

    @model_validator(mode="after")
    def _check_rates(self) -> OptimiserConfig:
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate:g} is above the peak, "
                f"learning_rate {self.learning_rate:g}"
            )
        return self

    def resolve_warmup(self, total_steps: int) -> int:
        """Return the warm-up steps of a run with `total_steps` steps."""
        return min(1000, total_steps // 10) if self.warmup_steps is None else self.warmup_steps

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Return the learning rate of optimiser step `step`, counted from 0."""
        final, warmup_steps = self.final_learning_rate, self.resolve_warmup(total_steps)
        return cosine_schedule(step, total_steps, self.learning_rate, final, warmup_steps)

    def warmup_warning(self, total_steps: int) -> str:
        """Return a warning for a run that ends within its warm-up; empty for others."""
        warmup_steps = self.resolve_warmup(total_steps)
        if total_steps > warmup_steps:
            return ""
        return (
            f"warning: training.optimiser.warmup_steps {warmup_steps} is not over when the run "
            f"ends, after {total_steps} steps: its learning rate only rises"
        )


def exempt_from_decay(module: nn.Module) -> set[str]:
    """Return the names of parameters that are exempt from weight decay."""
    # Norms, biases and temperatures have fewer than 2 dimensions; `no_weight_decay()` of modules
    # names position tables, global position biases, class and distillation tokens.
    names = {name for name, parameter in module.named_parameters() if parameter.ndim < 2}
    return names | no_weight_decay(module)


def lr_multiplier(name: str, lr_multipliers: Mapping[str, float]) -> float:
    """Return the factor of the longest dotted prefix that a parameter's name has, else 1."""
    matches = [prefix for prefix in lr_multipliers if _starts_with(name, prefix)]
    return lr_multipliers[max(matches, key=len)] if matches else 1.0


def parameter_groups(
    module: nn.Module, weight_decay: float, lr_multipliers: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Group trainable parameters by weight decay and learning-rate factor.

    Groups have `params`, `weight_decay` and `lr_scale`, the factor that `set_learning_rate` reads.
    """
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for prefix in lr_multipliers:
        if not any(_starts_with(name, prefix) for name, _ in trainable):
            prefixes = sorted({".".join(name.split(".")[:2]) for name, _ in trainable})
            raise ConfigError(
                f"training.optimiser.lr_multipliers: no trainable parameter starts with "
                f"{prefix!r}; there are {', '.join(prefixes)}"
            )
    no_decay = exempt_from_decay(module)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trainable:
        decay = 0.0 if name in no_decay else weight_decay
        scale = lr_multiplier(name, lr_multipliers)
        groups.setdefault((decay, scale), []).append(parameter)
    return [
        {"params": groups[decay, scale], "weight_decay": decay, "lr_scale": scale}
        for decay, scale in sorted(groups, reverse=True)
    ]


def build_adamw(module: nn.Module, config: OptimiserConfig) -> torch.optim.AdamW:
    """Create PyTorch's AdamW of a module's trainable parameters; fused on a GPU."""
    # Not DeepSpeed's AdamW, which every machine compiles at its first start.
    groups = parameter_groups(module, config.weight_decay, config.lr_multipliers)
    if not groups:
        raise ValueError("the task has no trainable parameters")
    on_gpu = any(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=on_gpu
    )


def create_moments(optimiser: torch.optim.AdamW, parameters: Iterable[Tensor]) -> None:
    """Create zero moments, so that a checkpoint can be loaded before the first step."""
    for parameter in parameters:
        # Fused AdamW counts steps on the parameter's device, other forms on the CPU.
        device = parameter.device if optimiser.defaults.get("fused") else "cpu"
        optimiser.state[parameter] = {
            STEP: torch.zeros((), dtype=torch.float32, device=device),
            **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
        }


def set_learning_rate(optimiser: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set every group's learning rate to `learning_rate` times its `lr_scale`."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]


def _starts_with(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


def cosine_schedule(
    step: int, total_steps: int, peak: float, final: float, warmup_steps: int
) -> float:
    """Return the learning rate of a linear warm-up to `peak` and half a cosine down to `final`.

    `step` counts from 0: the warm-up starts at `peak / warmup_steps`. Steps from `total_steps - 1`
    on have `final`, unless the warm-up has `total_steps - 1` steps or more.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_steps = max(total_steps - 1 - warmup_steps, 1)
    progress = min((step - warmup_steps) / decay_steps, 1.0)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
