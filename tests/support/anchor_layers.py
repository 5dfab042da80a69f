"""Attention layers with ACE-RPE and random paths, and their outputs and gradients."""

import torch
from torch import nn

from vlp.layers.attention import Attention
from vlp.positions import PositionContext, create_position
from vlp.positions.anchor_field import build_paths


def layer_and_field(grid=(2, 3), words=5, heads=2, channels=4, groups=3, rows=2, **options):
    """An attention whose tables are not zero, and paths that need not be consistent."""
    width = heads * channels
    position = create_position("anchor", width=width, heads=heads, groups=groups, **options)
    for parameter in position.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer = Attention(width, heads, output=False, positions=[position])
    real = torch.rand(rows, words) < 0.7
    path = torch.rand(rows, grid[0] * grid[1], words, groups)
    path = torch.where((path < 0.6) & real[:, None, :, None], 1 + 5 * path, 0.0)
    return layer, build_paths(path, path, real)


def outputs_and_gradients(layer, field, kernel, text_queries=True, wrap=lambda layer: layer):
    """The output, `out`, and gradients by name of states, parameters and paths.

    The last row of a masked text is all padding. kernel: False keeps to the explicit path on a GPU,
    too; text_queries: else image queries, with padded keys; wrap: compiles the layer.
    """
    layer.zero_grad()
    layer.fused = None if kernel else False
    generator = torch.Generator().manual_seed(7)
    rows, patches, words, _ = field.image_path.shape
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
