import numpy as np
import pytest

from vlp.tasks.detection.metrics import FIGURES, ImageDetections, ImageTruth, coco_figures

CLASSES = ("circle", "star")


def truth(boxes, labels=None, crowds=None, size=(200, 100), areas=None):
    boxes = np.array(boxes, dtype=float).reshape(-1, 4)
    count = len(boxes)
    return ImageTruth(
        *size, boxes,
        np.array(labels if labels is not None else [0] * count, dtype=int),
        np.array(areas if areas is not None else boxes[:, 2] * boxes[:, 3]),
        np.array(crowds if crowds is not None else [False] * count, dtype=bool),
    )  # fmt: skip


def found(boxes, labels=None, scores=None):
    boxes = np.array(boxes, dtype=float).reshape(-1, 4)
    count = len(boxes)
    return ImageDetections(
        boxes,
        np.array(labels if labels is not None else [0] * count, dtype=int),
        np.array(scores if scores is not None else np.linspace(0.9, 0.5, count)),
    )


def overlap(one, other):
    wide = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    high = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    both = max(wide, 0) * max(high, 0)
    return both / (one[2] * one[3] + other[2] * other[3] - both)


def slow_precision(truths, detections, label, threshold):
    """101-point interpolated average precision of one class without crowds, COCO's definition."""
    entries, total = [], 0
    for number, (one, other) in enumerate(zip(truths, detections)):
        total += int((one.labels == label).sum())
        entries += [
            (other.scores[n], number, other.boxes[n])
            for n in range(len(other.scores))
            if other.labels[n] == label
        ]
    taken, hits = set(), []
    for _, number, box in sorted(entries, key=lambda entry: -entry[0]):
        one = truths[number]
        free = [
            (overlap(box, one.boxes[n]), n)
            for n in range(len(one.labels))
            if one.labels[n] == label and (number, n) not in taken
        ]
        best = max(free, default=(0, None))
        hits.append(best[0] >= threshold)
        if hits[-1]:
            taken.add((number, best[1]))
    right = np.cumsum(hits)
    precision = right / np.arange(1, len(hits) + 1)
    recall = right / total
    points = [
        max((p for p, r in zip(precision, recall) if r >= level - 1e-12), default=0)
        for level in np.linspace(0, 1, 101)
    ]
    return float(np.mean(points))


def test_random_detections_have_the_slow_precision():
    rng = np.random.default_rng(0)

    def boxes(count):
        start = rng.uniform(0, 100, (count, 2)).round(1)
        return np.concatenate([start, rng.uniform(10, 60, (count, 2)).round(1)], -1)

    truths, detections = [], []
    for _ in range(20):
        own, labels = boxes(4), rng.integers(0, 2, 4)
        truths.append(truth(own, labels))
        near = own + rng.normal(0, 3, own.shape)
        detections.append(
            found(np.concatenate([near, boxes(3)]), [*labels, *rng.integers(0, 2, 3)],
                  rng.permutation(7) + rng.random(7))
        )  # fmt: skip
    figures = coco_figures(truths, detections, CLASSES)
    levels = np.linspace(0.5, 0.95, 10)
    each = [[slow_precision(truths, detections, c, level) for c in (0, 1)] for level in levels]
    assert figures["AP"] == pytest.approx(100 * np.mean(each), abs=1e-6)
    assert figures["AP50"] == pytest.approx(100 * np.mean(each[0]), abs=1e-6)
    assert figures["AP75"] == pytest.approx(100 * np.mean(each[5]), abs=1e-6)
    assert 20 < figures["AP"] < 90
    perfect = [found(one.boxes, one.labels) for one in truths]
    figures = coco_figures(truths, perfect, CLASSES)
    assert set(figures) == set(FIGURES) - {"AP_large", "AR_large"}
    assert figures["AP"] == figures["AP75"] == figures["AR10"] == pytest.approx(100)
    assert figures["AR1"] < 100


def test_detections_in_crowds_are_neither_right_nor_wrong():
    boxes = [[0, 0, 100, 100], [120, 10, 40, 40]]
    crowd = truth(boxes, crowds=[True, False])
    figures = coco_figures(
        [crowd], [found([[10, 10, 20, 20], [60, 50, 20, 20], boxes[1]])], CLASSES
    )
    assert figures["AP"] == pytest.approx(100)


def test_sizes_go_by_the_annotated_area():
    box = [10, 10, 60, 60]
    assert "AP_medium" in coco_figures([truth([box])], [found([box])], CLASSES)
    small = coco_figures([truth([box], areas=[100.0])], [found([box])], CLASSES)
    assert small["AP_small"] == pytest.approx(100)
    assert "AP_medium" not in small


def test_no_detection_is_nothing_found():
    figures = coco_figures([truth([[0, 0, 40, 40]]), truth([])], [found([])] * 2, CLASSES)
    assert figures["AP"] == figures["AP_medium"] == 0
    assert "AP_small" not in figures


def test_what_cannot_be_judged_is_refused():
    box = [[0, 0, 40, 40]]
    with pytest.raises(ValueError, match="not finite"):
        coco_figures([truth(box)], [found([[float("nan")] * 4])], CLASSES)
    for nothing in ([], [truth([])], [truth(box, crowds=[True])]):
        with pytest.raises(ValueError, match="no object in"):
            coco_figures(nothing, [found([])] * len(nothing), CLASSES)
