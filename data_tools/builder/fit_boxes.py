"""Boxes of an annotation in the pixels of the image that is stored."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vlp.data.schema import Annotation, Expression, Word

if TYPE_CHECKING:
    from data_tools.builder.reencode import Prepared

OUTSIDE, CUT = "box outside its image", "box cut at the edge of its image (kept)"

LEAST_INSIDE = 0.5
"""A box is kept if more than this share of its area lies in the image, which it is cut to."""

TOLERANCE = 1.0
"""Pixels by which a box may stick out (rounding) without being counted as cut."""

# What each EXIF orientation does to a point, in shares of width and height.
_TURNED = {
    2: lambda x, y: (1 - x, y),
    3: lambda x, y: (1 - x, 1 - y),
    4: lambda x, y: (x, 1 - y),
    5: lambda x, y: (y, x),
    6: lambda x, y: (1 - y, x),
    7: lambda x, y: (1 - y, 1 - x),
    8: lambda x, y: (y, 1 - x),
}


def fit_boxes(
    annotation: Annotation, image: Prepared, size: tuple[int, int] | None
) -> tuple[Annotation, dict[str, list[str]]]:
    """Scale, turn and cut every box so that it lies in the stored image.

    Published boxes stick out of their images now and then (Visual Genome's by dozens of pixels):
    what sticks out is cut off. A box without area, or with too little of it inside
    (`LEAST_INSIDE`), is left out, an expression or a named word with it.

    Args:
        annotation: of the image; boxes are [x, y, width, height].
        image: as it is stored.
        size: width and height in pixels that the boxes refer to; None: the upright original's.

    Returns:
        The annotation, and by kind (`OUTSIDE`, `CUT`) the names of such boxes (`expression 7`,
        `boxes 0`).
    """
    faults: dict[str, list[str]] = defaultdict(list)
    frame = _Frame(image, size)

    def fitted(box: Sequence[float], name: str) -> list[float] | None:
        kind, kept = frame.fit(box)
        if kind is not None:
            faults[kind].append(name)
        return kept

    def fitted_word(word: Word) -> Word | None:
        name = f"word {word.caption}.{word.index}"
        kept = [fitted(box, name) for box in (word.box, *(word.others or ()))]
        inside = [box for box in kept if box is not None]
        if not inside:
            return None
        return word.model_copy(update={"box": inside[0], "others": inside[1:] or None})

    update: dict[str, list[Expression] | list[Word] | list[list[float]]] = {}
    if annotation.expressions is not None:
        update["expressions"] = [
            expression.model_copy(update={"box": box})
            for expression in annotation.expressions
            if (box := fitted(expression.box, f"expression {expression.id}")) is not None
        ]
    if annotation.words is not None:
        words = map(fitted_word, annotation.words)
        update["words"] = [word for word in words if word is not None]
    for name in ("boxes", "proposals"):
        boxes = getattr(annotation, name)
        if boxes is not None:
            kept = [fitted(box, f"{name} {number}") for number, box in enumerate(boxes)]
            update[name] = [box for box in kept if box is not None]
    return (annotation.model_copy(update=update) if update else annotation), faults


class _Frame:
    """From the pixels that boxes were drawn on to those of the stored image."""

    def __init__(self, image: Prepared, size: tuple[int, int] | None) -> None:
        exchanged = image.orientation > 4
        upright = image.original[::-1] if exchanged else image.original
        self._drawn_on = size if size is not None and min(size) > 0 else upright
        self._stored = image.size
        self._same = self._drawn_on == upright == image.size
        # Boxes that were drawn on the image before it was turned have its shape, not the upright.
        turn = exchanged and _shape_differs(self._drawn_on, upright)
        self._turn = _TURNED[image.orientation] if turn else None

    def fit(self, box: Sequence[float]) -> tuple[str | None, list[float] | None]:
        """Return the kind of fault of a box, if any, and the box (None: left out)."""
        x, y, wide, high = box
        width, height = self._drawn_on
        left, top = max(x, 0.0), max(y, 0.0)
        right, low = min(x + wide, width), min(y + high, height)
        area = wide * high
        if right <= left or low <= top or area == 0:
            return OUTSIDE, None
        if (left, top, right, low) == (x, y, x + wide, y + high) and self._same:
            return None, list(box)
        out = max(left - x, top - y, x + wide - right, y + high - low)
        if out > TOLERANCE and (right - left) * (low - top) <= LEAST_INSIDE * area:
            return OUTSIDE, None
        start, end = (left / width, top / height), (right / width, low / height)
        if self._turn is not None:
            start, end = self._turn(*start), self._turn(*end)
        (left, right), (top, low) = map(sorted, zip(start, end))
        across, down = self._stored
        scaled = (left * across, top * down, (right - left) * across, (low - top) * down)
        kept = [round(value, 2) for value in scaled]
        if min(kept[2:]) == 0:
            return OUTSIDE, None
        return CUT if out > TOLERANCE else None, kept


def _shape_differs(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a size is nearer to the other one with its sides exchanged."""
    ratio, aspect = math.log(one[0] / one[1]), math.log(other[0] / other[1])
    return abs(ratio + aspect) < abs(ratio - aspect)
