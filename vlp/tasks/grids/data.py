"""Pairs of ARC tasks as batches: new ones by the tasks' rules, or variants of the given ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, field_validator
from scipy import ndimage
from torch import Tensor

from vlp.config import Config, ConfigError
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import MapDatasetConfig, OrderedData, RngFactory, indexed_data
from vlp.tasks.grids.arc import (
    COLOURS,
    LARGEST,
    RULES,
    ArcTask,
    Grid,
    GridPair,
    GridVariant,
    Symmetry,
    draw_variant,
    orbit,
    read_tasks,
)

RIGHT, BELOW, CORNER, PADDING = range(COLOURS, COLOURS + 4)
TOKENS = COLOURS + 4


def to_tokens(grid: Grid, size: int) -> np.ndarray:
    """Return a grid in its template: ((size + 1) ** 2,) int64."""
    rows, columns = grid.shape
    if max(rows, columns) > size:
        raise ValueError(f"a grid of {rows} x {columns} is larger than {size} x {size}")
    template = np.full((size + 1, size + 1), PADDING)
    template[:rows, :columns] = grid
    template[:rows, columns] = RIGHT
    template[rows, :columns] = BELOW
    template[rows, columns] = CORNER
    return template.flatten()


def object_boxes(grid: Grid) -> np.ndarray:
    """Return boxes of a grid's objects, for ViTARC's object encoding (papers.md#vitarc-v12).

    An object is a connected group of cells of one colour, diagonal neighbours included, of any
    colour but the most frequent one (the lowest of several).

    Returns:
        (objects, 4) float32: x, y, width, height in cells, x the column.
    """
    background = int(np.bincount(grid.flatten()).argmax())
    # Colour by colour, then in raster order of their first cells: later boxes paint over earlier.
    boxes = []
    for colour in np.unique(grid).tolist():
        if colour == background:
            continue
        groups, _ = ndimage.label(grid == colour, structure=np.ones((3, 3)))
        for rows, columns in ndimage.find_objects(groups):
            extent = columns.stop - columns.start, rows.stop - rows.start
            boxes.append((columns.start, rows.start, *extent))
    return np.array(boxes, dtype=np.float32).reshape(-1, 4)


_TRIES = 100


class GridTaskConfig(Config):
    """One task of ARC and where its training pairs come from."""

    name: str = Field(description="of its file, as 67a3c6ac")
    source: Literal["rule", "pairs"] = Field(
        "rule", description="new pairs by a rule of vlp.tasks.grids.arc, or the given ones"
    )
    symmetry: Symmetry | None = Field(
        None,
        description="changes that leave the task's rule the same; null is those of a known rule, "
        "or none",
    )

    @property
    def allowed(self) -> Symmetry:
        """Return the known symmetry."""
        if self.symmetry is not None:
            return self.symmetry
        return RULES[self.name].symmetry if self.name in RULES else Symmetry()


class GridDataConfig(MapDatasetConfig):
    """Selection of tasks, and the number of samples and variants."""

    path: str = Field(
        description="folder or tar file of ARC's JSON files", json_schema_extra={"resume": "path"}
    )
    tasks: tuple[GridTaskConfig, ...] = Field(
        min_length=1, description="tasks that are trained and evaluated"
    )
    size: int = Field(LARGEST, ge=1, le=LARGEST, description="rows and columns of the largest grid")
    samples: int = Field(100_000, ge=1, description="of one epoch, over all tasks")
    variants: int = Field(
        20, ge=0, description="held-out variants of each test pair that are evaluated"
    )

    @field_validator("tasks")
    @classmethod
    def _different(cls, tasks: tuple[GridTaskConfig, ...]) -> tuple[GridTaskConfig, ...]:
        names = [task.name for task in tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"a task is named twice: {', '.join(names)}")
        return tasks


class GridSample(NamedTuple):
    """Tokens of both templates, boxes (K, 4) of the input's objects, and the task's number."""

    inputs: Tensor
    outputs: Tensor
    boxes: Tensor
    task: int


class GridBatch(NamedTuple):
    """Pairs as templates."""

    # (B, T) int64, T = (size + 1) ** 2, see `to_tokens`
    inputs: Tensor
    outputs: Tensor
    # (B, K, 4) float32: x, y, width, height in cells of the template, padded by zeros
    boxes: Tensor
    # (B,) int64
    tasks: Tensor
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> GridBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


def grid_sample(pair: GridPair, task: int, size: int) -> GridSample:
    """Return a pair as tensors."""
    inputs, outputs = (torch.from_numpy(to_tokens(grid, size)) for grid in pair)
    return GridSample(inputs, outputs, torch.from_numpy(object_boxes(pair.input)), task)


def open_grids(config: GridDataConfig) -> dict[str, ArcTask]:
    """Return the tasks of a configuration, with all test pairs fitting its size."""
    tasks = read_tasks(config.path, [task.name for task in config.tasks])
    for number, task_config in enumerate(config.tasks):
        where, task = f"data.tasks.{number}: task {task_config.name}", tasks[task_config.name]
        largest = max(max(*pair.input.shape, *pair.output.shape) for pair in task.test)
        if largest > config.size:
            raise ConfigError(
                f"{where} has test grids of {largest} rows or columns, data.size is {config.size}"
            )
        if task_config.source == "rule" and task_config.name not in RULES:
            raise ConfigError(
                f"{where} has no known rule; those with one are {', '.join(RULES)}; with "
                "source: pairs its given pairs are used"
            )
        if task_config.source == "pairs" and not _usable(task, task_config.allowed, config.size):
            raise ConfigError(
                f"{where} has no train pair that fits data.size {config.size} and is no "
                "test input or variant of one"
            )
        _require_symmetry(where, task, task_config)
    return tasks


def orbits_of_tests(task: ArcTask, symmetry: Symmetry) -> set[object]:
    """Return keys of the test inputs and all their variants, which training leaves out."""
    return {orbit(pair.input, symmetry) for pair in task.test}


class GridSamples:
    """Training samples: a variant of a pair of each task in turn, without test inputs."""

    def __init__(self, tasks: Mapping[str, ArcTask], config: GridDataConfig) -> None:
        self.config = config
        self._tasks = [tasks[task_config.name] for task_config in config.tasks]
        self._tests = [
            orbits_of_tests(task, task_config.allowed)
            for task, task_config in zip(self._tasks, config.tasks)
        ]

    def __call__(self, number: int, rng_for: RngFactory) -> GridSample:
        """Sample `number`, all of it drawn."""
        index = number % len(self._tasks)
        variant = draw_variant(self.config.tasks[index].allowed, rng_for("variant"))
        pair = self._pair(index, rng_for("pair"))
        varied = GridPair(variant(pair.input), variant(pair.output))
        try:
            return grid_sample(varied, index, self.config.size)
        except ValueError as error:
            raise BadSample("grid too large", f"{self._tasks[index].name} ({error})") from error

    def _pair(self, index: int, rng: np.random.Generator) -> GridPair:
        task, task_config = self._tasks[index], self.config.tasks[index]
        # Small tasks draw test inputs by chance; a bounded number of tries keeps a run alive.
        for _ in range(_TRIES):
            if task_config.source == "rule":
                rule = RULES[task.name]
                grid = rule.draw(rng, min(self.config.size, rule.largest))
                pair = GridPair(grid, rule.answer(grid))
            else:
                pair = task.train[int(rng.integers(len(task.train)))]
            if orbit(pair.input, task_config.allowed) not in self._tests[index]:
                return pair
        raise BadSample("test inputs alone", task.name)


def grid_data(
    tasks: Mapping[str, ArcTask], config: GridDataConfig, batch: int, seed: int
) -> OrderedData:
    """Return the training batches."""
    samples = GridSamples(tasks, config)
    collate = partial(collate_grids, config.size)
    return indexed_data(config.samples, samples, collate, config, batch, seed)


def collate_grids(
    size: int, samples: list[GridSample], skipped: tuple[SkippedSample, ...] = ()
) -> GridBatch:
    """Return a batch of samples, which may be empty."""
    length = (size + 1) ** 2
    boxes = torch.zeros(len(samples), max((len(sample.boxes) for sample in samples), default=0), 4)
    for row, sample in enumerate(samples):
        boxes[row, : len(sample.boxes)] = sample.boxes
    return GridBatch(
        torch.stack([sample.inputs for sample in samples])
        if samples
        else torch.zeros(0, length).long(),
        torch.stack([sample.outputs for sample in samples])
        if samples
        else torch.zeros(0, length).long(),
        boxes,
        torch.tensor([sample.task for sample in samples], dtype=torch.int64),
        torch.ones(len(samples), dtype=torch.bool),
        skipped,
    )


def _usable(task: ArcTask, symmetry: Symmetry, size: int) -> bool:
    tests = orbits_of_tests(task, symmetry)
    return any(
        max(*pair.input.shape, *pair.output.shape) <= size
        and orbit(pair.input, symmetry) not in tests
        for pair in task.train
    )


def _require_symmetry(where: str, task: ArcTask, task_config: GridTaskConfig) -> None:
    """Refuse changes that turn a known rule into another one on the given pairs."""
    if task_config.name not in RULES or task_config.symmetry is None:
        return
    answer = RULES[task_config.name].answer
    rng = np.random.default_rng(0)
    for pair in task.train:
        variants = [GridVariant(turn=turn) for turn in task_config.symmetry.turns]
        variants += [draw_variant(task_config.symmetry, rng) for _ in range(20)]
        for variant in variants:
            if not np.array_equal(answer(variant(pair.input)), variant(pair.output)):
                raise ConfigError(
                    f"{where}: its rule is another one after {variant.turn} with colours "
                    f"{list(variant.colours)}; its symmetry is {RULES[task_config.name].symmetry}"
                )
