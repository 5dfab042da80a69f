"""Variants of tasks: turns, colours, the part that is held out, and orbits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pydantic import ValidationError

from vlp.tasks.grids.arc import (
    TURNS,
    GridVariant,
    Symmetry,
    draw_variant,
    held_out_variants,
    orbit,
)

GRID = np.array([[1, 2, 3], [4, 5, 6]])
EVERYTHING = Symmetry(turns=tuple(TURNS), colours=tuple(range(10)))
MIRRORS = ("identity", "half", "left-right", "top-bottom")
SYMMETRIES = st.sampled_from(
    [
        Symmetry(),
        EVERYTHING,
        Symmetry(turns=MIRRORS, colours=(1, 2, 5)),
        Symmetry(turns=("identity", "transpose"), colours=(0, 3)),
    ]
)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("identity", [[1, 2, 3], [4, 5, 6]]),
        ("quarter", [[3, 6], [2, 5], [1, 4]]),
        ("half", [[6, 5, 4], [3, 2, 1]]),
        ("three-quarter", [[4, 1], [5, 2], [6, 3]]),
        ("left-right", [[3, 2, 1], [6, 5, 4]]),
        ("top-bottom", [[4, 5, 6], [1, 2, 3]]),
        ("transpose", [[1, 4], [2, 5], [3, 6]]),
        ("anti-transpose", [[6, 3], [5, 2], [4, 1]]),
    ],
)
def test_turns(turn, expected):
    assert GridVariant(turn)(GRID).tolist() == expected


def test_colours_are_written_for_others():
    colours = (0, 2, 1, 3, 4, 5, 6, 7, 8, 9)
    assert GridVariant("left-right", colours)(GRID).tolist() == [[3, 1, 2], [6, 5, 4]]


@given(SYMMETRIES, st.integers(0, 1000))
def test_drawn_variants_keep_to_the_symmetry_and_are_not_held_out(symmetry, seed):
    variant = draw_variant(symmetry, np.random.default_rng(seed))
    assert variant.turn in symmetry.turns
    assert sorted(variant.colours) == list(range(10))
    assert all(variant.colours[c] == c for c in range(10) if c not in symmetry.colours)
    assert not variant.held_out


def test_held_out_variants_are_others_and_the_same_each_time():
    first, second = (held_out_variants(EVERYTHING, 20, np.random.default_rng(0)) for _ in range(2))
    assert first == second
    assert len(set(first)) == 20
    assert all(variant.held_out for variant in first)
    rng = np.random.default_rng(1)
    assert not {draw_variant(EVERYTHING, rng) for _ in range(500)} & set(first)
    assert GridVariant() not in first


def test_small_symmetries_give_what_they_have():
    assert held_out_variants(Symmetry(), 5, np.random.default_rng(0)) == ()
    assert draw_variant(Symmetry(), np.random.default_rng(0)) == GridVariant()
    colours = Symmetry(colours=(1, 2, 3))
    every = [
        GridVariant(colours=(0, *order, *range(4, 10)))
        for order in itertools.permutations((1, 2, 3))
    ]
    found = held_out_variants(colours, 100, np.random.default_rng(0))
    assert set(found) == {variant for variant in every if variant.held_out}
    for turns in (tuple(TURNS), MIRRORS):  # a rule about turns alone has something to be asked
        assert held_out_variants(Symmetry(turns=turns), 5, np.random.default_rng(0))


def test_about_a_fifth_is_held_out():
    variants = [
        GridVariant(turn, (*order, *range(5, 10)))
        for turn in TURNS
        for order in itertools.permutations(range(5))
    ]
    share = sum(variant.held_out for variant in variants) / len(variants)
    assert 0.15 < share < 0.25


@given(
    SYMMETRIES,
    arrays.arrays(
        np.int64, st.tuples(st.integers(1, 4), st.integers(1, 4)), elements=st.integers(0, 9)
    ),
    st.integers(0, 1000),
)
def test_variants_are_in_the_same_orbit(symmetry, grid, seed):
    rng = np.random.default_rng(seed)
    colours = list(range(10))
    for before, after in zip(symmetry.colours, rng.permutation(list(symmetry.colours))):
        colours[before] = int(after)
    variant = GridVariant(str(rng.choice(symmetry.turns)), tuple(colours))
    assert orbit(variant(grid), symmetry) == orbit(grid, symmetry)


def test_equal_orbits_are_variants():
    """All 2 x 2 grids of three colours, of which two may be exchanged, by brute force."""
    symmetry = Symmetry(turns=("identity", "left-right"), colours=(1, 2))
    swapped = (0, 2, 1, *range(3, 10))
    variants = [
        GridVariant(turn, c) for turn in symmetry.turns for c in (tuple(range(10)), swapped)
    ]
    grids = [np.array(cells).reshape(2, 2) for cells in itertools.product((0, 1, 2), repeat=4)]
    for first in grids:
        reached = {variant(first).tobytes() for variant in variants}
        for second in grids:
            same = orbit(first, symmetry) == orbit(second, symmetry)
            assert same == (second.tobytes() in reached)


def test_grids_of_other_shape_are_in_other_orbits():
    symmetry = Symmetry(colours=tuple(range(10)))
    assert orbit(np.zeros((1, 4), int), symmetry) != orbit(np.zeros((2, 2), int), symmetry)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"turns": ("identity", "quarter")}, "are also half, three-quarter|are also half"),
        ({"turns": ("half",)}, "are also identity"),
        ({"turns": ("identity", "left-right", "top-bottom")}, "are also half"),
        ({"turns": ("identity", "twice")}, "twice"),
        ({"turns": ()}, "are also identity"),
        ({"colours": (1, 1)}, "different numbers"),
        ({"colours": (10,)}, "less than 10"),
    ],
)
def test_symmetries_that_are_none_are_refused(options, problem):
    with pytest.raises(ValidationError, match=problem):
        Symmetry.model_validate(options)
