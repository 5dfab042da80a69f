"""Maps of position encodings over an image's patches, drawn by `draw_position_maps`.

    python -m evaluation encodings --out docs/assets/positions.png

Each map shows one query patch (a cross) against all patches of a 14 x 14 grid. For encodings of
tokens it is the cosine of their vectors (Fig. 2 of Li et al. 2021), for rotations the mean logit of
equal random contents, for biases the bias itself, with tables drawn from N(0, 1): how patches share
rows of a table shows, as in Figs 5-9 of Wu et al. 2021. CoPE and SaPE see contents: there an image
of two regions, a disc on a ground.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vlp.positions import (
    CROSS_MODAL,
    PositionContext,
    PositionEncoding,
    create_fitting_position,
    list_positions,
)

GRID = (14, 14)
QUERY = (4, 5)
WIDTH, HEADS = 64, 2
CONTENTS = 64
ON_CONTENTS = ("cope", "sape")
# Sizes of the tables in iRPE's Table 1, where methods have about as many buckets in use.
OPTIONS: dict[str, dict[str, Any]] = {
    "irpe-cross": {"ratio": 20},
    "irpe-euclidean": {"ratio": 20},
    "irpe-quantization": {"ratio": 33},
}


class PositionMap(NamedTuple):
    """A map (rows, columns), what it belongs to, and what its numbers are."""

    name: str
    kind: str
    values: NDArray[np.float64]


@torch.no_grad()
def position_map(
    name: str,
    grid: tuple[int, int] = GRID,
    query: tuple[int, int] = QUERY,
    seed: int = 0,
    width: int = WIDTH,
    heads: int = HEADS,
    **options: Any,
) -> PositionMap:
    """The map of one encoding.

    Args:
        name: of `list_positions()`, but for the cross-modal ones.
        grid: (rows, columns).
        query: (row, column) of the patch that asks.
        seed: of tables and contents.
        width: channels.
        heads: attention heads.
        options: of the encoding.

    Raises:
        ValueError: an unknown name, or a cross-modal encoding.
    """
    if name in CROSS_MODAL:
        raise ValueError(f"{name} lies between an image and a text; see `evaluation anchors`")
    torch.manual_seed(seed)
    sizes = {"width": width, "heads": heads, "grid": grid}
    encoding = create_fitting_position(name, sizes, **options).double().eval()
    if "bias" in encoding.hooks:
        for parameter in encoding.parameters():
            nn.init.normal_(parameter)
    context = PositionContext(grid)
    place = query[0] * grid[1] + query[1]
    if "tokens" in encoding.hooks:
        vectors = encoding("tokens", torch.zeros(1, grid[0] * grid[1], width).double(), context)[0]
        values, kind = torch.cosine_similarity(vectors[place], vectors, dim=-1), "cosine"
    elif "rotate" in encoding.hooks:
        values, kind = _rotated(encoding, context, place, (heads, width // heads)), "logit"
    else:
        sizes_of_heads = heads, width // heads
        seen = name in ON_CONTENTS
        values, kind = _biased(encoding, context, place, seen, sizes_of_heads), "bias"
    return PositionMap(name, kind, values.view(grid).numpy())


def _rotated(
    encoding: PositionEncoding, context: PositionContext, place: int, heads: tuple[int, int]
) -> Tensor:
    """q_i . k_j where all contents are equal, averaged over contents: (T,)."""
    assert context.grid is not None
    tokens = context.grid[0] * context.grid[1]
    contents = torch.randn(CONTENTS, heads[0], 1, heads[1]).double().expand(-1, -1, tokens, -1)
    query, key = encoding("rotate", contents, contents, context)
    logits = (query[:, :, place, None] * key).sum(-1) / heads[1]
    return logits.mean((0, 1))


def _biased(
    encoding: PositionEncoding,
    context: PositionContext,
    place: int,
    on_contents: bool,
    heads: tuple[int, int],
) -> Tensor:
    """The bias of one query's row, of the first head: (T,)."""
    assert context.grid is not None
    tokens = context.grid[0] * context.grid[1]
    contents = torch.randn(1, heads[0], 1, heads[1]).double().expand(-1, -1, tokens, -1)
    if on_contents:
        other = torch.randn(1, heads[0], 1, heads[1]).double()
        contents = torch.where(disc(context.grid).flatten()[:, None], other, contents)
    bias = encoding("bias", contents, contents, context)
    return bias.expand(1, heads[0], tokens, tokens)[0, 0, place]


def disc(grid: tuple[int, int]) -> Tensor:
    """The region of the image that CoPE and SaPE are shown: (rows, columns) bool."""
    row, column = torch.arange(grid[0])[:, None], torch.arange(grid[1])
    centre = (grid[0] * 0.4, grid[1] * 0.4)
    radius = 0.28 * min(grid)
    return (row - centre[0]).square() + (column - centre[1]).square() < radius**2


def draw_position_maps(out: str | Path, columns: int = 6) -> Path:
    """Draw the map of every encoding; returns the file, a PNG."""
    from matplotlib.figure import Figure

    names = [name for name in list_positions() if name not in CROSS_MODAL]
    maps = [position_map(name, **OPTIONS.get(name, {})) for name in names]
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(2.1 * columns, 2.3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, found in zip(axes, maps):
        drawn = panel.imshow(found.values, cmap="viridis")
        panel.plot(QUERY[1], QUERY[0], "x", color="red")
        panel.set_title(f"{found.name}\n{found.kind}", fontsize="small")
        bar = figure.colorbar(drawn, ax=panel, shrink=0.7)
        bar.ax.tick_params(labelsize=5)
    for panel in axes:
        panel.set_xticks([])
        panel.set_yticks([])
    for panel in axes[len(maps) :]:
        panel.set_axis_off()
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
