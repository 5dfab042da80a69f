"""Scenes drawn by (seed, split, index), in pixels of any image size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Literal, NamedTuple, get_args

import numpy as np

from vlp.data.stream.rng import make_rng
from vlp.scenes.captions import SceneCaption, captions
from vlp.scenes.graph import (
    COLOURS,
    LATTICE,
    SHAPES,
    SIZES,
    Obj,
    Scene,
    holds,
    main_relation,
    place_name,
)

Split = Literal["train", "val", "swaps", "unseen"]
SPLITS: tuple[Split, ...] = get_args(Split)

UNSEEN_FAMILIES = frozenset(
    {
        ("horizontal", ("circle", "star")),
        ("vertical", ("square", "triangle")),
        ("vertical", ("cross", "star")),
    }
)
# One in 10 families of swaps is held out, and one in 8 contents for validation.
SWAP_SHARE = 10
VAL_SHARE = 8


def split_of(scene: Scene) -> Split:
    """Return the split of a scene, from its contents alone, whatever the seed."""
    # Some pair of objects has a relation between shapes that training never shows.
    if held_out_pairs(scene, "unseen"):
        return "unseen"
    # Some pair belongs to a held-out family: a direction (horizontal or vertical) and the pair's
    # colours and shapes in any order. A caption and its swapped twins are held out together, as a
    # model could know the true one from its text otherwise.
    if held_out_pairs(scene, "swaps"):
        return "swaps"
    # Colours, shapes and main relations; of a single object its place.
    if _in_share(VAL_SHARE, "content", *content(scene)):
        return "val"
    return "train"


def held_out_pairs(scene: Scene, split: Literal["swaps", "unseen"]) -> list[tuple[int, int]]:
    """Return the pairs of objects by which a split is held out from training."""
    pairs = combinations(range(len(scene.objects)), 2)
    if split == "unseen":
        return [pair for pair in pairs if _shape_family(scene, *pair) in UNSEEN_FAMILIES]
    return [pair for pair in pairs if _in_share(SWAP_SHARE, "swap", *swap_family(scene, *pair))]


def swap_family(scene: Scene, first: int, second: int) -> tuple[str, ...]:
    """Return a pair's direction, colours and shapes, which relation and attribute swaps keep."""
    a, b = scene.objects[first], scene.objects[second]
    return (
        _direction(scene, first, second),
        *sorted((a.colour, b.colour)),
        *sorted((a.shape, b.shape)),
    )


def content(scene: Scene) -> tuple[str, ...]:
    """Return the facts in every full caption of the scene, whatever the order of objects."""
    objects = scene.objects
    if len(objects) == 1:
        return (objects[0].colour, objects[0].shape, objects[0].place)
    names = [f"{obj.colour} {obj.shape}" for obj in objects]
    order = sorted(range(len(objects)), key=names.__getitem__)
    relations = [f"{main_relation(scene, a, b)}" for a, b in combinations(order, 2)]
    return (*(names[number] for number in order), *relations)


def _direction(scene: Scene, first: int, second: int) -> str:
    return "horizontal" if main_relation(scene, first, second) in ("left", "right") else "vertical"


def _shape_family(scene: Scene, first: int, second: int) -> tuple[str, tuple[str, ...]]:
    shapes = sorted((scene.objects[first].shape, scene.objects[second].shape))
    return _direction(scene, first, second), tuple(shapes)


@lru_cache(maxsize=1 << 16)
def _in_share(share: int, *words: str) -> bool:
    digest = hashlib.blake2b(" | ".join(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % share == 0


# Of one, two and three objects.
OBJECT_COUNT_PROBABILITIES = (0.08, 0.4, 0.52)
# Lets two objects share a colour, so that there is something to count.
SAME_COLOUR_SHARE = 0.25
# Shortest and longest side in 64ths of the image's.
SIDES = {"small": (12, 14), "large": (25, 28)}
# 64ths, clearly within each third.
CENTRES = ((0, 20), (25, 39), (44, 64))

MARGIN = 1
GAP = 2

PALETTE = {
    "red": (214, 32, 36),
    "orange": (250, 136, 16),
    "yellow": (252, 224, 40),
    "green": (24, 150, 56),
    "blue": (30, 72, 216),
    "purple": (136, 36, 168),
    "black": (22, 22, 24),
    "white": (246, 246, 244),
}
TINT = 9
MIN_SIDE = 16  # pixels
BACKGROUND = (146, 186)

_MAX_DRAWS = 10_000

Rectangle = tuple[int, int, int, int]


class Variety(NamedTuple):
    """Limits of a scene's variety: the first `colours` and `shapes`, at most `objects`."""

    colours: int = len(COLOURS)
    shapes: int = len(SHAPES)
    objects: int = len(OBJECT_COUNT_PROBABILITIES)


MAX_VARIETY = Variety()
MIN_VARIETY = Variety(2, 2, 1)


def sample_scene(
    seed: int,
    index: int,
    split: Split = "train",
    image_size: int = 64,
    attempt: int = 0,
    min_objects: int = 1,
    variety: Variety = MAX_VARIETY,
) -> Scene:
    """Draw scene `index` of a split, the same at every `image_size` (side in pixels).

    `attempt` draws another scene with as many objects; `min_objects` is a lower bound (ignored by
    `swaps` and `unseen`, which have at least 2).
    """
    bounds = zip(MIN_VARIETY, variety, MAX_VARIETY)
    if not all(low <= number <= high for low, number, high in bounds):
        raise ValueError(f"{variety} is not between {MIN_VARIETY} and {MAX_VARIETY}")
    if index < 0 or image_size < MIN_SIDE:
        raise ValueError(
            f"a scene needs index >= 0 and image_size >= {MIN_SIDE}, got {index} and {image_size}"
        )
    key = f"{split}-{seed}-{index}"
    probabilities = OBJECT_COUNT_PROBABILITIES[: variety.objects]
    thresholds = np.cumsum(probabilities)[:-1] / sum(probabilities)
    count = 1 + int((make_rng(seed, 0, key, "objects").random() >= thresholds).sum())
    count = max(count, 2 if split in ("swaps", "unseen") else min_objects)
    rng = make_rng(seed, 0, key, f"scene {attempt}")
    for _ in range(_MAX_DRAWS):
        scene = _random_scene(rng, key, count, image_size, variety)
        if split_of(scene) == split:
            return scene
    raise RuntimeError(f"no scene of split {split!r} in {_MAX_DRAWS} draws")


def _random_scene(
    rng: np.random.Generator, key: str, count: int, image_size: int, variety: Variety
) -> Scene:
    names = _names(rng, count, variety)
    sizes = [SIZES[number] for number in rng.integers(len(SIZES), size=count)]
    rectangles, places = _layout(rng, sizes)
    scale = image_size / LATTICE
    objects = tuple(
        Obj(
            shape=SHAPES[name % variety.shapes],
            colour=COLOURS[name // variety.shapes],
            size=size,
            box=_pixels(rectangle, scale),
            place=place,
        )
        for name, size, rectangle, place in zip(names, sizes, rectangles, places, strict=True)
    )
    grey = int(rng.integers(BACKGROUND[0], BACKGROUND[1] + 1))
    background = rng.integers(grey - 4, grey + 5, size=3)
    tints = rng.integers(-TINT, TINT + 1, size=(count, 3))
    return Scene(
        key=key,
        image_size=image_size,
        objects=objects,
        background=_rgb(background),
        tints=tuple(
            _rgb(np.clip(PALETTE[obj.colour] + tint, 0, 255))
            for obj, tint in zip(objects, tints, strict=True)
        ),
    )


def _names(rng: np.random.Generator, count: int, variety: Variety) -> np.ndarray:
    """Draw distinct numbers of colour and shape together."""
    allow_same_colour = rng.random() < SAME_COLOUR_SHARE
    while True:
        names = rng.permutation(variety.colours * variety.shapes)[:count]
        if allow_same_colour or len(set(names // variety.shapes)) == count:
            return names


def moved(scene: Scene, number: int, rng: np.random.Generator) -> Scene | None:
    """Move one object of a scene to another place, of the same size; None without room."""
    scale = scene.image_size / LATTICE
    lattice = [tuple(round(value / scale) for value in obj.box) for obj in scene.objects]
    side = lattice[number][2]
    others = lattice[:number] + lattice[number + 1 :]
    for cell in rng.permutation(9):
        row, column = divmod(int(cell), 3)
        rectangle = (_start(rng, side, column), _start(rng, side, row), side, side)
        place = place_name(row, column)
        same_place = place == scene.objects[number].place
        if not same_place and not any(_touch(rectangle, other) for other in others):  # type: ignore[arg-type]
            obj = scene.objects[number]._replace(box=_pixels(rectangle, scale), place=place)
            objects = (*scene.objects[:number], obj, *scene.objects[number + 1 :])
            return scene._replace(key=f"{scene.key}-moved-{number}-{cell}", objects=objects)
    return None


def _layout(rng: np.random.Generator, sizes: list[str]) -> tuple[list[Rectangle], list[str]]:
    """Draw non-overlapping rectangles in different places, all anew if one does not fit."""
    while True:
        cells = rng.permutation(9)[: len(sizes)]
        rectangles = [_rectangle(rng, size, int(cell)) for size, cell in zip(sizes, cells)]
        if not any(
            _touch(a, b) for number, a in enumerate(rectangles) for b in rectangles[number + 1 :]
        ):
            return rectangles, [place_name(*divmod(int(cell), 3)) for cell in cells]


def _rectangle(rng: np.random.Generator, size: str, cell: int) -> Rectangle:
    side = int(rng.integers(SIDES[size][0], SIDES[size][1] + 1))
    row, column = divmod(cell, 3)
    return _start(rng, side, column), _start(rng, side, row), side, side


def _start(rng: np.random.Generator, side: int, third: int) -> int:
    """Draw a start such that the centre lies in the third and the object inside the image."""
    low, high = CENTRES[third]
    first = max(MARGIN, -(-(2 * low - side) // 2))
    last = min(LATTICE - MARGIN - side, (2 * high - side) // 2)
    return int(rng.integers(first, last + 1))


def _touch(a: Rectangle, b: Rectangle) -> bool:
    return (
        a[0] < b[0] + b[2] + GAP
        and b[0] < a[0] + a[2] + GAP
        and a[1] < b[1] + b[3] + GAP
        and b[1] < a[1] + a[3] + GAP
    )


def _pixels(rectangle: Rectangle, scale: float) -> tuple[float, float, float, float]:
    x, y, width, height = (round(value * scale, 2) for value in rectangle)
    return x, y, width, height


def _rgb(values: np.ndarray) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in values)
    return red, green, blue


MAX_ATTEMPTS = 200


def distinct_scenes(
    seed: int,
    count: int,
    split: Split = "val",
    image_size: int = 64,
    variety: Variety = MAX_VARIETY,
) -> Iterator[Scene]:
    """Draw scenes 0 .. count - 1 of a split with captions that tell them apart."""
    # A clash is drawn again with as many objects; `ambiguous_share` counts the captions that remain
    # ambiguous after `MAX_ATTEMPTS`.
    scenes: list[Scene] = []
    previous_captions: list[list[SceneCaption]] = []
    for index in range(count):
        for attempt in range(MAX_ATTEMPTS):
            scene = sample_scene(seed, index, split, image_size, attempt, variety=variety)
            texts = captions(scene)
            clash = any(
                _any_true(texts, other) or _any_true(others, scene)
                for other, others in zip(scenes, previous_captions, strict=True)
            )
            if not clash:
                break
        scenes.append(scene)
        previous_captions.append(texts)
        yield scene


def ambiguous_share(scenes: Sequence[Scene]) -> float:
    """Return the share of captions that, read leniently, are true of another scene of the list."""
    ambiguous = total = 0
    for number, scene in enumerate(scenes):
        for caption in captions(scene):
            total += 1
            ambiguous += any(
                _any_true([caption], other)
                for position, other in enumerate(scenes)
                if position != number
            )
    return ambiguous / max(total, 1)


def _any_true(texts: Sequence[SceneCaption], scene: Scene) -> bool:
    shape_colours = {(obj.shape, obj.colour) for obj in scene.objects}
    return any(
        # Every caption names each object's shape and colour, which rules out most scenes at once.
        all((noun.shape, noun.colour) in shape_colours for noun in caption.meaning.nouns)
        and holds(caption.meaning, scene, lenient=True)
        for caption in texts
    )
