"""What every word finds in every picture: its best patch, less its mean response."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlp.objectives.precision import no_autocast


def word_response(words: Tensor, image_tokens: Tensor, alpha: float) -> Tensor:
    """max_m s_m - alpha * mean_m relu(s_m), with s the dot products of a word and the patches.

    `words` (..., R, D), `image_tokens` (..., B, M, D), of one type -> (..., R, B). The similarities
    (..., R, B, M) are built once and kept for the backward pass.
    """
    return _WordResponse.apply(words, image_tokens, alpha)


class _WordResponse(torch.autograd.Function):
    """Written out because autograd's own way costs twice the time on a CPU.

    It copies the similarities for the maximum, the relu and the mean apiece. Here they become, in
    place, the indicator s > 0, which is all that the gradient needs beside the best patch.
    """

    @staticmethod
    def forward(ctx: Any, words: Tensor, image_tokens: Tensor, alpha: float) -> Tensor:
        pictures, patches = image_tokens.shape[-3:-1]
        with no_autocast(words):
            similarity = words @ image_tokens.flatten(-3, -2).transpose(-1, -2)
        similarity = similarity.unflatten(-1, (pictures, patches))
        best, patch = similarity.max(-1)
        response = best - alpha * similarity.relu_().mean(-1)
        ctx.alpha = alpha
        ctx.save_for_backward(words, image_tokens, similarity.gt_(0), patch)
        return response

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        words, image_tokens, positive, patch = ctx.saved_tensors
        patches = image_tokens.shape[-2]
        gradient = gradient[..., None]
        similarity = positive * (gradient * (-ctx.alpha / patches))
        similarity = similarity.scatter_add_(-1, patch[..., None], gradient).flatten(-2)
        to_words = to_images = None
        with no_autocast(words):
            if ctx.needs_input_grad[0]:
                to_words = similarity @ image_tokens.flatten(-3, -2)
            if ctx.needs_input_grad[1]:
                to_images = (similarity.transpose(-1, -2) @ words).view_as(image_tokens)
        return to_words, to_images, None
