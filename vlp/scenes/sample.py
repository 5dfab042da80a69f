"""Random scenes by (seed, split, index), the same at any image size."""

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
SWAP_SHARE = 10  # a tenth of the families of swaps is held out
VAL_SHARE = 8  # an eighth of the contents is for validation


def split_of(scene: Scene) -> Split:
    """Return the split of a scene, a function of its contents alone."""
    # Training never shows some directions of two shapes.
    if held_out_pairs(scene, "unseen"):
        return "unseen"
    # Training never shows some families: a direction (horizontal or vertical) with colours and
    # shapes in any order. A caption and its swapped twin are of one family; otherwise a model could
    # recognise the true caption by its text.
    if held_out_pairs(scene, "swaps"):
        return "swaps"
    # Validation has its own colours, shapes and main relations, or places of a single object.
    if _in_share(VAL_SHARE, "content", *content(scene)):
        return "val"
    return "train"


def held_out_pairs(scene: Scene, split: Literal["swaps", "unseen"]) -> list[tuple[int, int]]:
    """Return the pairs of objects that belong to a split, not to training."""
    pairs = combinations(range(len(scene.objects)), 2)
    if split == "unseen":
        return [pair for pair in pairs if _shape_family(scene, *pair) in UNSEEN_FAMILIES]
    return [pair for pair in pairs if _in_share(SWAP_SHARE, "swap", *swap_family(scene, *pair))]


def swap_family(scene: Scene, first: int, second: int) -> tuple[str, ...]:
    """Return a pair's direction, colours and shapes, which a swap of positions or colours keeps."""
    a, b = scene.objects[first], scene.objects[second]
    return (
        _direction(scene, first, second),
        *sorted((a.colour, b.colour)),
        *sorted((a.shape, b.shape)),
    )


def content(scene: Scene) -> tuple[str, ...]:
    """Return the facts of a scene's captions, regardless of the order of objects."""
    objects = scene.objects
    if len(objects) == 1:
        return (objects[0].colour, objects[0].shape, objects[0].place)
    names = [f"{obj.colour} {obj.shape}" for obj in objects]
    order = sorted(range(len(objects)), key=names.__getitem__)
    relations = [main_relation(scene, a, b) for a, b in combinations(order, 2)]
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


OBJECT_COUNT_PROBABILITIES = (0.08, 0.4, 0.52)  # of one, two and three objects
SAME_COLOUR_SHARE = 0.25  # of scenes that may repeat a colour, so that objects can be counted

# In 64ths of the image's side:
SIDES = {"small": (12, 14), "large": (25, 28)}  # shortest and longest side of an object
CENTRES = ((0, 20), (25, 39), (44, 64))  # clearly within each third
MARGIN = 1  # to the image's border
GAP = 2  # between objects

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
TINT = 9  # largest deviation from the palette
MIN_SIDE = 16  # pixels
BACKGROUND = (146, 186)  # range of grey

_MAX_DRAWS = 10_000

Rectangle = tuple[int, int, int, int]  # left, top, width, height in 64ths


class Variety(NamedTuple):
    """Numbers of colours and shapes (the first ones), and the maximum number of objects."""

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

    Another `attempt` is another scene with as many objects. `swaps` and `unseen` ignore
    `min_objects` and have at least 2.
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
    background = rng.integers(grey - 4, grey + 5, size=3)  # nearly grey
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
    """Draw `count` distinct names, a name being colour index * shapes + shape index."""
    allow_same_colour = rng.random() < SAME_COLOUR_SHARE
    while True:
        names = rng.permutation(variety.colours * variety.shapes)[:count]
        if allow_same_colour or len(set(names // variety.shapes)) == count:
            return names


def move_object(scene: Scene, number: int, rng: np.random.Generator) -> Scene | None:
    """Move an object of a scene to another place; None without room."""
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
    """Draw non-overlapping rectangles, and their different places."""
    while True:
        cells = [divmod(int(cell), 3) for cell in rng.permutation(9)[: len(sizes)]]
        rectangles = []
        for size, (row, column) in zip(sizes, cells):
            side = int(rng.integers(SIDES[size][0], SIDES[size][1] + 1))
            rectangles.append((_start(rng, side, column), _start(rng, side, row), side, side))
        if not any(_touch(a, b) for a, b in combinations(rectangles, 2)):
            return rectangles, [place_name(*cell) for cell in cells]


def _start(rng: np.random.Generator, side: int, third: int) -> int:
    """Draw a left or top edge: the centre lies in a third of the image, the object inside."""
    low, high = CENTRES[third]
    first = max(MARGIN, -(-(2 * low - side) // 2))
    last = min(LATTICE - MARGIN - side, (2 * high - side) // 2)
    return int(rng.integers(first, last + 1))


def _touch(a: Rectangle, b: Rectangle) -> bool:
    """Return whether less than `GAP` is between two rectangles."""
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
    """Yield scenes 0 .. count - 1 of a split, drawn until no caption is true of another scene.

    After `MAX_ATTEMPTS` an ambiguous scene stays; `ambiguous_share` measures them.
    """
    scenes: list[Scene] = []
    previous_captions: list[list[SceneCaption]] = []
    for index in range(count):
        for attempt in range(MAX_ATTEMPTS):
            scene = sample_scene(seed, index, split, image_size, attempt, variety=variety)
            scene_captions = captions(scene)
            is_ambiguous = any(
                _any_true(scene_captions, other) or _any_true(other_captions, scene)
                for other, other_captions in zip(scenes, previous_captions, strict=True)
            )
            if not is_ambiguous:
                break
        scenes.append(scene)
        previous_captions.append(scene_captions)
        yield scene


def ambiguous_share(scenes: Sequence[Scene]) -> float:
    """Return the share of captions that are, in the lenient reading, true of another scene."""
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


def _any_true(candidates: Sequence[SceneCaption], scene: Scene) -> bool:
    shape_colours = {(obj.shape, obj.colour) for obj in scene.objects}
    return any(
        # Shapes and colours, which every caption names, rule out most scenes quickly.
        all((noun.shape, noun.colour) in shape_colours for noun in caption.meaning.nouns)
        and holds(caption.meaning, scene, lenient=True)
        for caption in candidates
    )
