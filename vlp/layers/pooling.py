"""Pooling: what of an encoder's states the contrastive projection reads."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Pooling = Literal["cls", "mean", "cls+mean"]


def pooled_width(pooling: Pooling, width: int) -> int:
    """Return the channels of `pool_states` for states of `width` channels."""
    return width * len(pooling.split("+"))


def pool_states(states: Tensor, pooling: Pooling, mask: Tensor | None = None) -> Tensor:
    """Pool the states of one side.

    Args:
        states: (B, 1 + M, width), [CLS] first.
        pooling: `cls`, the first state; `mean`, of the tokens; or both, side by side.
        mask: (B, 1 + M) bool, True = a token that the mean counts; None: all but [CLS], as of an
            image's patches.

    Returns:
        (B, width), or (B, 2 width) of both.
    """
    parts = [states[:, 0]] if "cls" in pooling else []
    if "mean" in pooling:
        if mask is None:
            parts.append(states[:, 1:].mean(1))
        else:
            share = mask / mask.sum(1, keepdim=True).clamp(min=1)
            parts.append(torch.einsum("bn,bnc->bc", share.to(states.dtype), states))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
