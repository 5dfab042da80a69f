"""The split of a scene: a fixed function of what is in it, never of seed or index.

No scene of `train` shares its contents with a scene of the other splits, whatever the seeds:

* `unseen`: some pair of objects stands in a relation between shapes that training never shows
  (`UNSEEN_FAMILIES`, e.g. no circle beside a star), for relations with new shapes.
* `swaps`: some pair belongs to a held-out family of swaps. A family is a direction (horizontal or
  vertical) with the pair's colours and shapes in any order, so that a caption, its twin with the
  relation turned round and its twin with the attributes exchanged are all held out together:
  holding out single captions would let a model know the true twin from its text alone.
* `val`: held-out contents (colours, shapes and main relations; for a single object its place).
* `train`: all the rest.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import combinations
from typing import Literal, get_args

from vlp.scenes.graph import Scene, main_relation

Split = Literal["train", "val", "swaps", "unseen"]
SPLITS: tuple[Split, ...] = get_args(Split)

UNSEEN_FAMILIES = frozenset(
    {
        ("horizontal", ("circle", "star")),
        ("vertical", ("square", "triangle")),
        ("vertical", ("cross", "star")),
    }
)
SWAP_SHARE = 10
"""One in so many families of swaps is held out."""

VAL_SHARE = 8
"""One in so many contents is held out for validation."""


def split_of(scene: Scene) -> Split:
    """Return the split of a scene, from its contents alone."""
    if held_out_pairs(scene, "unseen"):
        return "unseen"
    if held_out_pairs(scene, "swaps"):
        return "swaps"
    if _one_in(VAL_SHARE, "content", *content(scene)):
        return "val"
    return "train"


def held_out_pairs(scene: Scene, split: Literal["swaps", "unseen"]) -> list[tuple[int, int]]:
    """Return the pairs of objects that training never shows, for the split's reason."""
    pairs = combinations(range(len(scene.objects)), 2)
    if split == "unseen":
        return [pair for pair in pairs if _shape_family(scene, *pair) in UNSEEN_FAMILIES]
    return [pair for pair in pairs if _one_in(SWAP_SHARE, "swap", *swap_family(scene, *pair))]


def swap_family(scene: Scene, first: int, second: int) -> tuple[str, ...]:
    """Return what every relation or attribute swap of a pair keeps: direction, colours, shapes."""
    one, other = scene.objects[first], scene.objects[second]
    return (
        _direction(scene, first, second),
        *sorted((one.colour, other.colour)),
        *sorted((one.shape, other.shape)),
    )


def content(scene: Scene) -> tuple[str, ...]:
    """Return what every full caption of the scene says at least, in any order."""
    objects = scene.objects
    if len(objects) == 1:
        return (objects[0].colour, objects[0].shape, objects[0].place)
    names = [f"{obj.colour} {obj.shape}" for obj in objects]
    order = sorted(range(len(objects)), key=names.__getitem__)
    stated = [f"{main_relation(scene, a, b)}" for a, b in combinations(order, 2)]
    return (*(names[number] for number in order), *stated)


def _direction(scene: Scene, first: int, second: int) -> str:
    return "horizontal" if main_relation(scene, first, second) in ("left", "right") else "vertical"


def _shape_family(scene: Scene, first: int, second: int) -> tuple[str, tuple[str, ...]]:
    shapes = sorted((scene.objects[first].shape, scene.objects[second].shape))
    return _direction(scene, first, second), tuple(shapes)


@lru_cache(maxsize=1 << 16)
def _one_in(share: int, *words: str) -> bool:
    digest = hashlib.blake2b(" | ".join(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % share == 0
