"""ARC tasks: files, symmetries (turns and colour permutations), and rules that generate pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator
from scipy import ndimage

from vlp.config import Config, ConfigError
from vlp.data.shards.tar import read_files
from vlp.data.stream.rng import stable_hash
from vlp.io import parse_json

# (rows, columns) int64, colours 0 to 9; at most 30 of either.
Grid = np.ndarray

COLOURS = 10
LARGEST = 30


class GridPair(NamedTuple):
    """Input grid and output grid of an example."""

    input: Grid
    output: Grid


class ArcTask(NamedTuple):
    """A task's pairs: `train` pairs are examples of its rule, `test` pairs are to be solved."""

    name: str
    train: tuple[GridPair, ...]
    test: tuple[GridPair, ...]


def read_tasks(path: str, names: Sequence[str]) -> dict[str, ArcTask]:
    """Read tasks by name, in the order of `names`.

    Args:
        path: a folder, searched at every depth, or a tar file of a folder.
        names: file names without `.json`, such as 67a3c6ac.
    """
    selection, tasks = set(names), {}
    for name, where, content in _json_files(path):
        if name not in selection:
            continue
        if name in tasks:
            raise ConfigError(f"{path}: task {name} has two files; the second is {where}")
        tasks[name] = _parse(name, where, content)
    if missing := [name for name in names if name not in tasks]:
        raise ConfigError(f"{path}: there are no tasks {', '.join(missing)}")
    return {name: tasks[name] for name in names}


def _json_files(path: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, location for messages, and content."""
    root = Path(path)
    if root.is_dir():
        for file in sorted(root.rglob("*.json")):
            yield file.stem, str(file), file.read_bytes()
        return
    if not root.is_file():
        raise ConfigError(f"{path}: there is neither a folder nor a tar file of ARC tasks")
    for name, content in read_files(root, lambda name: name.suffix == ".json"):
        yield name.stem, f"{path}, {name}", content


def _parse(name: str, where: str, content: bytes) -> ArcTask:
    try:
        values = parse_json(content)
        train, test = (
            tuple(_pair(pair, f"{part} {number}") for number, pair in enumerate(values[part]))
            for part in ("train", "test")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: no ARC task ({error})") from error
    if not train or not test:
        raise ConfigError(f"{where}: {len(train)} train and {len(test)} test pairs; both need one")
    return ArcTask(name, train, test)


def _pair(values: Any, where: str) -> GridPair:
    return GridPair(
        _grid(values["input"], f"{where} input"), _grid(values["output"], f"{where} output")
    )


def _grid(values: Any, where: str) -> Grid:
    grid = np.array(values)  # raises ValueError for rows of different length
    if (
        grid.ndim != 2
        or grid.dtype.kind != "i"
        or not 0 < min(grid.shape) <= max(grid.shape) <= LARGEST
    ):
        raise ValueError(
            f"{where}: a grid has 1 to {LARGEST} rows of 1 to {LARGEST} integers, not {grid.dtype} "
            f"{grid.shape}"
        )
    if not ((grid >= 0) & (grid < COLOURS)).all():
        raise ValueError(f"{where}: colours are 0 to 9, not {grid.min()} to {grid.max()}")
    return grid.astype(np.int64)


# Rotations are counter-clockwise.
Turn = Literal[
    "identity", "quarter", "half", "three-quarter", "left-right", "top-bottom", "transpose",
    "anti-transpose",
]  # fmt: skip

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

# A fifth of the variants is held out for evaluation.
_HELD_OUT_OF = 5
_TRIES = 200


class Symmetry(Config):
    """Transformations of both grids of a pair that keep the task's rule."""

    turns: tuple[Turn, ...] = Field(
        ("identity",), description="a group: with any two turns also their composition"
    )
    colours: tuple[Colour, ...] = Field((), description="colours that may be permuted")

    @field_validator("turns")
    @classmethod
    def _require_group(cls, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        # `orbit` finds all variants of a grid only if the turns are a group.
        probe = np.arange(6).reshape(2, 3)
        results = {turn: TURNS[turn](probe).tolist() for turn in TURNS}
        required = {"identity"}
        for first in turns:
            for second in turns:
                composed = TURNS[second](TURNS[first](probe)).tolist()
                required |= {turn for turn, result in results.items() if result == composed}
        if missing := sorted(required - set(turns)):
            raise ValueError(f"turns {', '.join(turns)} compose to {', '.join(missing)}: add them")
        return turns

    @field_validator("colours")
    @classmethod
    def _require_different(cls, colours: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(colours)) < len(colours):
            raise ValueError(f"colours {list(colours)} must be different")
        return colours


class GridVariant(NamedTuple):
    """A transformation of grids: turn, then replace colour c by `colours[c]`."""

    turn: str = "identity"
    colours: tuple[int, ...] = tuple(range(COLOURS))

    def __call__(self, grid: Grid) -> Grid:
        """Return a transformed copy of a grid."""
        return np.array(self.colours)[TURNS[self.turn](grid)]

    @property
    def held_out(self) -> bool:
        """Return whether only evaluation uses the variant; False for the identity."""
        # A hash holds out the same variants in every run.
        if self == GridVariant():
            return False
        return stable_hash("variants", self.turn, *self.colours) % _HELD_OUT_OF == 0


def draw_variant(symmetry: Symmetry, rng: np.random.Generator) -> GridVariant:
    """Draw a variant that is not held out; the identity may be drawn."""
    for _ in range(_TRIES):
        variant = _draw(symmetry, rng)
        if not variant.held_out:
            return variant
    return GridVariant()


def held_out_variants(
    symmetry: Symmetry, count: int, rng: np.random.Generator
) -> tuple[GridVariant, ...]:
    """Draw different held-out variants: `count`, or fewer if the symmetry has fewer."""
    variants: dict[GridVariant, None] = {}
    for _ in range(_TRIES * count):
        if len(variants) >= count:
            break
        variant = _draw(symmetry, rng)
        if variant.held_out:
            variants[variant] = None
    return tuple(variants)


def orbit(grid: Grid, symmetry: Symmetry) -> tuple[tuple[int, int], bytes]:
    """Return a key that two grids share if and only if they are variants of each other."""
    colours = set(symmetry.colours)
    keys = []
    for turn in symmetry.turns:
        turned = TURNS[turn](grid)
        # Colours that may be permuted are numbered, from COLOURS on, by first appearance.
        numbers: dict[int, int] = {}
        cells = [
            numbers.setdefault(colour, COLOURS + len(numbers)) if colour in colours else colour
            for colour in turned.flatten().tolist()
        ]
        keys.append((turned.shape, bytes(cells)))
    return min(keys)


def _draw(symmetry: Symmetry, rng: np.random.Generator) -> GridVariant:
    turn = symmetry.turns[int(rng.integers(len(symmetry.turns)))]
    colours = list(range(COLOURS))
    permutation = rng.permutation(list(symmetry.colours)).astype(int).tolist()
    for old, new in zip(symmetry.colours, permutation, strict=True):
        colours[old] = new
    return GridVariant(turn, tuple(colours))


EVERY_TURN = tuple(TURNS)
MIRRORS = ("identity", "half", "left-right", "top-bottom")
EVERY_COLOUR = tuple(range(COLOURS))


class Rule(NamedTuple):
    """A task's rule as a generator of pairs."""

    # Rows and columns of the largest grid of a pair.
    largest: int
    # (rng, side) -> input grid; neither it nor its output grid has a longer side.
    draw: Callable[[np.random.Generator, int], Grid]
    # Input grid -> output grid.
    answer: Callable[[Grid], Grid]
    symmetry: Symmetry


def _symmetry(turns: tuple[str, ...], colours: tuple[int, ...]) -> Symmetry:
    return Symmetry.model_validate({"turns": turns, "colours": colours})


def _colourful(
    smallest: int, largest: int, colours: tuple[int, ...] = EVERY_COLOUR
) -> Callable[[np.random.Generator, int], Grid]:
    """Return a function that draws square grids of two or more colours."""

    def draw(rng: np.random.Generator, side: int) -> Grid:
        size = int(rng.integers(smallest, min(largest, side) + 1))
        palette = rng.choice(colours, int(rng.integers(2, len(colours) + 1)), replace=False)
        return rng.choice(palette, (size, size))

    return draw


def _narrow(rng: np.random.Generator, side: int) -> Grid:
    """Draw a grid of two to six colours, at most half of `side` wide."""
    rows, columns = (int(rng.integers(3, limit + 1)) for limit in (min(side, 5), min(side // 2, 4)))
    palette = rng.choice(COLOURS, int(rng.integers(2, 7)), replace=False)
    return rng.choice(palette, (rows, columns))


def _blocks(rng: np.random.Generator, side: int) -> Grid:
    """Draw scattered cells of colour 3 on black (0)."""
    rows, columns = rng.integers(3, min(side, 6) + 1, 2).tolist()
    return 3 * (rng.random((rows, columns)) < rng.uniform(0.3, 0.6)).astype(np.int64)


def _upper(rng: np.random.Generator, side: int) -> Grid:
    """Draw 3 x 3 cells, colours 1 or 2 on black, with a black lowest row."""
    grid = int(rng.integers(1, 3)) * (rng.random((3, 3)) < 0.5).astype(np.int64)
    grid[2] = 0
    grid[int(rng.integers(2)), int(rng.integers(3))] = 1
    return grid


def _single_object(rng: np.random.Generator, side: int) -> Grid:
    """Draw one object of one colour, grown cell by cell, on black."""
    rows, columns = rng.integers(6, min(side, 12) + 1, 2).tolist()
    grid = np.zeros((rows, columns), dtype=np.int64)
    colour = int(rng.integers(1, COLOURS))
    # A window bounds the object: those of the task's file span at most 6 cells.
    height, width = (int(rng.integers(2, min(limit, 6) + 1)) for limit in (rows, columns))
    top, left = int(rng.integers(rows - height + 1)), int(rng.integers(columns - width + 1))
    window = grid[top : top + height, left : left + width]
    window[int(rng.integers(height)), int(rng.integers(width))] = colour
    for _ in range(int(rng.integers(3, height * width + 1))):
        neighbours = np.argwhere(ndimage.binary_dilation(window > 0) & (window == 0))
        if len(neighbours):
            window[tuple(neighbours[int(rng.integers(len(neighbours)))])] = colour
    return grid


def _loops(rng: np.random.Generator, side: int) -> Grid:
    """Draw green (3) outlines, closed or with a gap, and stray green cells, on black."""
    size = int(rng.integers(6, min(side, 20) + 1))
    grid = np.zeros((size, size), dtype=np.int64)
    for _ in range(int(rng.integers(1, 2 + size // 4))):
        height, width = (int(rng.integers(3, min(size, 8) + 1)) for _ in range(2))
        top, left = (int(rng.integers(size - extent + 1)) for extent in (height, width))
        outline = np.ones((height, width), dtype=bool)
        outline[1:-1, 1:-1] = False
        # A corner may be missing in a closed loop, as enclosed areas have no diagonal neighbours.
        outline[[0, 0, -1, -1], [0, -1, 0, -1]] = rng.random(4) < 0.5
        if rng.random() < 0.4:
            cells = np.argwhere(outline)
            outline[tuple(cells[int(rng.integers(len(cells)))])] = False
        grid[top : top + height, left : left + width][outline] = 3
    grid[rng.random((size, size)) < 0.03] = 3
    return grid


def _exchange(first: int, second: int) -> Callable[[Grid], Grid]:
    table = np.arange(COLOURS)
    table[[first, second]] = second, first
    return lambda grid: table[grid]


def _fill_enclosed(grid: Grid) -> Grid:
    """Give colour 4 to black areas that do not touch the border."""
    areas, _ = ndimage.label(grid == 0)
    border = np.concatenate([areas[0], areas[-1], areas[:, 0], areas[:, -1]])
    return np.where((grid == 0) & ~np.isin(areas, border), 4, grid)


def _recolour_large(grid: Grid) -> Grid:
    """Give colour 8 to groups of three or more cells of colour 3."""
    groups, _ = ndimage.label(grid == 3)
    sizes = np.bincount(groups.flatten())
    return np.where((groups > 0) & (sizes[groups] >= 3), 8, grid)


def _crop(grid: Grid) -> Grid:
    (box,) = ndimage.find_objects((grid != 0).astype(np.int64))
    return grid[box]


RULES: dict[str, Rule] = {
    # Flip horizontally, and vertically.
    "67a3c6ac": Rule(7, _colourful(3, 7), np.fliplr, _symmetry(MIRRORS, EVERY_COLOUR)),
    "68b16354": Rule(7, _colourful(5, 7), np.flipud, _symmetry(MIRRORS, EVERY_COLOUR)),
    # Transpose.
    "74dd1130": Rule(
        3,
        _colourful(3, 3),
        np.transpose,
        _symmetry(("identity", "half", "transpose", "anti-transpose"), EVERY_COLOUR),
    ),
    # Rotate by 180 degrees.
    "6150a2bd": Rule(
        3, _colourful(3, 3), lambda grid: np.rot90(grid, 2), _symmetry(EVERY_TURN, EVERY_COLOUR)
    ),
    # Repeat the grid side by side.
    "a416b8f3": Rule(
        8, _narrow, lambda grid: np.hstack([grid, grid]), _symmetry(MIRRORS, EVERY_COLOUR)
    ),
    # Exchange colours 5 and 8.
    "d511f180": Rule(
        5,
        _colourful(3, 5, tuple(range(1, COLOURS))),
        _exchange(5, 8),
        _symmetry(EVERY_TURN, (0, 1, 2, 3, 4, 6, 7, 9)),
    ),
    # Move everything down by one row.
    "25ff71a9": Rule(
        3,
        _upper,
        lambda grid: np.roll(grid, 1, 0),
        _symmetry(("identity", "left-right"), EVERY_COLOUR),
    ),
    "67385a82": Rule(6, _blocks, _recolour_large, _symmetry(EVERY_TURN, ())),
    # Crop to the object.
    "1cf80156": Rule(12, _single_object, _crop, _symmetry(EVERY_TURN, EVERY_COLOUR[1:])),
    "00d62c1b": Rule(20, _loops, _fill_enclosed, _symmetry(EVERY_TURN, (1, 2, 3, 5, 6, 7, 8, 9))),
}
