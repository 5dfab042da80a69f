"""Facts about one encoding, and its map over a grid: `vlp positions show`, `vlp positions list`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vlp.config import ConfigError
from vlp.positions import (
    CROSS_MODAL,
    PositionContext,
    PositionEncoding,
    create_fitting_position,
    describe_options,
    list_positions,
    position_class,
    position_options,
)
from vlp.positions.options import SIZES

WIDTH, HEADS = 64, 2
# Random contents over which logits are averaged.
NUM_CONTENTS = 64
# Initial values of tables are smaller, except for constants that options set.
MAX_INITIAL = 0.1
CONTENT_BIASES = ("cope", "sape")
HOOKS = {
    "tokens": "on the tokens, once at the input",
    "inputs": "on what enters the projections of each layer",
    "rotate": "on queries and keys of each layer",
    "bias": "on the logits of each layer",
    "value": "on the output of attention of each layer",
}


# Descriptions of encodings that share a class.
VARIANTS = {
    "irpe-cross": "a bucket of row offsets plus one of column offsets; ",
    "irpe-euclidean": "buckets of Euclidean distances; ",
    "irpe-product": "a bucket for each pair of row and column offsets; ",
    "irpe-quantization": "buckets of quantised Euclidean distances; ",
    "sine-1d": "of the raster order; ",
    "sine-2d": "of row and column; ",
    "sine-4d": "of the edges of a box; ",
    "uniform": "constant paths, the control of `anchor`; ",
}


def position_card(name: str, grid: tuple[int, int], options: Mapping[str, Any]) -> str:
    """Describe an encoding in text: hooks, parameters, and options with types and values."""
    try:
        sizes = {"width": WIDTH, "heads": HEADS, "grid": grid}
        encoding = create_fitting_position(name, sizes, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    lines = [f"{name}: {_summary(name)}", ""]
    lines += [f"acts {place} ({hook})" for hook, place in HOOKS.items() if hook in encoding.hooks]
    parameters = dict(encoding.named_parameters())
    lines.append(f"parameters: {sum(map(Tensor.numel, parameters.values())):,}")
    lines += [f"  {key} {' x '.join(map(str, table.shape))}" for key, table in parameters.items()]
    card_options = [
        option
        for option in describe_options(name)
        if option.name in options or option.name not in SIZES
    ]
    from_model = position_options(name) - {option.name for option in card_options}
    lines += [f"the model sets: {', '.join(sorted(from_model))}", "", "options:"]
    for option in card_options:
        value = options.get(option.name, option.default)
        text = "required" if value is ... else repr(value)
        lines.append(f"  {option.name} ({option.kind}) = {text}")
    return "\n".join(lines)


def draw_map(name: str, grid: tuple[int, int], options: Mapping[str, Any], file: Path) -> None:
    """Draw the map of an encoding as a PNG; a cross marks the query patch."""
    from matplotlib.figure import Figure

    # A patch off the centre and off the diagonal.
    query = (grid[0] * 2 // 7, grid[1] * 5 // 14)
    try:
        kind, values = position_map(name, grid, query, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    figure = Figure(figsize=(4.5, 4), layout="constrained")
    axes = figure.add_subplot(title=f"{name} ({kind})")
    figure.colorbar(axes.imshow(values, cmap="viridis"), ax=axes)
    axes.plot(query[1], query[0], "x", color="red")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


@torch.no_grad()
def position_map(
    name: str, grid: tuple[int, int], query: tuple[int, int], **options: Any
) -> tuple[str, NDArray[np.float64]]:
    """Compute the map of one encoding, a query patch with all patches.

    Returns the kind of values (cosine, logit or bias), and the map (rows, columns).

    Token encodings: cosine of their vectors (Fig. 2 of Li et al. 2021). Rotations: mean logit of
    equal random contents. Biases: the bias; for CoPE and SaPE, which depend on contents, with one
    random content in a disc and another in its background.
    """
    if name in CROSS_MODAL:
        raise ValueError(f"{name} acts between an image and a text; see `vlp anchors`")
    # Tables and contents are random, but the same in every call.
    torch.manual_seed(0)
    sizes = {"width": WIDTH, "heads": HEADS, "grid": grid}
    encoding = create_fitting_position(name, sizes, **options).double().eval()
    context = PositionContext(grid)
    query_patch = query[0] * grid[1] + query[1]
    if "tokens" in encoding.hooks:
        vectors = encoding("tokens", torch.zeros(1, grid[0] * grid[1], WIDTH).double(), context)[0]
        values, kind = torch.cosine_similarity(vectors[query_patch], vectors, dim=-1), "cosine"
    elif "rotate" in encoding.hooks:
        values, kind = _rotation_logits(encoding, grid, query_patch), "logit"
    else:
        # Tables from N(0, 1) show which patches share a row, as in Figs 5-9 of Wu et al. 2021.
        for parameter in encoding.parameters():
            # A non-zero constant is an initial value that an option sets: keep it.
            is_constant = bool(parameter.any()) and parameter.min() == parameter.max()
            if parameter.abs().max() < MAX_INITIAL and not is_constant:
                nn.init.normal_(parameter)
        values, kind = _bias(encoding, grid, query_patch, name in CONTENT_BIASES), "bias"
    return kind, values.view(grid).numpy()


def _contents(count: int, tokens: int) -> Tensor:
    """Draw random contents, the same for all tokens: (count, heads, tokens, channels)."""
    return torch.randn(count, HEADS, 1, WIDTH // HEADS).double().expand(-1, -1, tokens, -1)


def _rotation_logits(encoding: PositionEncoding, grid: tuple[int, int], query_patch: int) -> Tensor:
    """Return q . k / channels of equal contents, the mean over contents and heads: (T,)."""
    contents = _contents(NUM_CONTENTS, grid[0] * grid[1])
    query, key = encoding("rotate", contents, contents, PositionContext(grid))
    logits = (query[:, :, query_patch, None] * key).sum(-1) / contents.shape[-1]
    return logits.mean((0, 1))


def _bias(
    encoding: PositionEncoding, grid: tuple[int, int], query_patch: int, two_regions: bool
) -> Tensor:
    """Return the bias of the query patch with all patches, of the first head: (T,)."""
    tokens = grid[0] * grid[1]
    contents = _contents(1, tokens)
    if two_regions:
        contents = torch.where(disc(grid).flatten()[:, None], _contents(1, 1), contents)
    bias = encoding("bias", contents, contents, PositionContext(grid))
    return bias.expand(1, HEADS, tokens, tokens)[0, 0, query_patch]


def disc(grid: tuple[int, int]) -> Tensor:
    """Return a disc-shaped region of patches: (rows, columns) bool."""
    row, column = torch.arange(grid[0])[:, None], torch.arange(grid[1])
    centre = (grid[0] * 0.4, grid[1] * 0.4)
    radius = 0.28 * min(grid)
    return (row - centre[0]).square() + (column - centre[1]).square() < radius**2


def position_list() -> str:
    """Return a line for each encoding: name, hooks and description."""
    lines = []
    for name in list_positions():
        kind = position_class(name)
        hooks = [
            hook
            for hook in PositionEncoding.HOOKS
            if getattr(kind, hook) is not getattr(PositionEncoding, hook)
        ]
        prefix = "image-text " if name in CROSS_MODAL else ""
        lines.append(f"{name:<18} {prefix + ', '.join(hooks):<31} {_summary(name)}")
    return "\n".join(lines)


def _summary(name: str) -> str:
    """Return what distinguishes an encoding, and the first paragraph of its class's docstring."""
    # Without the names of encodings in front of the paragraph: "`name`, `name`: ".
    text = (inspect.getdoc(position_class(name)) or "").split("\n\n")[0].replace("\n", " ")
    return VARIANTS.get(name, "") + re.sub(r"^(`[^`]*`(, )?)+: ", "", text)
