"""Response of every word to every image: its best patch, less its mean response everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlp.compute.full_precision import no_autocast


def word_response(
    words: Tensor, image_tokens: Tensor, valid: Tensor, alpha: float, beta: float
) -> Tensor:
    """Compute max_m (s_bm - beta * mean_b relu(s_bm)) - alpha * mean_m relu(s_bm) of words.

    s_bm are the dot products of the word and patch m of image b; the mean over b runs over valid
    images. `words` (..., R, D), `image_tokens` (..., B, M, D), of one type, `valid` (..., B) bool
    -> (..., R, B). The similarities (..., R, B, M) are built once and kept for the backward pass.
    """
    share = valid.to(words.dtype)
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    return _WordResponse.apply(words, image_tokens, share, alpha, beta)


class _WordResponse(torch.autograd.Function):
    """Written out because autograd's own way costs twice the time on a CPU.

    It copies the similarities for the maximum, the relu and the means apiece. Here they become, in
    place, the indicator s > 0, which is all that the gradient needs beside the best patch.
    """

    @staticmethod
    def forward(
        ctx: Any, words: Tensor, image_tokens: Tensor, share: Tensor, alpha: float, beta: float
    ) -> Tensor:
        images, patches = image_tokens.shape[-3:-1]
        with no_autocast(words):
            similarity = words @ image_tokens.flatten(-3, -2).mT
            similarity = similarity.unflatten(-1, (images, patches))
            answer = similarity
            if beta:
                everywhere = torch.einsum("...rbm,...b->...rm", similarity.relu(), share)
                answer = similarity - beta * everywhere[..., None, :]
        best, patch = answer.max(-1)
        response = best - alpha * similarity.relu_().mean(-1)
        ctx.alpha, ctx.beta = alpha, beta
        ctx.save_for_backward(words, image_tokens, share, similarity.gt_(0), patch)
        return response

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        words, image_tokens, share, positive, patch = ctx.saved_tensors
        patches = image_tokens.shape[-2]
        taken = (gradient * (ctx.alpha / patches))[..., None]
        if ctx.beta:
            chosen = gradient.new_zeros(*gradient.shape[:-1], patches)
            chosen.scatter_add_(-1, patch, gradient)  # over all images, (..., R, M)
            taken = taken + ctx.beta * share[..., None, :, None] * chosen[..., None, :]
        similarity = (positive * taken).neg_()
        similarity = similarity.scatter_add_(-1, patch[..., None], gradient[..., None])
        similarity = similarity.flatten(-2)
        to_words = to_images = None
        with no_autocast(words):
            if ctx.needs_input_grad[0]:
                to_words = similarity @ image_tokens.flatten(-3, -2)
            if ctx.needs_input_grad[1]:
                to_images = (similarity.mT @ words).view_as(image_tokens)
        return to_words, to_images, None, None, None
