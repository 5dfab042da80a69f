from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlp.scenes.graph import (
    INVERSE,
    PLACES,
    RELATIONS,
    Obj,
    Scene,
    main_relation,
    offset,
    relation_holds,
    relations,
)

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


def test_places_read_from_the_top_left() -> None:
    assert PLACES[0] == "top left"
    assert PLACES[4] == "centre"
    assert PLACES[7] == "bottom"
    assert len(set(PLACES)) == 9


@given(positions, positions)
def test_relations_are_read_off_the_centres(first, second) -> None:
    scene = _scene(first, second)
    right = (second[0] + second[2] / 2) - (first[0] + first[2] / 2)
    down = (second[1] + second[2] / 2) - (first[1] + first[2] / 2)
    assert relation_holds(scene, 0, "left", 1) == (right >= 8)
    assert relation_holds(scene, 0, "right", 1) == (right <= -8)
    assert relation_holds(scene, 0, "above", 1) == (down >= 8)
    assert relation_holds(scene, 0, "below", 1) == (down <= -8)
    assert relation_holds(scene, 0, "above", 1, lenient=True) == (down > 0)


@given(positions, positions)
def test_a_relation_and_its_inverse_mirror_each_other(first, second) -> None:
    scene = _scene(first, second)
    for relation in RELATIONS:
        for lenient in (False, True):
            there = relation_holds(scene, 0, relation, 1, lenient)
            assert there == relation_holds(scene, 1, INVERSE[relation], 0, lenient)
            assert not (there and relation_holds(scene, 0, INVERSE[relation], 1, lenient))
    listed = relations(scene)
    assert {(b, INVERSE[r], a) for a, r, b in listed} == set(listed)


@given(positions, positions, st.sampled_from([17, 32, 100, 224, 333]))
def test_offsets_do_not_depend_on_the_image_size(first, second, size) -> None:
    small, large = _scene(first, second), _scene(first, second, size / 64)
    assert offset(*small.objects, 64) == offset(*large.objects, large.image_size)


def test_main_relation_is_the_longer_axis() -> None:
    assert main_relation(_scene((0, 0, 10), (30, 20, 10)), 0, 1) == "left"
    assert main_relation(_scene((0, 0, 10), (20, 30, 10)), 0, 1) == "above"
    assert main_relation(_scene((20, 30, 10), (0, 0, 10)), 0, 1) == "below"
    assert main_relation(_scene((30, 20, 10), (0, 0, 10)), 0, 1) == "right"
