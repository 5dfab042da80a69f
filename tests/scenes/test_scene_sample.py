"""Scenes: a function of index and seed, told apart, in splits that never meet."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlp.scenes.captions import captions
from vlp.scenes.graph import PLACES, Obj, Scene, holds, main_relation, relation_holds
from vlp.scenes.negatives import SWAP_KINDS, swap_pair
from vlp.scenes.sample import (
    SPLITS,
    ambiguous_share,
    content,
    distinct_scenes,
    held_out_pairs,
    sample_scene,
    split_of,
    swap_family,
)

indices = st.integers(0, 10**9)


@given(indices, st.integers(0, 10**6), st.sampled_from(SPLITS))
def test_a_scene_is_a_function_of_its_arguments(index, seed, split):
    scene = sample_scene(seed, index, split)
    assert scene == sample_scene(seed, index, split)
    assert scene._replace(key="") != sample_scene(seed, index + 1, split)._replace(key="")
    assert scene._replace(key="") != sample_scene(seed + 1, index, split)._replace(key="")
    assert split_of(scene) == split


@given(indices, st.sampled_from([16, 33, 64, 96, 224]))
def test_objects_lie_apart_inside_the_image_and_their_place(index, size):
    scene = sample_scene(1, index, image_size=size)
    for obj in scene.objects:
        x, y, width, height = obj.box
        assert x >= 0
        assert y >= 0
        assert x + width <= size
        assert y + height <= size
        column, row = int((x + width / 2) * 3 / size), int((y + height / 2) * 3 / size)
        assert PLACES[3 * row + column] == obj.place
    for one, other in combinations(scene.objects, 2):
        across = min(one.box[0] + one.box[2], other.box[0] + other.box[2]) > max(
            one.box[0], other.box[0]
        )
        down = min(one.box[1] + one.box[3], other.box[1] + other.box[3]) > max(
            one.box[1], other.box[1]
        )
        assert not (across and down)
        assert one.place != other.place
        assert (one.colour, one.shape) != (other.colour, other.shape)


@given(indices)
def test_the_same_graph_at_every_image_size(index):
    small, large = sample_scene(0, index, image_size=64), sample_scene(0, index, image_size=256)
    assert [obj._replace(box=(0, 0, 0, 0)) for obj in small.objects] == [
        obj._replace(box=(0, 0, 0, 0)) for obj in large.objects
    ]
    for one, other in zip(small.objects, large.objects, strict=True):
        assert tuple(4 * value for value in one.box) == other.box


def _share(scenes) -> float:
    """Every caption against every other scene."""
    fits = [
        any(holds(caption.meaning, other, lenient=True) for other in scenes if other is not scene)
        for scene in scenes
        for caption in captions(scene)
    ]
    return sum(fits) / len(fits)


def test_no_caption_fits_a_second_scene():
    scenes = list(distinct_scenes(0, 96))
    assert _share(scenes) == 0
    assert ambiguous_share(scenes) == 0
    assert {split_of(scene) for scene in scenes} == {"val"}


def test_redrawing_keeps_the_number_of_objects_and_the_prefix():
    scenes = list(distinct_scenes(0, 64))
    assert scenes[:20] == list(distinct_scenes(0, 20))
    for index, scene in enumerate(scenes):
        assert len(scene.objects) == len(sample_scene(0, index, "val").objects)


UNSEEN = {
    ("horizontal", frozenset({"circle", "star"})),
    ("vertical", frozenset({"square", "triangle"})),
    ("vertical", frozenset({"cross", "star"})),
}


def _families(scene) -> set:
    """Direction and shapes of each pair, straight from the boxes."""
    found = set()
    for one, other in combinations(scene.objects, 2):
        right = abs(other.box[0] + other.box[2] / 2 - one.box[0] - one.box[2] / 2)
        down = abs(other.box[1] + other.box[3] / 2 - one.box[1] - one.box[3] / 2)
        direction = "horizontal" if right >= down else "vertical"
        found.add((direction, frozenset({one.shape, other.shape})))
    return found


def test_training_never_shows_the_unseen_relations():
    for index in range(400):
        assert not _families(sample_scene(index % 3, index)) & UNSEEN
    for index in range(60):
        assert _families(sample_scene(0, index, "unseen")) & UNSEEN


def test_swapping_a_pair_stays_in_its_family():
    rng = np.random.default_rng(0)
    swapped = 0
    for index in range(200):
        scene = sample_scene(0, index, "swaps")
        for pair in held_out_pairs(scene, "swaps"):
            for kind in SWAP_KINDS[1:]:  # `place` is about one object
                result = swap_pair(scene, kind, pair, rng)
                if result is not None:
                    swapped += 1
                    assert swap_family(result.twin, *pair) == swap_family(scene, *pair)
                    # So no twin of a held-out caption was ever trained on.
                    assert split_of(result.twin) in ("swaps", "unseen")
    assert swapped > 200


def test_contents_of_train_and_val_never_meet_whatever_the_seeds():
    train = {content(sample_scene(seed, index)) for seed in (0, 1) for index in range(800)}
    val = {content(sample_scene(seed, index, "val")) for seed in (0, 7) for index in range(200)}
    assert not train & val


@pytest.mark.parametrize("split", ["swaps", "unseen"])
def test_held_out_splits_have_their_pairs(split):
    for index in range(40):
        scene = sample_scene(2, index, split)
        assert len(scene.objects) >= 2
        assert held_out_pairs(scene, split)


positions = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 24))


def _scene(first: tuple[int, int, int], second: tuple[int, int, int], scale: float = 1) -> Scene:
    objects = tuple(
        Obj(
            "circle",
            "red",
            "small",
            (round(x * scale, 2), round(y * scale, 2), round(w * scale, 2), round(w * scale, 2)),
            "top",
        )
        for x, y, w in (first, second)
    )
    return Scene("two", round(64 * scale), objects, (0, 0, 0), ((0, 0, 0),) * 2)


@given(positions, positions)
def test_relations_are_read_off_the_centres(first, second):
    scene = _scene(first, second)
    right = (second[0] + second[2] / 2) - (first[0] + first[2] / 2)
    down = (second[1] + second[2] / 2) - (first[1] + first[2] / 2)
    assert relation_holds(scene, 0, "left", 1) == (right >= 8)
    assert relation_holds(scene, 0, "right", 1) == (right <= -8)
    assert relation_holds(scene, 0, "above", 1) == (down >= 8)
    assert relation_holds(scene, 0, "below", 1) == (down <= -8)
    assert relation_holds(scene, 0, "above", 1, lenient=True) == (down > 0)


def test_main_relation_is_the_longer_axis():
    assert main_relation(_scene((0, 0, 10), (30, 20, 10)), 0, 1) == "left"
    assert main_relation(_scene((0, 0, 10), (20, 30, 10)), 0, 1) == "above"
    assert main_relation(_scene((20, 30, 10), (0, 0, 10)), 0, 1) == "below"
    assert main_relation(_scene((30, 20, 10), (0, 0, 10)), 0, 1) == "right"


def test_contents_do_not_depend_on_the_order_of_objects():
    for index in range(50):
        scene = sample_scene(0, index)
        turned = scene._replace(objects=scene.objects[::-1], tints=scene.tints[::-1])
        assert content(turned) == content(scene)
        assert split_of(turned) == split_of(scene)
