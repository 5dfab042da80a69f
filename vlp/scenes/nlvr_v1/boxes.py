"""Images of three boxes in the manner of NLVR v1 (Suhr et al., ACL 2017): items or towers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle")
COLOURS = {"yellow": (255, 255, 0), "blue": (0, 153, 255), "black": (0, 0, 0)}
SIZES = {"small": 10, "medium": 20, "big": 30}
SIDE, PITCH, BOXES = 100, 150, 3
"""Pixels: side of a box, and from the left of one to the left of the next."""

WIDTH = PITCH * (BOXES - 1) + SIDE
BLOCK, TALLEST, MOST_ITEMS = 20, 4, 7
_GROUND, _GAP = (211, 211, 211), (128, 128, 128)
_BLOCK_LEFT, _STOREY = 40, BLOCK + 1
_SUPERSAMPLING = 4

_ATTEMPTS = 50

Wall = Literal["left", "right", "top", "bottom"]
Value = TypeVar("Value")
_Kind = tuple[str, str, int]
"""Shape, colour and size of an item."""


class BoxItem(NamedTuple):
    """A shape in a box; x and y are its left and upper edge in pixels of the box."""

    shape: str
    colour: str
    size: int
    x: int
    y: int

    @property
    def walls(self) -> frozenset[Wall]:
        """Walls that it touches."""
        touched: dict[Wall, bool] = {
            "left": self.x == 0,
            "right": self.x + self.size == SIDE,
            "top": self.y == 0,
            "bottom": self.y + self.size == SIDE,
        }
        return frozenset(wall for wall, there in touched.items() if there)


Box = tuple[BoxItem, ...]
"""Items in any order, or a tower's blocks from its base up."""


class ThreeBoxes(NamedTuple):
    """Three boxes; `towers` says that each holds one tower, else they hold scattered items."""

    towers: bool
    boxes: tuple[Box, ...]


def pick(rng: np.random.Generator, values: Iterable[Value]) -> Value:
    """Draw one of some values."""
    several = tuple(values)
    return several[int(rng.integers(len(several)))]


def sample_boxes(rng: np.random.Generator, towers: bool) -> ThreeBoxes:
    """Draw three boxes."""
    numbers = rng.integers(1, (TALLEST if towers else MOST_ITEMS) + 1, size=BOXES).tolist()
    return _arranged(rng, towers, [_kind(rng, towers) for _ in range(sum(numbers))], numbers)


def rearrange_boxes(rng: np.random.Generator, scene: ThreeBoxes) -> ThreeBoxes:
    """Return the same items or blocks, dealt to the boxes and placed anew.

    As likely as `sample_boxes` would give them.
    """
    kinds = [(item.shape, item.colour, item.size) for box in scene.boxes for item in box]
    most = TALLEST if scene.towers else MOST_ITEMS
    deals = [deal for deal in product(range(1, most + 1), repeat=BOXES) if sum(deal) == len(kinds)]
    numbers = pick(rng, deals)
    shuffled = [kinds[place] for place in rng.permutation(len(kinds))]
    return _arranged(rng, scene.towers, shuffled, numbers)


def render_boxes(scene: ThreeBoxes) -> Image.Image:
    """Return the image, RGB, WIDTH x SIDE, anti-aliased."""
    scale = _SUPERSAMPLING
    image = Image.new("RGB", (WIDTH * scale, SIDE * scale), _GAP)
    canvas = ImageDraw.Draw(image)
    for number, box in enumerate(scene.boxes):
        left = number * PITCH
        canvas.rectangle(_corners(left, 0, SIDE), fill=_GROUND)
        for item in box:
            corners = _corners(left + item.x, item.y, item.size)
            if item.shape == "circle":
                canvas.ellipse(corners, fill=COLOURS[item.colour])
            elif item.shape == "square":
                canvas.rectangle(corners, fill=COLOURS[item.colour])
            else:
                x, y, right, bottom = corners
                top = ((x + right) / 2, y)
                canvas.polygon([top, (right, bottom), (x, bottom)], fill=COLOURS[item.colour])
    return image.reduce(scale)


def _corners(x: int, y: int, side: int) -> tuple[int, int, int, int]:
    scale = _SUPERSAMPLING
    return x * scale, y * scale, (x + side) * scale - 1, (y + side) * scale - 1


def _kind(rng: np.random.Generator, towers: bool) -> _Kind:
    if towers:
        return "square", pick(rng, COLOURS), BLOCK
    size = pick(rng, SIZES.values())
    return pick(rng, SHAPES), pick(rng, COLOURS), size


def _arranged(
    rng: np.random.Generator, towers: bool, kinds: Sequence[_Kind], numbers: Sequence[int]
) -> ThreeBoxes:
    """So many of them in each box, in their order."""
    arrange = _tower if towers else _scatter
    ends = np.cumsum(numbers)
    shares = [kinds[end - number : end] for number, end in zip(numbers, ends)]
    return ThreeBoxes(towers, tuple(arrange(rng, share) for share in shares))


def _tower(rng: np.random.Generator, kinds: Sequence[_Kind]) -> Box:
    return tuple(
        BoxItem(shape, colour, size, _BLOCK_LEFT, SIDE - BLOCK - _STOREY * storey)
        for storey, (shape, colour, size) in enumerate(kinds)
    )


def _scatter(rng: np.random.Generator, kinds: Sequence[_Kind]) -> Box:
    """Items that do not touch each other; some four in ten touch a wall."""
    while True:
        items = list[BoxItem]()
        for shape, colour, size in kinds:
            for _ in range(_ATTEMPTS):
                x, y = int(rng.integers(SIDE - size + 1)), int(rng.integers(SIDE - size + 1))
                if rng.random() < 0.3:
                    end = int(rng.integers(2)) * (SIDE - size)
                    x, y = (end, y) if rng.random() < 0.5 else (x, end)
                item = BoxItem(shape, colour, size, x, y)
                if not any(_overlap(item, other) for other in items):
                    items.append(item)
                    break
        if len(items) == len(kinds):
            return tuple(items)


def _overlap(one: BoxItem, other: BoxItem) -> bool:
    gap = 2
    across = one.x < other.x + other.size + gap and other.x < one.x + one.size + gap
    return across and one.y < other.y + other.size + gap and other.y < one.y + one.size + gap
