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

from evaluation.probes.anchor_maps import AnchorDetail, AnchorMap, Box, WordMap

PANEL = 1.25  # inches
SHARE_COLOURS, GRADCAM_COLOURS, PATH_COLOURS = "inferno", "turbo", "viridis_r"
SHOWN_PIXELS = 400
"""An image is drawn with at most so many pixels a side: a panel has fewer."""
TEXT_PANELS = 4
"""The heading and its scales need the width of so many panels."""


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
    sheet = _Sheet(len(detail.words), 2 + max(shown, TEXT_PANELS), detail.image)
    _draw_heading(sheet, detail, shown)
    strongest, longest = detail.gradcam.max(), _longest(detail)
    for row, (word, boxes) in enumerate(zip(detail.words, detail.boxes)):
        panels = [sheet.panel(row, column) for column in range(2 + shown)]
        _label(panels[0], word)
        _draw_share(panels[0], detail.image, detail.anchors[row].mean(0))
        _draw_gradcam(panels[1], detail, detail.gradcam[row], strongest)
        for group, panel in enumerate(panels[2:]):
            _draw_path(panel, detail, row, group, longest)
        for panel in panels:
            _frame(panel, boxes)
        if row == 0:
            titles = ["anchors", "Grad-CAM", *(f"path, group {group}" for group in range(shown))]
            for panel, title in zip(panels, titles):
                panel.set_title(title, fontsize=8, pad=3)
    return _save(sheet.figure, path, dots)


class _Sheet:
    """Layout of a detailed grid's panels, in inches: a heading, then a row for each word."""

    LEFT, TOP, GAP, BELOW_HEADING, EDGE = 0.75, 0.25, 0.08, 0.35, 0.15

    def __init__(self, rows: int, columns: int, image: Image.Image) -> None:
        width, height = image.size
        # Very long images would leave panels without width or height.
        self.tall = PANEL * min(max(height / width, 0.4), 2.5)
        self.heading = max(self.tall, PANEL)
        self.first_row = self.TOP + self.heading + self.BELOW_HEADING
        self.figure = _figure(
            self.LEFT + columns * (PANEL + self.GAP) + self.EDGE,
            self.first_row + rows * (self.tall + self.GAP) + self.EDGE,
        )

    def panel(self, row: int | None, column: int) -> Axes:
        """An empty panel of a word's row, or of the heading (None)."""
        height = self.heading if row is None else self.tall
        top = self.TOP if row is None else self.first_row + row * (self.tall + self.GAP)
        panel = self.axes(self.LEFT + column * (PANEL + self.GAP), top, PANEL, height)
        panel.axis("off")
        panel.set_anchor("N" if row is None else "C")
        return panel

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at a place in inches, from the figure's left and top."""
        across, up = self.figure.get_size_inches()
        place = (left / across, 1 - (top + height) / up, width / across, height / up)
        return self.figure.add_axes(place)

    def text(self, left: float, top: float, text: str, size: float, weight: str) -> None:
        """Text whose first line starts at a place in inches."""
        across, up = self.figure.get_size_inches()
        # A caption may hold dollar signs, which are no formula.
        self.figure.text(
            left / across,
            1 - top / up,
            text,
            fontsize=size,
            weight=weight,
            va="top",
            linespacing=1.2,
            parse_math=False,
        )


def _draw_heading(sheet: _Sheet, detail: AnchorDetail, groups: int) -> None:
    """Image, Grad-CAM of the caption, and beside them what is shown and the three scales."""
    image, whole = sheet.panel(None, 0), sheet.panel(None, 1)
    image.imshow(_small(detail.image), extent=_extent(detail.image))
    image.set_title("image", fontsize=8, pad=3)
    _draw_gradcam(whole, detail, detail.gradcam_caption, detail.gradcam_caption.max())
    whole.set_title("Grad-CAM, caption", fontsize=8, pad=3)

    left = sheet.LEFT + 2 * (PANEL + sheet.GAP) + 0.1
    wide = sheet.figure.get_figwidth() - left - sheet.EDGE
    caption = textwrap.wrap(detail.caption, int(wide / 0.085), max_lines=2, placeholder=" …")
    every = detail.path.shape[1]
    facts = [
        f"match log-odds {detail.match:+.1f}",
        f"Grad-CAM of cross-modal layer {detail.layer} (of 0 to {detail.layers - 1})",
        f"anchors:\u00a0S\u00a0≥\u00a0{detail.threshold:.2f}",
        f"{groups} of {every} groups; dots: anchors, hatched: not reachable"
        if every
        else "no paths in this model",
    ]
    sheet.text(left, sheet.TOP, "\n".join(caption), 9, "bold")
    below = sheet.TOP + 0.19 * len(caption)
    sheet.text(left, below, textwrap.fill(" · ".join(facts), int(wide / 0.066)), 7.5, "normal")

    scales = [
        ("share of groups that anchor", SHARE_COLOURS, 0.0, 1.0),
        ("Grad-CAM, of the strongest", GRADCAM_COLOURS, 0.0, 1.0),
    ]
    if every:
        scales.append(("path P (Eq. 7)", PATH_COLOURS, 1.0, _longest(detail)))
    step = wide / len(scales)
    for number, (name, colours, low, high) in enumerate(scales):
        bar = sheet.axes(left + number * step, sheet.TOP + PANEL - 0.3, step - 0.25, 0.1)
        scale = ScalarMappable(Normalize(low, high), colours)
        sheet.figure.colorbar(scale, cax=bar, orientation="horizontal")
        bar.tick_params(labelsize=6.5, length=2, pad=1)
        bar.set_title(name, fontsize=7, pad=2)


def _label(panel: Axes, word: str) -> None:
    panel.text(
        -0.06,
        0.5,
        textwrap.fill(word, 10),
        transform=panel.transAxes,
        ha="right",
        va="center",
        fontsize=9,
        parse_math=False,
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
        panel.plot(
            left + (column + 0.5) * along,
            top + (row + 0.5) * down,
            marker="o",
            markersize=2.2,
            markerfacecolor="white",
            markeredgecolor="black",
            markeredgewidth=0.5,
        )
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


def _longest(detail: AnchorDetail) -> float:
    """Upper end of the scale of paths; the lower is 1, the shortest path there is."""
    return float(max(detail.path.max(initial=1), 1.01))


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
