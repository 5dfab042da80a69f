"""Anchor maps as images: an overview of several captions, and a grid with all of one caption."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline
from numpy.typing import NDArray
from PIL import Image

from evaluation.grounding.heatmaps import GRADCAM_COLOURS, SHARE_COLOURS
from evaluation.probes.anchor_maps import AnchorDetail, AnchorMap, Box, WordMap

PANEL = 1.25  # inches
PATH_COLOURS = "viridis_r"
SHOWN_PIXELS = 400
"""An image is drawn with at most so many pixels a side: a panel has fewer."""


def draw_anchor_maps(maps: Sequence[AnchorMap], path: str | Path, dots: int = 120) -> Path:
    """Draw and save a grid of panels.

    The image is shown pale; over it lies, for each patch, the share of channel groups in which
    the word anchors it. Green frames are boxes of what the word may name, where known.

    Args:
        maps: one row each.
        path: file to write, usually `.png`; its folder is made if missing.
        dots: pixels per inch.

    Returns:
        The path.
    """
    columns = 1 + max(len(row.words) for row in maps)
    figure = _figure(PANEL * columns + 1.2, (PANEL + 0.55) * len(maps) + 0.4)
    figure.subplots_adjust(0.01, 0.03, 0.93, 1 - 0.55 / figure.get_figheight(), 0.06, 0.5)
    axes = figure.subplots(len(maps), columns, squeeze=False)
    shown = None
    for line, row in zip(axes, maps):
        for panel in line:
            panel.axis("off")
        line[0].imshow(row.image)
        title = f"{row.caption}   (S ≥ {row.threshold:.2f})"
        line[0].set_title(title, fontsize=8, loc="left", pad=16, parse_math=False)
        for panel, word in zip(line[1:], row.words):
            shown = _draw_word(panel, row, word)
    if shown is not None:
        bar = figure.add_axes((0.945, 0.1, 0.01, 0.75))
        figure.colorbar(shown, cax=bar)
        bar.tick_params(labelsize=7)
        bar.set_title("groups", fontsize=7)
    return _save(figure, path, dots)


def draw_anchor_detail(
    detail: AnchorDetail, path: str | Path, groups: int = 8, dots: int = 120
) -> Path:
    """Draw and save everything of one image and caption, one row for each word.

    The first row has the image and the Grad-CAM map of the whole caption. A word's row has the
    share of channel groups in which it anchors each patch, its Grad-CAM map, and for each group the
    anchor path: dots are the anchors of that group, hatched patches are not reachable. Grad-CAM
    maps of words are scaled by the largest of them all, that of the caption by its own.

    Args:
        detail: from `anchor_details`.
        path: file to write, usually `.png`; its folder is made if missing.
        groups: at most so many groups are drawn, the first ones.
        dots: pixels per inch.

    Returns:
        The path.
    """
    shown = min(groups, detail.path.shape[1])
    width, height = detail.image.size
    # Very long images would leave panels without width or height.
    tall = PANEL * min(max(height / width, 0.4), 2.5)
    rows, columns = 1 + len(detail.words), 2 + shown
    figure = _figure(PANEL * columns + 1.2, (tall + 0.2) * rows + 1.6)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.axis("off")
    axes[0, 0].imshow(_small(detail.image), extent=_extent(detail.image))
    _draw_gradcam(axes[0, 1], detail, detail.gradcam_caption, detail.gradcam_caption.max())
    titles = ["anchors", "Grad-CAM", *(f"path, group {group}" for group in range(shown))]
    for panel, title in zip([*axes[0, :2], *axes[1]], ["image", "Grad-CAM, caption", *titles]):
        panel.set_title(title, fontsize=8, pad=3)
    strongest, longest = detail.gradcam.max(), float(max(detail.path.max(initial=1), 1.01))
    for row, (word, boxes) in enumerate(zip(detail.words, detail.boxes)):
        panels = axes[row + 1]
        _label(panels[0], word)
        _draw_share(panels[0], detail.image, detail.anchors[row].mean(0))
        _draw_gradcam(panels[1], detail, detail.gradcam[row], strongest)
        for group, panel in enumerate(panels[2:]):
            _draw_path(panel, detail, row, group, longest)
        for panel in panels:
            _frame(panel, boxes)
    scales: list[tuple[str, str, float, float, slice]] = [
        ("anchors", SHARE_COLOURS, 0, 1, slice(1)),
        ("Grad-CAM", GRADCAM_COLOURS, 0, 1, slice(1, 2)),
    ]
    scales += [("path P (Eq. 7)", PATH_COLOURS, 1, longest, slice(2, None))] if shown else []
    for name, colours, low, high, column in scales:
        scale = ScalarMappable(Normalize(low, high), colours)
        bar = figure.colorbar(scale, ax=axes[:, column], location="bottom", fraction=0.03)
        bar.ax.tick_params(labelsize=6.5)
        bar.set_label(name, fontsize=7)
    facts = (
        f"match log-odds {detail.match:+.1f} · S ≥ {detail.threshold:.2f} · "
        f"Grad-CAM of cross-modal layer {detail.layer} (of 0 to {detail.layers - 1}) · "
        f"{shown} of {detail.path.shape[1]} groups; dots: anchors, hatched: not reachable"
    )
    letters = int(figure.get_figwidth() / 0.075)
    caption = textwrap.wrap(detail.caption, letters, max_lines=2, placeholder=" …")
    # A caption may hold dollar signs, which are no formula.
    lines = "\n".join([*caption, *textwrap.wrap(facts, letters)])
    figure.suptitle(lines, fontsize=8, parse_math=False)
    return _save(figure, path, dots)


def _label(panel: Axes, word: str) -> None:
    panel.text(
        -0.06,
        0.5,
        textwrap.fill(word, 10),
        fontsize=9,
        parse_math=False,
        transform=panel.transAxes,
        ha="right",
        va="center",
    )


def _draw_word(panel: Axes, row: AnchorMap, word: WordMap) -> AxesImage:
    shown = _draw_share(panel, row.image, word.heat)
    _frame(panel, word.boxes)
    panel.set_title(word.word, fontsize=8, pad=2, parse_math=False)
    return shown


def _draw_share(panel: Axes, image: Image.Image, heat: NDArray[np.float32]) -> AxesImage:
    """Share of groups over the pale image; patches without an anchor stay clear."""
    _draw_pale(panel, image)
    return _draw_map(panel, image, np.ma.masked_equal(heat, 0), SHARE_COLOURS, (0, 1))


def _draw_gradcam(
    panel: Axes, detail: AnchorDetail, heat: NDArray[np.float32], strongest: float
) -> None:
    """The stronger, the less of the image shines through."""
    _draw_pale(panel, detail.image)
    scaled = heat / strongest if strongest > 0 else heat
    _draw_map(panel, detail.image, scaled, GRADCAM_COLOURS, (0, 1), np.sqrt(scaled) * 0.85)
    if heat.max() == 0:
        panel.text(0.5, 0.5, "no gradient", transform=panel.transAxes, ha="center", fontsize=7)


def _draw_path(panel: Axes, detail: AnchorDetail, word: int, group: int, longest: float) -> None:
    image, reachable = detail.image, detail.reachable[word, group]
    _draw_pale(panel, image)
    distance = np.ma.masked_where(~reachable, detail.path[word, group])
    _draw_map(panel, image, distance, PATH_COLOURS, (1, longest))
    left, right, bottom, top = _extent(image)
    rows, columns = reachable.shape
    down, along = (bottom - top) / rows, (right - left) / columns
    for row, column in np.argwhere(detail.anchors[word, group] > 0):
        place = left + (column + 0.5) * along, top + (row + 0.5) * down
        panel.scatter(*place, s=5, facecolor="white", edgecolor="black", linewidth=0.5)
    corner = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)])
    squares = [
        Outline((corner + place[::-1]) * (along, down) + (left, top), closed=True)
        for place in np.argwhere(~reachable)
    ]
    if squares:
        # One outline of all: the hatching runs through, and a grid has thousands of patches.
        outline = Outline.make_compound_path(*squares)
        panel.add_patch(PathPatch(outline, fill=False, hatch="////", lw=0, edgecolor="0.45"))


def _draw_map(
    panel: Axes,
    image: Image.Image,
    heat: NDArray[np.float32],
    colours: str,
    limits: tuple[float, float],
    alpha: float | NDArray[np.floating] = 0.75,
) -> AxesImage:
    """A map (rows, columns) over the whole image.

    Preprocessing squashes an image to the model's square without cropping, so the patches share
    the image out evenly, whatever its size.
    """
    return panel.imshow(
        heat,
        cmap=colours,
        vmin=limits[0],
        vmax=limits[1],
        alpha=alpha,
        extent=_extent(image),
        interpolation="nearest",
    )


def _draw_pale(panel: Axes, image: Image.Image) -> None:
    grey = np.asarray(_small(image).convert("L"), dtype=np.float32) / 255
    panel.imshow(0.5 + 0.5 * grey, cmap="gray", vmin=0, vmax=1, extent=_extent(image))


def _frame(panel: Axes, boxes: Sequence[Box]) -> None:
    for x, y, w, h in boxes:
        panel.add_patch(Rectangle((x - 0.5, y - 0.5), w, h, fill=False, color="limegreen", lw=1.2))


def _small(image: Image.Image) -> Image.Image:
    if max(image.size) <= SHOWN_PIXELS:
        return image
    copy = image.copy()
    copy.thumbnail((SHOWN_PIXELS, SHOWN_PIXELS))
    return copy


def _extent(image: Image.Image) -> tuple[float, float, float, float]:
    """Left, right, bottom and top of an image in its own pixels, whose centres are whole."""
    width, height = image.size
    return -0.5, width - 0.5, height - 0.5, -0.5


def _figure(width: float, height: float) -> Figure:
    """In inches. It has its own canvas, not pyplot's: no window system, no shared state."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: str | Path, dots: int) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dots)
    return path
