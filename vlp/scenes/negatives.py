"""Hard negatives: two images and two captions, each caption true of exactly one image.

Captions and images of a pair differ in one thing: place, relation, order of nouns, colour binding
or distance.
"""

from __future__ import annotations

from itertools import combinations
from typing import Literal, NamedTuple, get_args

import numpy as np

from vlp.data.stream.rng import make_rng
from vlp.scenes.captions import SceneCaption, draw_style, fill
from vlp.scenes.graph import LATTICE, Scene, gap, nearness, truth
from vlp.scenes.sample import (
    MAX_VARIETY,
    Variety,
    held_out_pairs,
    move_object,
    sample_scene,
    split_of,
    swap_family,
)

# Neither the texts alone nor bags of words show which caption belongs to which image.
SwapKind = Literal["place", "relation", "order", "binding", "distance"]
SWAP_KINDS: tuple[SwapKind, ...] = get_args(SwapKind)


def swap_kinds(variety: Variety) -> tuple[SwapKind, ...]:
    """Return the default kinds of swap of a corpus; all but `place` need two objects."""
    if variety.objects == 1:
        return ("place",)
    return tuple(kind for kind in SWAP_KINDS if kind != "distance")


PATTERNS = (
    "N0 R01 N1",
    "N0 is R01 N1",
    "there is N0 R01 N1",
    "R01 N1 is N0",
    "N0 with N1 B10",
    "a picture of N0 R01 N1",
)
# Kinds of swap with other patterns.
PATTERNS_OF: dict[SwapKind, tuple[str, ...]] = {
    "place": ("N0 P0", "there is N0 P0", "P0 there is N0", "P0 , N0", "a picture of N0 P0"),
    "distance": (
        "N0 and N1 are A01",
        "N0 and N1 , A01",
        "there are N0 and N1 , A01",
        "A01 , N0 and N1",
        "a picture of N0 and N1 , A01",
    ),
}

_MAX_ATTEMPTS = 1000
_MAX_MOVES = 20
_FIRST_NEW_INDEX = 1 << 40  # of scenes that no training corpus has


class SwapPair(NamedTuple):
    """Two images with captions: `caption` is true of `scene` only, `foil` of `twin` only."""

    kind: SwapKind
    scene: Scene
    twin: Scene
    caption: SceneCaption
    foil: SceneCaption


def sample_swap(
    seed: int,
    index: int,
    kind: SwapKind,
    split: Literal["swaps", "unseen", "train"] = "swaps",
    image_size: int = 64,
    variety: Variety = MAX_VARIETY,
) -> SwapPair:
    """Draw pair `index` of a split; only `train` has no pair of objects that is held out."""
    # A `place` swap is about a single object, and only pairs are held out: in `swaps` it has new
    # images of contents of training.
    if kind == "place" and split == "swaps":
        split, index = "train", index + _FIRST_NEW_INDEX
    for attempt in range(_MAX_ATTEMPTS):
        min_objects = 1 if kind == "place" else 2
        scene = sample_scene(seed, index, split, image_size, attempt, min_objects, variety)
        rng = make_rng(seed, 0, scene.key, f"swap {kind} {attempt}")
        pairs: list[tuple[int, ...]] = (
            list(held_out_pairs(scene, split))
            if split == "swaps" or split == "unseen"
            else list(combinations(range(len(scene.objects)), min_objects))
        )
        pair = pairs[int(rng.integers(len(pairs)))]
        swap = swap_pair(scene, kind, pair if rng.random() < 0.5 else pair[::-1], rng)
        if swap is None:
            continue
        # The twin may belong to a split that training must not see.
        if split == "train" and split_of(swap.twin) in ("swaps", "unseen"):
            continue
        if rng.random() < 0.5:
            return swap
        return SwapPair(kind, swap.twin, swap.scene, swap.foil, swap.caption)
    raise RuntimeError(f"no {kind} swap for scene {index} of split {split!r}")


def swap_pair(
    scene: Scene, kind: SwapKind, pair: tuple[int, ...], rng: np.random.Generator
) -> SwapPair | None:
    """Swap the objects `pair` (the caption's subject first).

    None without room, or if a caption is not clearly true of one image and false of the other.
    """
    patterns = PATTERNS_OF.get(kind, PATTERNS)
    pattern = patterns[int(rng.integers(len(patterns)))]
    style = draw_style(rng)
    sizes = [False] * len(scene.objects)
    # `relation` exchanges two boxes and inverts the relation word; `order` exchanges the nouns
    # instead. Sizes stay with their boxes.
    if kind == "place":
        pair = pair[:1]
        twin = move_object(scene, pair[0], rng)
    elif kind == "distance":
        twin = _move_second(scene, pair[0], pair[1], rng)
    else:
        twin = _exchange(scene, pair[0], pair[1], "colour" if kind == "binding" else "box")
    if twin is None:
        return None
    foil = fill(twin, pattern, pair[::-1] if kind == "order" else pair, sizes, style)
    caption = fill(scene, pattern, pair, sizes, style)
    answers = [truth(text.meaning, image) for image in (scene, twin) for text in (caption, foil)]
    if answers != [True, False, False, True]:
        return None
    return SwapPair(kind, scene, twin, caption, foil)


def _move_second(scene: Scene, first: int, second: int, rng: np.random.Generator) -> Scene | None:
    """Move the second object from near to far, or from far to near; None if this fails."""
    before = nearness(scene, first, second)
    if before is None or _share_patch(scene, first, second):
        return None
    for _ in range(_MAX_MOVES):
        twin = move_object(scene, second, rng)
        if twin is None:
            return None
        same_family = swap_family(twin, first, second) == swap_family(scene, first, second)
        changed = nearness(twin, first, second) not in (None, before)
        if same_family and changed and not _share_patch(twin, first, second):
            return twin
    return None


def _share_patch(scene: Scene, first: int, second: int) -> bool:
    # A patch with both objects would show a model without positions that they are near.
    return gap(scene.objects[first], scene.objects[second], scene.image_size) <= LATTICE // 6


def _exchange(scene: Scene, first: int, second: int, attribute: Literal["colour", "box"]) -> Scene:
    objects, tints = list(scene.objects), list(scene.tints)
    a, b = objects[first], objects[second]
    if attribute == "colour":
        objects[first] = a._replace(colour=b.colour)
        objects[second] = b._replace(colour=a.colour)
        tints[first], tints[second] = tints[second], tints[first]
    else:
        objects[first] = a._replace(box=b.box, place=b.place, size=b.size)
        objects[second] = b._replace(box=a.box, place=a.place, size=a.size)
    key = f"{scene.key}-{attribute}-{first}-{second}"
    return scene._replace(key=key, objects=tuple(objects), tints=tuple(tints))
