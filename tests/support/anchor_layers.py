"""Attention layers with ACE-RPE and random paths, and their outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vlp.layers.attention import Attention
from vlp.positions import PositionContext, create_position
from vlp.positions.anchor_field import AnchorField, with_prefix


def layer_and_field(
    grid: tuple[int, int] = (2, 3),
    words: int = 5,
    heads: int = 2,
    channels: int = 4,
    groups: int = 3,
    rows: int = 2,
    **options: Any,
) -> tuple[Attention, AnchorField]:
    """Make an attention whose tables are not zero, and paths that need not be consistent.

    Args:
        grid: of patches.
        words: of a text, of which some are padding.
        heads: attention heads.
        channels: of a head.
        groups: of anchors.
        rows: pairs.
        options: of position encoding `anchor`.
    """
    width = heads * channels
    position = create_position("anchor", width=width, heads=heads, groups=groups, **options)
    for parameter in position.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer = Attention(width, heads, output=False, positions=[position])
    real = torch.rand(rows, words) < 0.7
    path = torch.rand(rows, grid[0] * grid[1], words, groups)
    path = torch.where((path < 0.6) & real[:, None, :, None], 1 + 5 * path, 0.0)
    return layer, with_prefix(path, path, real)


def outputs_and_gradients(
    layer: Attention,
    field: AnchorField,
    kernel: bool,
    text_queries: bool = True,
    wrap: Callable[[Attention], Callable[..., Tensor]] = lambda layer: layer,
) -> dict[str, Tensor]:
    """Run a layer where its weights are; the last row of a masked text is all padding.

    Args:
        layer: of `layer_and_field`.
        field: its paths; those that require a gradient must be read in this direction.
        kernel: False keeps to the explicit path on a GPU, too.
        text_queries: text asks and image answers, else the other way, with padded keys.
        wrap: what compiles the layer, if anything.

    Returns:
        The output, `out`, and gradients by name of states, parameters and paths.
    """
    layer.zero_grad()
    layer.fused = None if kernel else False
    generator = torch.Generator().manual_seed(7)
    rows, patches, words, _ = field.path.shape
    text, image = (
        torch.randn(rows, tokens, layer.query.in_features, generator=generator)
        .to(layer.query.weight)
        .requires_grad_()
        for tokens in (words, patches)
    )
    mask = torch.rand(rows, words, generator=generator) < 0.6
    mask[-1] = False
    states, other = (text, image) if text_queries else (image, text)
    context = PositionContext(anchors=field, text_queries=text_queries)
    out = wrap(layer)(states, other, None if text_queries else mask.to(text.device), context)
    weight = torch.randn(out.shape, generator=generator).to(out)
    leaves = {"text": text, "image": image} | dict(layer.named_parameters())
    del leaves["key.bias"]  # weights do not depend on it: its gradient is rounding alone
    leaves |= {name: x for name, x in field._asdict().items() if x.is_leaf and x.requires_grad}
    gradients = torch.autograd.grad((out * weight).sum(), [*leaves.values()])
    return {"out": out.detach()} | dict(zip(leaves, gradients))
