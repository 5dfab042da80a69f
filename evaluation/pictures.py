"""Anchor maps as a picture: one row for each caption, one panel for each word."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from evaluation.anchors import AnchorMap, WordMap

PANEL = 1.25  # inches
COLOURS = "inferno"


def draw_anchor_maps(maps: Sequence[AnchorMap], path: str | Path, dots: int = 120) -> Path:
    """Draw and save a grid of panels.

    The picture is shown pale; over it lies, for each patch, the share of channel groups in which
    the word anchors it. A green frame is the box of the object that the word names, where known.

    Args:
        maps: one row each.
        path: file to write, usually `.png`; its folder is made if missing.
        dots: pixels per inch.

    Returns:
        The path.
    """
    columns = 1 + max(len(row.words) for row in maps)
    # The figure's own canvas, not pyplot: no window system, no state shared with the caller.
    figure = Figure(figsize=(PANEL * columns + 1.2, (PANEL + 0.55) * len(maps) + 0.4))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(0.01, 0.03, 0.93, 1 - 0.55 / figure.get_figheight(), 0.06, 0.5)
    axes = figure.subplots(len(maps), columns, squeeze=False)
    shown = None
    for line, row in zip(axes, maps):
        for panel in line:
            panel.axis("off")
        line[0].imshow(row.image)
        line[0].set_title(
            f"{row.caption}   (S ≥ {row.threshold:.2f})", fontsize=8, loc="left", pad=16
        )
        for panel, word in zip(line[1:], row.words):
            shown = _draw_word(panel, row, word)
    if shown is not None:
        bar = figure.add_axes((0.945, 0.1, 0.01, 0.75))
        figure.colorbar(shown, cax=bar)
        bar.tick_params(labelsize=7)
        bar.set_title("groups", fontsize=7)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dots)
    return path


def _draw_word(panel: Axes, row: AnchorMap, word: WordMap) -> AxesImage:
    width, height = row.image.size
    grey = np.asarray(row.image.convert("L"), dtype=np.float32) / 255
    panel.imshow(0.5 + 0.5 * grey, cmap="gray", vmin=0, vmax=1)
    heat = np.ma.masked_equal(word.heat, 0)
    shown = panel.imshow(
        heat,
        cmap=COLOURS,
        vmin=0,
        vmax=1,
        alpha=0.75,
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
        interpolation="nearest",
    )
    if word.box is not None:
        x, y, w, h = word.box
        panel.add_patch(Rectangle((x - 0.5, y - 0.5), w, h, fill=False, color="limegreen", lw=1.2))
    panel.set_title(word.word, fontsize=8, pad=2)
    return shown
