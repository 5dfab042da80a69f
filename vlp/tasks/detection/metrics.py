"""COCO's average precision, by pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# In the order of pycocotools. AP is the mean over IoU thresholds 0.50 to 0.95, AR100 the recall of
# 100 detections per image; small is below 32 x 32 px of area, large above 96 x 96 px.
FIGURES = (
    "AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large",
    "AR1", "AR10", "AR100", "AR_small", "AR_medium", "AR_large",
)  # fmt: skip


class ImageTruth(NamedTuple):
    """The objects of an image, in pixels."""

    width: int
    height: int
    # (objects, 4): x, y, width, height
    boxes: NDArray[np.floating]
    # (objects,) classes from 0
    labels: NDArray[np.integer]
    # (objects,) square pixels
    areas: NDArray[np.floating]
    # (objects,) True = a region in which detections count neither as right nor as wrong
    crowds: NDArray[np.bool_]


class ImageDetections(NamedTuple):
    """Detections of an image: boxes and labels as in `ImageTruth`, and scores (detections,)."""

    boxes: NDArray[np.floating]
    labels: NDArray[np.integer]
    scores: NDArray[np.floating]


def coco_figures(
    truth: Sequence[ImageTruth], detections: Sequence[ImageDetections], classes: Sequence[str]
) -> dict[str, float]:
    """Compute COCO's figures in percent; figures of sizes without objects are left out."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise ImportError(
            "average precision needs the package pycocotools: pip install pycocotools"
        ) from error
    # pycocotools would match a box of NaN with every object.
    if not all(np.isfinite(part).all() for d in detections for part in (d.boxes, d.scores)):
        raise ValueError("the model gives boxes or scores that are not finite")
    if not any((~image.crowds).any() for image in truth):
        raise ValueError(f"no object in {len(truth)} images: average precision is undefined")
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        coco = COCO()
        coco.dataset = _coco_dataset(truth, classes)
        coco.createIndex()
        rows = _coco_results(detections)
        if not rows:
            return dict.fromkeys(_defined_figures(truth), 0.0)
        evaluator = COCOeval(coco, coco.loadRes(rows), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    return {name: 100 * float(value) for name, value in zip(FIGURES, evaluator.stats) if value > -1}


def _coco_dataset(truth: Sequence[ImageTruth], classes: Sequence[str]) -> dict[str, Any]:
    objects = [
        {
            "image_id": number,
            "bbox": [float(value) for value in box],
            "area": float(area),
            "iscrowd": int(crowd),
            "category_id": int(label) + 1,
        }
        for number, image in enumerate(truth, 1)
        for box, label, area, crowd in zip(image.boxes, image.labels, image.areas, image.crowds)
    ]
    return {
        "info": {},
        "images": [
            {"id": number, "width": image.width, "height": image.height}
            for number, image in enumerate(truth, 1)
        ],
        # From 1, as pycocotools takes a match with id 0 for no match.
        "annotations": [{"id": number, **row} for number, row in enumerate(objects, 1)],
        "categories": [{"id": number, "name": name} for number, name in enumerate(classes, 1)],
    }


def _coco_results(detections: Sequence[ImageDetections]) -> list[dict[str, Any]]:
    return [
        {
            "image_id": number,
            "category_id": int(label) + 1,
            "bbox": [float(value) for value in box],
            "score": float(score),
        }
        for number, image in enumerate(detections, 1)
        for box, label, score in zip(image.boxes, image.labels, image.scores)
    ]


def _defined_figures(truth: Sequence[ImageTruth]) -> list[str]:
    """Return the names of all figures except of sizes without objects."""
    areas = np.concatenate([image.areas[~image.crowds] for image in truth])
    sizes = {
        "small": areas <= 32**2,
        "medium": (areas >= 32**2) & (areas <= 96**2),
        "large": areas >= 96**2,
    }
    return [name for name in FIGURES if "_" not in name or sizes[name.partition("_")[2]].any()]
