"""Parameters and FLOPs of one forward pass, part by part, and the additions of ACE-RPE.

A multiply-accumulate is two FLOPs. Only matrix products are counted, as common counters do; of
ACE-RPE every addition, minimum and comparison between similarity and path is counted, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import nn
from typer import Option

from benchmarks import harness
from benchmarks.harness import Figure
from vlp.config import ConfigError
from vlp.models.config import AnchorOptions, ModelConfig
from vlp.models.vlp import VLPModel
from vlp.positions.anchor import patch_window_reach, text_window_reach

# Pixels of an image's side and tokens of a text.
SIZES = ((256, 25), (256, 30), (384, 25), (384, 30))

PAPER_PARAMETERS = {
    "text encoder": "66.6M",
    "image encoder": "43.8M",
    "cross-modal encoder": "53.3M",
    "in all": "163.7M",
}
# The paper states neither image size, text length nor convention: several are computed.
PAPER_FLOPS = "the paper: 115 -> 122 GFLOPs, +6.1 %"


class LayerFlops(NamedTuple):
    """FLOPs of one part."""

    name: str
    # Products of tokens with weights.
    layers: float = 0
    # Products of attention: queries with keys, attention weights with values.
    products: float = 0
    elementwise: float = 0

    @property
    def total(self) -> float:
        """Return the FLOPs of all kinds."""
        return self.layers + self.products + self.elementwise


class Shape(NamedTuple):
    """Tokens of a text, patches of an image (rows, columns), and pairs computed at once."""

    tokens: int
    grid: tuple[int, int]
    pairs: int = 1

    @property
    def patches(self) -> int:
        """Return the number of patches M."""
        return self.grid[0] * self.grid[1]


def base_parts(config: ModelConfig, shape: Shape) -> list[LayerFlops]:
    """Count the FLOPs of a pair by part, without position encodings."""
    text, image, cross = config.text, config.image, config.cross
    width, text_tokens, image_tokens = text.width, shape.tokens, 1 + shape.patches
    text_layer = _layer(width, text.intermediate, text_tokens)
    image_layer = _layer(width, image.intermediate, image_tokens)
    two_streams = cross.layout == "ace"
    has_output = cross.layout == "albef"
    # Both streams run in all layers; tokens include [CLS] and padding.
    streams = [(text_tokens, image_tokens), (image_tokens, text_tokens)][: 2 if two_streams else 1]
    layers = products = 0.0
    for queries, keys in streams:
        self_attention = _layer(width, cross.intermediate, queries)
        layers += self_attention.layers + 2 * width**2 * ((1 + has_output) * queries + 2 * keys)
        products += self_attention.products + _attention(queries, keys, width)
    embedding = 2 * shape.patches * 3 * image.patch_size**2 * width
    projection = 2 * width * config.embed_dim
    return [
        LayerFlops(
            "text encoder",
            text.layers * text_layer.layers + projection,
            text.layers * text_layer.products,
        ),
        LayerFlops(
            "image encoder",
            image.layers * image_layer.layers + embedding + projection,
            image.layers * image_layer.products,
        ),
        LayerFlops("cross-modal encoder", cross.layers * layers, cross.layers * products),
    ]


def token_projections(config: ModelConfig, shape: Shape) -> LayerFlops:
    """Count the token projections of image and text."""
    tokens = shape.tokens + shape.patches
    return LayerFlops("token projections", 2 * tokens * config.text.width * config.embed_dim)


def paper_anchor_parts(config: ModelConfig, shape: Shape) -> list[LayerFlops]:
    """Count ACE-RPE as in the paper: E is built for each table, direction and layer."""
    # E = P W (Eq. 8) has (1 + M) x N x width entries, summed with attention weights (Eq. 12).
    cross, options = config.cross, config.cross.anchor_options
    width, entries = config.text.width, (1 + shape.patches) * shape.tokens
    calls = cross.layers * (2 if cross.layout == "ace" else 1)
    tables = 1 if options.mode == "bias" else len(options.roles)
    parts = [
        LayerFlops(
            "ACE-RPE: E = P W built", calls * tables * 2 * entries * cross.anchor.groups * width
        )
    ]
    if options.mode == "bias":
        parts.append(LayerFlops("ACE-RPE: E W_E", calls * 2 * entries * width))
    elif "value" in options.roles:
        parts.append(LayerFlops("ACE-RPE: sum of a E", calls * 2 * entries * width))
    return parts


def our_anchor_parts(config: ModelConfig, shape: Shape) -> list[LayerFlops]:
    """Count the FLOPs of ACE-RPE in this project for a pair, with similarities and paths."""
    # E is never built, as it is linear: mean(P) and sum_j a_ij P_ij are multiplied by W.
    cross, options = config.cross, config.cross.anchor_options
    width, groups = config.text.width, cross.anchor.groups
    patches, text_tokens = shape.patches, shape.tokens
    channels = config.embed_dim if options.features == "projected" else width
    entries = patches * text_tokens * groups
    parts = [
        # Elementwise: x / |x| per group (square, sum, divide).
        LayerFlops(
            "ACE-RPE: similarity",
            products=2 * patches * text_tokens * channels,
            elementwise=3 * (patches + text_tokens) * channels,
        ),
        LayerFlops(
            "ACE-RPE: distance and path", elementwise=entries * path_steps(shape.grid, options)
        ),
        LayerFlops("ACE-RPE: mean paths", elementwise=2 * entries),
    ]
    two_streams = cross.layout == "ace"
    streams = [(text_tokens, 1 + patches), (1 + patches, text_tokens)][: 2 if two_streams else 1]
    if options.mode == "bias":
        vectors = 2 * groups * width / (cross.heads if options.shared_heads else 1) / shape.pairs
        heads = 1 if options.shared_heads else cross.heads
        bias = sum(2 * queries * keys * groups * heads for queries, keys in streams)
        slopes = len(streams) * vectors
        return [*parts, LayerFlops("ACE-RPE: biases", products=cross.layers * (bias + slopes))]
    tables = path_sums = value_products = 0.0
    for queries, keys in streams:
        for role in options.roles:
            states = queries if role == "query" else keys
            tables += 2 * states * groups * width
        if "value" in options.roles:
            path_sums += 2 * queries * keys * groups * cross.heads
            value_products += 2 * queries * groups * width
    return [
        *parts,
        LayerFlops("ACE-RPE: mean paths by tables", layers=cross.layers * tables),
        LayerFlops("ACE-RPE: sum of a P", products=cross.layers * path_sums),
        LayerFlops("ACE-RPE: ... by tables", layers=cross.layers * value_products),
    ]


def path_steps(grid: tuple[int, int], anchor: AnchorOptions) -> int:
    """Count the operations from a similarity to a path (Eqs 4-7), per entry."""
    text_reach = text_window_reach(anchor.text_window)
    patch_reach = patch_window_reach(anchor.patch_window)
    # Per step: minimum of both sides, addition of the length, minimum with the result.
    over_tokens = 4 if text_reach is None else 3 * text_reach
    if patch_reach is None and anchor.metric != "euclidean":
        over_patches = 8 if anchor.metric == "manhattan" else 12
    else:
        limit = max(grid) if patch_reach is None else patch_reach
        down, right = (min(limit, size - 1) for size in grid)
        over_patches = 3 * right + down * (1 + 3 * right + 2)
    # 4 from similarity to distance (compare, raise, divide, mask), 2 to leave out padding, 2 to
    # mark reachable entries.
    return 4 + 2 + 2 + over_tokens + over_patches


class AddedFlops(NamedTuple):
    """GFLOPs of a pair by one convention, without and with ACE-RPE; `added` in percent."""

    convention: str
    without: float
    with_ace: float
    added: float


def compare(config: ModelConfig, shape: Shape) -> list[AddedFlops]:
    """Count by two readings of the paper's convention, and as this project computes."""
    base = base_parts(config, shape)
    layers = sum(part.layers for part in base)
    ours = [*base, token_projections(config, shape)]
    rows = [
        ("paper, layers with weights (A)", layers, paper_anchor_parts(config, shape)),
        ("paper, all products", _sum(base), paper_anchor_parts(config, shape)),
        ("as ours runs", _sum(ours), our_anchor_parts(config, shape)),
    ]
    return [
        AddedFlops(name, without / 1e9, (without + _sum(parts)) / 1e9, 100 * _sum(parts) / without)
        for name, without, parts in rows
    ]


def parameters(config: ModelConfig) -> dict[str, int]:
    """Count the parameters of each part; ACE-RPE's tables are part of the cross-modal encoder."""
    # On `meta`, weights take no memory.
    with torch.device("meta"):
        model = VLPModel(config)
    tables = [p for name, p in model.cross_encoder.named_parameters() if "table" in name]
    encoders = {
        "text encoder": _count(model.text_encoder),
        "image encoder": _count(model.image_encoder),
        "cross-modal encoder": _count(model.cross_encoder),
    }
    total = sum(encoders.values())
    return encoders | {
        "in all": total,
        "of these, tables of ACE-RPE": sum(table.numel() for table in tables),
        "beside them, token projections": _count(model)
        - total
        - _count(model.match_head)
        - _count(model.temperature),
    }


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _layer(width: int, intermediate: int, tokens: int) -> LayerFlops:
    """Count a layer of self-attention with output projection, and feed-forward."""
    weights = 4 * width**2 + 2 * width * intermediate
    return LayerFlops("", 2 * tokens * weights, _attention(tokens, tokens, width))


def _attention(queries: int, keys: int, width: int) -> int:
    """Count the products of attention over all heads."""
    return 2 * 2 * queries * keys * width


def _sum(parts: Sequence[LayerFlops]) -> float:
    return sum(part.total for part in parts)


def _with_image_size(config: ModelConfig, size: int) -> ModelConfig:
    return config.model_copy(update={"image": config.image.model_copy(update={"image_size": size})})


def _parameter_table(config: ModelConfig) -> str:
    small, large = (parameters(_with_image_size(config, size)) for size in (256, 384))
    rows = [
        [name, f"{small[name]:,}", f"{count:,}", PAPER_PARAMETERS.get(name, "-")]
        for name, count in large.items()
    ]
    return harness.table(["parameters", "256 px", "384 px", "the paper"], rows)


def _part_table(config: ModelConfig, shapes: dict[str, Shape]) -> str:
    columns = []
    for shape in shapes.values():
        column = {}
        for part in base_parts(config, shape):
            column[f"{part.name}, layers"] = part.layers
            column[f"{part.name}, attention"] = part.products
        for part in (token_projections(config, shape), *our_anchor_parts(config, shape)):
            column[part.name] = part.total
        columns.append(column)
    rows = [[name, *(f"{column[name] / 1e9:.3f}" for column in columns)] for name in columns[0]]
    return harness.table(["GFLOPs of a pair, as ours runs", *shapes], rows)


def _comparison_table(config: ModelConfig, shapes: dict[str, Shape]) -> str:
    rows = [
        [row.convention, name, f"{row.without:.2f}", f"{row.with_ace:.2f}", f"{row.added:.2f}%"]
        for name, shape in shapes.items()
        for row in compare(config, shape)
    ]
    head = ["convention", "image, text", "none", "ACE-RPE", "added"]
    return f"{harness.table(head, rows)}\n{PAPER_FLOPS}"


def flops(
    config: Annotated[
        Path | None, Option(metavar="FILE", help="a pretraining (default: the paper's model)")
    ] = None,
    overrides: harness.Overrides = None,
) -> None:
    """Count parameters and FLOPs of a forward pass by part, and the share that ACE-RPE adds."""
    if overrides and config is None:
        raise ConfigError("overrides need --config")
    model = harness.load_pretraining(config, overrides).model if config else ModelConfig()
    shapes = {
        f"{size} px, {tokens}": Shape(tokens, _with_image_size(model, size).image.grid)
        for size, tokens in SIZES
    }
    print(_parameter_table(model), end="\n\n")
    print(_part_table(model, shapes), end="\n\n")
    print(_comparison_table(model, shapes), end="\n\n")
    figures = [
        Figure("flops/384px/parameters", parameters(_with_image_size(model, 384))["in all"], "")
    ]
    for (size, tokens), shape in zip(SIZES, shapes.values()):
        paper, all_products, ours = compare(model, shape)
        name = f"flops/{size}px/{tokens}tokens"
        figures.append(Figure(f"{name}/added", ours.added, "%"))
        figures.append(Figure(f"{name}/added_paper_convention_layers", paper.added, "%"))
        figures.append(Figure(f"{name}/added_paper_convention_all", all_products.added, "%"))
    harness.print_figures(figures, torch.device("cpu"))


COMMANDS = (flops,)
