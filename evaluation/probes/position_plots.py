"""Panels of trained encodings as one image: mosaics of maps, weights and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from evaluation.probes.trained_positions import Panel, PatchMaps, WeightChange

BINS = 40
COLOURS = 256
"""Of the file: mosaics of small maps are large files otherwise."""


def draw_panels(
    rows: Mapping[str, Sequence[Panel]], out: str | Path, references: int = 5, dots: int = 90
) -> Path:
    """Draw a row of panels for each model; returns the file, a PNG.

    Args:
        rows: panels by the title of their row.
        out: file to write; its folder is made if missing.
        references: reference patches of a map, a side.
        dots: pixels per inch.
    """
    from matplotlib.figure import Figure

    columns = max(len(panels) for panels in rows.values())
    figure = Figure(figsize=(2.9 * columns, 2.8 * len(rows)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for part, (title, panels) in zip(parts, rows.items()):
        part.suptitle(title, x=0.01, ha="left", fontsize=8, weight="bold")
        axes = part.subplots(1, columns, squeeze=False)[0]
        for axis, panel in zip(axes, panels):
            axis.tick_params(labelsize=6)
            if isinstance(panel, WeightChange):
                _draw_weights(axis, panel)
            elif isinstance(panel, PatchMaps):
                _draw_maps(axis, panel, references)
            else:
                axis.imshow(panel.image)
                axis.set_axis_off()
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=dots)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    return path


def _draw_maps(axis: Any, maps: PatchMaps, references: int) -> None:
    image, marks = maps.mosaic(references)
    drawn = axis.imshow(image, cmap="viridis", interpolation="nearest")
    down, right = zip(*marks)
    axis.plot(right, down, ".", color="red", markersize=2)
    axis.set_title(maps.title, fontsize=7)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.figure.colorbar(drawn, ax=axis, shrink=0.8).ax.tick_params(labelsize=6)


def _draw_weights(axis: Any, weights: WeightChange) -> None:
    known = {"before": weights.before, "after": weights.after}
    shown = {name: values for name, values in known.items() if values is not None}
    bins = min(BINS, 6 + round(len(weights.after) ** 0.5))
    edges = np.histogram_bin_edges(np.concatenate(list(shown.values())), bins)
    for name, values in shown.items():
        label = f"{name}, deviation {values.std():.2g}"
        axis.hist(values, edges, histtype="step", label=label)
    axis.set_title("weights", fontsize=7)
    axis.legend(fontsize=6)
