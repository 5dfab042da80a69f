"""Pairwise sigmoid loss (SigLIP, Zhai et al. 2023, arXiv 2303.15343), exchanged in a ring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from vlp.compute.full_precision import full_precision, no_autocast
from vlp.distributed import pass_on, world_size
from vlp.objectives.contrastive.itc import positives
from vlp.objectives.loss import Loss


class LearnedBias(nn.Module):
    """The learned bias of the logits, a scalar; it starts low, as nearly all pairs are negative."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(start))

    def forward(self) -> Tensor:
        """Return the bias, a scalar."""
        return self.bias + 0  # a tensor of its own: sharded engines free parameters


def sigmoid_loss(
    image: Tensor,
    text: Tensor,
    image_ids: Tensor,
    valid: Tensor,
    temperature: Tensor,
    bias: Tensor,
) -> Loss:
    """Tell of each image and text of all ranks whether they belong together (Algorithm 1).

    `image`, `text` (B, d) of unit length, `image_ids` (B,), `valid` (B,) bool; logits are cosines
    divided by `temperature`, plus `bias`. Texts of the same image are positives. Rows with `valid`
    False count nowhere. Counts images, as the paper divides by them.

    Texts travel from rank to rank with the gradients of what was compared with them, so that a rank
    holds the logits of two shares (B, B) at a time, however many ranks there are. Every rank must
    call it with the same shapes. Its gradients hold where all ranks' losses have one factor,
    as after `vlp.objectives.loss.normalise`.
    """
    image, text, scale, bias = full_precision(image, text, 1 / temperature, bias)
    total: Tensor = _Ring.apply(image, text, scale, bias, image_ids, valid)
    return Loss(total, valid.sum())


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        bias: Tensor,
        image_ids: Tensor,
        valid: Tensor,
    ) -> Tensor:
        total, of_scale, of_bias = (torch.zeros_like(bias) for _ in range(3))
        of_image = torch.zeros_like(image)
        passing = [text, torch.zeros_like(text), image_ids, valid.to(torch.uint8)]
        with no_autocast(image):
            for _ in range(world_size()):
                other, of_other, ids, real = passing
                cosines = image @ other.T
                sign = torch.where(positives(image_ids, ids), 1.0, -1.0).to(image.dtype)
                margin = sign * (cosines * scale + bias)
                counted = valid[:, None] & (real > 0)
                total += torch.where(counted, functional.softplus(-margin), 0).sum()
                slope = torch.where(counted, -sign * torch.sigmoid(-margin), 0)
                of_image += scale * (slope @ other)
                of_scale += (slope * cosines).sum()
                of_bias += slope.sum()
                passing = pass_on([other, of_other + scale * (slope.T @ image), ids, real])
        ctx.save_for_backward(of_image, passing[1], of_scale, of_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *(gradients[0] * part for part in ctx.saved_tensors), None, None
