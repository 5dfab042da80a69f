"""Anchor maps as images: an overview of several captions, and all maps of one caption."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from evaluation.grounding.heatmaps import (
    BOX_COLOUR,
    GRADCAM_COLOURS,
    PATH_COLOURS,
    SHARE_COLOURS,
    draw_boxes,
    overlay,
    overlay_anchors,
    overlay_heatmap,
)
from evaluation.probes.anchor_maps import AnchorDetail, AnchorMap, Box

# Width of a panel in inches.
PANEL = 1.25
# Pixels of an image's longer side, more than a panel shows.
SIDE = 400


def draw_anchor_maps(maps: Sequence[AnchorMap], path: str | Path) -> Path:
    """Draw a row of panels for each caption into a file.

    The first panel is the image. A word's panel shows for each patch the share of channel groups
    in which it anchors the word, and boxes of the objects that the word may name.
    """
    columns = 1 + max(len(anchor_map.words) for anchor_map in maps)
    figure = Figure(figsize=(PANEL * columns + 1.2, (PANEL + 0.55) * len(maps) + 0.4))
    figure.subplots_adjust(0.01, 0.03, 0.93, 1 - 0.55 / figure.get_figheight(), 0.06, 0.5)
    axes = figure.subplots(len(maps), columns, squeeze=False)
    for panel in axes.flat:
        panel.axis("off")
    for (first, *others), anchor_map in zip(axes, maps):
        first.imshow(draw_boxes(anchor_map.image, side=SIDE))
        title = f"{anchor_map.caption}   (S ≥ {anchor_map.threshold:.2f})"
        first.set_title(title, fontsize=8, loc="left", pad=16, parse_math=False)
        for panel, word_map in zip(others, anchor_map.words):
            boxes = _colour_boxes(word_map.boxes)
            panel.imshow(overlay_anchors(anchor_map.image, word_map.heat, boxes, SIDE))
            panel.set_title(word_map.word, fontsize=8, pad=2, parse_math=False)
    scale = figure.add_axes((0.945, 0.1, 0.01, 0.75))
    figure.colorbar(ScalarMappable(Normalize(0, 1), SHARE_COLOURS), cax=scale)
    scale.tick_params(labelsize=7)
    scale.set_title("groups", fontsize=7)
    return _save(figure, path)


def draw_anchor_detail(detail: AnchorDetail, path: str | Path, groups: int = 8) -> Path:
    """Draw all maps of one image and caption into a file.

    The first row has the image and the caption's Grad-CAM map. The row of a word has for each patch
    the share of channel groups in which it anchors the word, the Grad-CAM map (all words have one
    scale), and the anchor paths of the first `groups` groups: dots are anchors, clear patches are
    not reachable.
    """
    path_groups = min(groups, detail.path.shape[1])
    width, height = detail.image.size
    # Panels of very long images keep some width and height.
    panel_height = PANEL * min(max(height / width, 0.4), 2.5)
    rows, columns = 1 + len(detail.words), 2 + path_groups
    size = PANEL * columns + 1.2, (panel_height + 0.2) * rows + 1.6
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.axis("off")
    axes[0, 0].imshow(draw_boxes(detail.image, side=SIDE))
    _draw_gradcam(axes[0, 1], detail, detail.gradcam_caption, detail.gradcam_caption.max())
    titles = ["anchors", "Grad-CAM", *(f"path, group {group}" for group in range(path_groups))]
    for panel, title in zip([*axes[0, :2], *axes[1]], ["image", "Grad-CAM, caption", *titles]):
        panel.set_title(title, fontsize=8, pad=3)
    # One scale for all words, so that maps compare. At least 1.01, as a scale
    # from 1 to 1 would be empty.
    max_heat, longest = detail.gradcam.max(), float(max(detail.path.max(initial=1), 1.01))
    for row, (word, boxes) in enumerate(zip(detail.words, detail.boxes)):
        first, second, *others = axes[row + 1]
        text_style = {"transform": first.transAxes, "ha": "right", "va": "center"}
        first.text(-0.06, 0.5, textwrap.fill(word, 10), fontsize=9, parse_math=False, **text_style)
        share = detail.anchors[row].mean(0)
        first.imshow(overlay_anchors(detail.image, share, _colour_boxes(boxes), SIDE))
        _draw_gradcam(second, detail, detail.gradcam[row], max_heat, boxes)
        for group, panel in enumerate(others):
            _draw_path(panel, detail, row, group, longest)
    # Name, colours, range of values, and columns of panels.
    scales: list[tuple[str, str, float, float, slice]] = [
        ("anchors", SHARE_COLOURS, 0, 1, slice(1)),
        ("Grad-CAM", GRADCAM_COLOURS, 0, 1, slice(1, 2)),
    ]
    scales += [("path P (Eq. 7)", PATH_COLOURS, 1, longest, slice(2, None))] if path_groups else []
    for name, colours, low, high, column in scales:
        scale = ScalarMappable(Normalize(low, high), colours)
        bar = figure.colorbar(scale, ax=axes[:, column], location="bottom", fraction=0.03)
        bar.ax.tick_params(labelsize=6.5)
        bar.set_label(name, fontsize=7)
    facts = (
        f"match log-odds {detail.match:+.1f} · S ≥ {detail.threshold:.2f} · "
        f"Grad-CAM of cross-modal layer {detail.layer} (of 0 to {detail.num_layers - 1}) · "
        f"{path_groups} of {detail.path.shape[1]} groups; dots: anchors, clear: not reachable"
    )
    # A letter is about 0.075 inches wide.
    letters = int(size[0] / 0.075)
    caption = textwrap.wrap(detail.caption, letters, max_lines=2, placeholder=" …")
    lines = "\n".join([*caption, *textwrap.wrap(facts, letters)])
    # Dollar signs of a caption are no formula.
    figure.suptitle(lines, fontsize=8, parse_math=False)
    return _save(figure, path)


def _draw_gradcam(
    panel: Axes, detail: AnchorDetail, heat: np.ndarray, max_heat: float, boxes: Sequence[Box] = ()
) -> None:
    panel.imshow(overlay_heatmap(detail.image, heat, _colour_boxes(boxes), SIDE, max_heat))
    if heat.max() == 0:
        panel.text(0.5, 0.5, "no gradient", transform=panel.transAxes, ha="center", fontsize=7)


def _draw_path(panel: Axes, detail: AnchorDetail, word: int, group: int, longest: float) -> None:
    values = (detail.path[word, group] - 1) / (longest - 1)
    alpha = 0.75 * detail.reachable[word, group]
    boxes = _colour_boxes(detail.boxes[word])
    image = overlay(detail.image, values, PATH_COLOURS, alpha, boxes, SIDE)
    panel.imshow(image)
    # Pixels of a patch, (height, width). In a plot, pixel 0 has its centre at 0.
    patch_size = np.array(image.size[::-1]) / values.shape
    rows, columns = ((np.argwhere(detail.anchors[word, group] > 0) + 0.5) * patch_size - 0.5).T
    panel.scatter(columns, rows, s=5, facecolor="white", edgecolor="black", linewidth=0.5)


def _colour_boxes(boxes: Sequence[Box]) -> list[tuple[Box, str]]:
    return [(box, BOX_COLOUR) for box in boxes]


def _save(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
