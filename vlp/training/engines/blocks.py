"""The repeated blocks of a task, and recomputation of their activations in the backward pass."""

from __future__ import annotations

import functools
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from vlp.config import ConfigError
from vlp.positions import PositionEncoding


def block_stacks(module: nn.Module) -> list[list[nn.Module]]:
    """Collect the innermost lists of blocks, in the order of the modules.

    A block is one of several modules of one class with two linear layers or more, as the layers of
    our encoders and of those of timm and transformers are.
    """
    within = [stack for child in module.children() for stack in block_stacks(child)]
    if within or not isinstance(module, nn.ModuleList | nn.Sequential):
        return within
    blocks = list(module)
    alike = len({type(block) for block in blocks}) == 1
    return [blocks] if alike and all(_is_block(block) for block in blocks) else []


def _is_block(module: nn.Module) -> bool:
    parts = list(module.modules())
    linear = sum(isinstance(part, nn.Linear) for part in parts)
    return linear > 1 and not isinstance(module, PositionEncoding)


def checkpoint_activations(module: nn.Module, blocks: Literal["none", "blocks"] | int) -> None:
    """Recompute blocks in the backward pass, so that the forward pass keeps their inputs alone.

    Dropout is the same both times, and losses and gradients keep every bit (Chen et al. 2016,
    arXiv 1604.06174).

    Args:
        module: a task.
        blocks: "none", all "blocks", or the number of the lowest of every encoder.
    """
    if blocks == "none":
        return
    stacks = block_stacks(module)
    chosen = [b for stack in stacks for b in (stack if blocks == "blocks" else stack[:blocks])]
    if not chosen:
        raise ConfigError("training.activation_checkpointing: this task has no transformer blocks")
    for block in chosen:
        if any(isinstance(part, _BatchNorm) for part in block.modules()):
            raise ConfigError(
                "training.activation_checkpointing: a batch norm would count every batch twice"
            )
        # Not the call itself: hooks that gather a block's weights stay outside of it.
        block.forward = functools.wraps(block.forward)(
            functools.partial(checkpoint, block.forward, use_reentrant=False)
        )
