from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlp.scenes.graph import COLOURS, PLACES, SHAPES, SIZES
from vlp.scenes.sample import sample_scene
from vlp.scenes.splits import SPLITS, split_of

indices = st.integers(0, 10**9)


@given(indices, st.integers(0, 10**6), st.sampled_from(SPLITS))
def test_a_scene_is_a_function_of_its_arguments(index, seed, split) -> None:
    scene = sample_scene(seed, index, split)
    assert scene == sample_scene(seed, index, split)
    assert scene._replace(key="") != sample_scene(seed, index + 1, split)._replace(key="")
    assert scene._replace(key="") != sample_scene(seed + 1, index, split)._replace(key="")
    assert split_of(scene) == split


@given(indices, st.sampled_from([16, 33, 64, 96, 224]))
def test_objects_lie_apart_inside_the_image_and_their_place(index, size) -> None:
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
def test_the_same_graph_at_every_image_size(index) -> None:
    small, large = sample_scene(0, index, image_size=64), sample_scene(0, index, image_size=256)
    assert [obj._replace(box=(0, 0, 0, 0)) for obj in small.objects] == [
        obj._replace(box=(0, 0, 0, 0)) for obj in large.objects
    ]
    for one, other in zip(small.objects, large.objects, strict=True):
        assert tuple(4 * value for value in one.box) == other.box


def test_every_value_occurs_about_as_often_as_meant() -> None:
    scenes = [sample_scene(0, index) for index in range(1500)]
    objects = [obj for scene in scenes for obj in scene.objects]
    counts = Counter(len(scene.objects) for scene in scenes)
    assert [counts[number] / 1500 for number in (1, 2, 3)] == pytest.approx(
        [0.08, 0.4, 0.52], abs=0.05
    )
    for name, values in (("colour", COLOURS), ("shape", SHAPES), ("size", SIZES)):
        shares = Counter(getattr(obj, name) for obj in objects)
        assert set(shares) == set(values)
        for value in values:
            assert shares[value] / len(objects) == pytest.approx(1 / len(values), rel=0.25)
    repeated = [len({obj.colour for obj in s.objects}) < len(s.objects) for s in scenes]
    assert 0.02 < sum(repeated) / len(scenes) < 0.1
    assert set(PLACES) == {obj.place for obj in objects}
    area = sum(obj.box[2] * obj.box[3] for obj in objects) / len(objects) / 64**2
    assert area == pytest.approx(0.108, abs=0.005)


def test_attempts_differ_but_keep_the_number_of_objects() -> None:
    for index in range(20):
        first, second = (sample_scene(0, index, attempt=attempt) for attempt in (0, 1))
        assert first.objects != second.objects
        assert len(first.objects) == len(second.objects)


@pytest.mark.parametrize(("index", "size"), [(-1, 64), (0, 8)])
def test_bad_numbers_are_refused(index, size) -> None:
    with pytest.raises(ValueError, match="index >= 0 and image_size >= 16"):
        sample_scene(0, index, image_size=size)
