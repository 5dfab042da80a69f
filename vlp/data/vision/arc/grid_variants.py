"""A task of ARC turned, mirrored and recoloured: the same for what is given and what is asked for.

A variant of a pair belongs to the same task only where the task's rule is the same for it: a rule
that mirrors left and right says something else when the grids are turned by a quarter, and a rule
that speaks of red does not speak of green. A `Symmetry` names what a rule allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from vlp.config import Config
from vlp.data.stream.rng import identity
from vlp.data.vision.arc.tasks import COLOURS, Grid

# Quarters are counter-clockwise.
Turn = Literal[
    "identity",
    "quarter",
    "half",
    "three-quarter",
    "left-right",
    "top-bottom",
    "transpose",
    "anti-transpose",
]

TURNS: dict[str, Callable[[Grid], Grid]] = {
    "identity": lambda grid: grid,
    "quarter": lambda grid: np.rot90(grid),
    "half": lambda grid: np.rot90(grid, 2),
    "three-quarter": lambda grid: np.rot90(grid, 3),
    "left-right": lambda grid: np.fliplr(grid),
    "top-bottom": lambda grid: np.flipud(grid),
    "transpose": lambda grid: grid.T,
    "anti-transpose": lambda grid: np.rot90(grid, 2).T,
}

Colour = Annotated[int, Field(ge=0, lt=COLOURS)]

# One variant in five is kept for evaluation.
_HELD_OUT_OF = 5
_TRIES = 200


class Symmetry(Config):
    """Transformations of both grids of a pair that keep the rule the same."""

    turns: tuple[Turn, ...] = Field(
        ("identity",), description="with any two also what both do one after the other"
    )
    colours: tuple[Colour, ...] = Field((), description="are exchanged for one another")

    @field_validator("turns")
    @classmethod
    def _closed(cls, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        # A rule that allows two turns allows both; and an orbit is one only where all are named.
        probe = np.arange(6).reshape(2, 3)
        results = {turn: TURNS[turn](probe).tolist() for turn in TURNS}
        needed = {"identity"}
        for first in turns:
            for second in turns:
                both = TURNS[second](TURNS[first](probe)).tolist()
                needed |= {turn for turn, result in results.items() if result == both}
        if missing := sorted(needed - set(turns)):
            raise ValueError(f"turns {', '.join(turns)} together are also {', '.join(missing)}")
        return turns

    @field_validator("colours")
    @classmethod
    def _known(cls, colours: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(colours)) < len(colours):
            raise ValueError(f"colours are different numbers from 0 to 9, not {list(colours)}")
        return colours


class GridVariant(NamedTuple):
    """One of the ways to change a task: turn, then write `colours[c]` for colour c."""

    turn: str = "identity"
    colours: tuple[int, ...] = tuple(range(COLOURS))

    def __call__(self, grid: Grid) -> Grid:
        """Return the changed grid, a new one."""
        return np.array(self.colours)[TURNS[self.turn](grid)]

    @property
    def held_out(self) -> bool:
        """Return whether it is held out: the same in every run; never the task as it is."""
        if self == GridVariant():
            return False
        return identity("variants", self.turn, *self.colours) % _HELD_OUT_OF == 0


def draw_variant(symmetry: Symmetry, rng: np.random.Generator) -> GridVariant:
    """Any of the variants that training may use, the unchanged task among them."""
    for _ in range(_TRIES):
        variant = _draw(symmetry, rng)
        if not variant.held_out:
            return variant
    return GridVariant()


def held_out_variants(
    symmetry: Symmetry, count: int, rng: np.random.Generator
) -> tuple[GridVariant, ...]:
    """Different variants kept for evaluation: `count`, or all if there seem to be fewer."""
    found: dict[GridVariant, None] = {}
    for _ in range(_TRIES * max(count, 1)):
        if len(found) >= count:
            break
        variant = _draw(symmetry, rng)
        if variant.held_out:
            found[variant] = None
    return tuple(found)


def orbit(grid: Grid, symmetry: Symmetry) -> tuple[tuple[int, int], bytes]:
    """Return a key that is equal for grids which are variants of each other, and only for those."""
    free = set(symmetry.colours)
    keys = []
    for turn in symmetry.turns:
        turned = TURNS[turn](grid)
        # Free colours are numbered, above the others, in the order in which they come.
        names: dict[int, int] = {}
        cells = [
            names.setdefault(colour, COLOURS + len(names)) if colour in free else colour
            for colour in turned.flatten().tolist()
        ]
        keys.append((turned.shape, bytes(cells)))
    return min(keys)


def _draw(symmetry: Symmetry, rng: np.random.Generator) -> GridVariant:
    turn = symmetry.turns[int(rng.integers(len(symmetry.turns)))]
    colours = list(range(COLOURS))
    drawn = rng.permutation(list(symmetry.colours)).astype(int).tolist()
    for before, after in zip(symmetry.colours, drawn, strict=True):
        colours[before] = after
    return GridVariant(turn, tuple(colours))
