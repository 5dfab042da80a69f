"""Grad-CAM maps of cross-attention from words to patches, as in ALBEF."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.work_sharding import evaluating
from vlp.layers.attention import Attention
from vlp.layers.blocks import CrossLayer
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.vlp import VLPModel

# A map changes its layer's attention for a while: one map at a time.
_HOOK_LOCK = threading.Lock()


def grad_cam(
    model: VLPModel, image: ImageFeatures, text: TextFeatures, layer: int | None = None
) -> Tensor:
    """Compute Grad-CAM maps of a cross-attention layer for B aligned pairs: (B, N, rows, columns).

    Mean over heads of relu(dy/dA) * A (Selvaraju et al. 2017), without the column of the image's
    [CLS]. A are the probabilities (heads, queries, keys) of the text-to-image cross-attention, y
    the match log-odds (difference of both ITM logits). Maps are float32 or float64, at least 0; row
    0 ([CLS]) is the map of the whole text, and rows of padding are 0. In the last layer only the
    row of [CLS] is not 0.

    layer: cross-modal layer from 0, negative from the end; None: the middle layer. Modes, hooks and
    gradients of the model are restored.
    """
    number = layer_number(model, layer)
    grid = model.config.image.grid
    if len(image.states) != len(text.states):
        raise ValueError(
            f"{len(image.states)} images and {len(text.states)} texts are not aligned pairs"
        )
    patches = image.states.shape[1] - 1
    if patches != grid[0] * grid[1]:
        raise ValueError(f"{patches} patches do not fill the model's grid of {grid[0]} x {grid[1]}")
    cross_layer = model.cross_encoder.layers[number]
    assert isinstance(cross_layer, CrossLayer)
    with (
        _HOOK_LOCK,
        evaluating(model, image.states.device),
        _text_probabilities(cross_layer.cross_attention) as leaves,
        torch.enable_grad(),
    ):
        log_odds = model.match(image, text)
        (attention,) = leaves
        # Pairs are independent: the gradient of the sum holds the gradient of each pair.
        (gradient,) = torch.autograd.grad(log_odds.sum(), attention)
    # bf16 would round the products. Maps stay unscaled, so that words of a pair compare.
    dtype = torch.promote_types(attention.dtype, torch.float32)
    maps = (gradient.to(dtype).relu() * attention.detach().to(dtype)).mean(1)[..., 1:]
    return maps.unflatten(-1, grid) * text.attention_mask[..., None, None]


def layer_number(model: VLPModel, layer: int | None = None) -> int:
    """Return a cross-modal layer's index from 0; `layer` as in `grad_cam`."""
    count = len(model.cross_encoder.layers)
    if count == 0:
        raise ValueError("the model has no cross-modal layer, which Grad-CAM needs")
    # Of six layers the third, as in ALBEF.
    if layer is None:
        return (count - 1) // 2
    if not -count <= layer < count:
        raise ValueError(
            f"there is no cross-modal layer {layer}: the model has {count}, 0 to {count - 1}"
        )
    return layer % count


@contextmanager
def _text_probabilities(attention: Attention) -> Iterator[list[Tensor]]:
    """Collect the text stream's attention probabilities as leaves that require gradients."""
    # A leaf cuts the graph: only later layers are differentiated, even with frozen parameters.
    # Calls of other threads are left alone.
    thread = threading.get_ident()
    leaves: list[Tensor] = []
    is_text_stream = False

    def note_stream(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal is_text_stream
        if threading.get_ident() == thread:
            is_text_stream = kwargs["context"].text_queries

    def detach(_: nn.Module, __: tuple[Tensor, ...], probabilities: Tensor) -> Tensor | None:
        if not is_text_stream or threading.get_ident() != thread:
            return None
        leaves.append(probabilities.detach().requires_grad_())
        return leaves[-1]

    # Fused attention does not compute probabilities.
    fused = attention.fused
    hooks = [
        attention.register_forward_pre_hook(note_stream, with_kwargs=True),
        attention.probabilities.register_forward_hook(detach),
    ]
    attention.fused = False
    try:
        yield leaves
    finally:
        attention.fused = fused
        for hook in hooks:
            hook.remove()
