"""Evaluation of items in blocks that ranks share, and figures over their images."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from evaluation.options import EvalOptions
from evaluation.results import Figure
from evaluation.samples import BlockReader, EvaluationError, count_kinds
from evaluation.work_sharding import ProcessGroup
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.metrics import bootstrap_means, percentile_interval

Example = TypeVar("Example")


class Readable(Protocol):
    """Items by number, such as `vlp.data.shards.shard_reader.Items`."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Their shard folders, for messages."""

    def __len__(self) -> int:
        """Return the number of items."""

    def read(self, number: int) -> Any:
        """Read one item with a method `without_images`; a BadSample is counted."""


class EvaluatedItems(NamedTuple):
    """Rows of all good items in their order, and the bad ones by kind."""

    rows: list[Any]
    skipped: dict[str, int]


def _read(
    items: Readable, blocks: Sequence[range], make: Callable[[Any, int], Example], number: int
) -> tuple[list[tuple[Any, Example]], list[SkippedSample]]:
    """Read and prepare the items of a block, in any process."""
    examples: list[tuple[Any, Example]] = []
    skipped: list[SkippedSample] = []
    for item_number in blocks[number]:
        try:
            item = items.read(item_number)
            # Workers send examples to this process: the prepared tensors, not the image's bytes.
            examples.append((item.without_images(), make(item, item_number)))
        except BadSample as bad:
            skipped.append(SkippedSample(bad.kind, bad.where))
    return examples, skipped


def evaluate_blocks(
    items: Readable,
    make: Callable[[Any, int], Example],
    evaluate: Callable[[Sequence[tuple[Any, Example]]], Sequence[Any]],
    options: EvalOptions,
    device: torch.device,
) -> EvaluatedItems:
    """Read, prepare and evaluate every item once, on some rank.

    Args:
        make: prepares an item by number, in any process; a BadSample is counted.
        evaluate: returns a picklable row, without images, for each prepared item.
    """
    # Blocks are cut from the data alone, so that numbers do not depend on the ranks.
    processes = ProcessGroup.current()
    blocks = [
        range(start, min(start + options.batch, len(items)))
        for start in range(0, len(items), options.batch)
    ]
    quiet = not (options.progress and processes.first)

    reader = BlockReader(partial(_read, items, blocks, make), device, options.workers)

    def work(number: int) -> tuple[list[Any], list[SkippedSample]]:
        examples, skipped = reader[number]
        rows = list(evaluate(examples)) if examples else []
        bar.update()
        return rows, skipped

    share = processes.share(len(blocks))
    with (
        tqdm(total=len(share), desc="evaluate", unit="block", disable=quiet) as bar,
        reader.ahead(share),
    ):
        parts = processes.map_blocks(len(blocks), work)
    rows = [row for block_rows, _ in parts for row in block_rows]
    skipped = [skip for _, skipped in parts for skip in skipped]
    if not rows:
        first = f"; the first: {skipped[0].kind}, {skipped[0].where}" if skipped else ""
        raise EvaluationError(f"{', '.join(items.folders)}: nothing could be used{first}")
    return EvaluatedItems(rows, count_kinds(skipped))


def clustered_figures(
    values: Mapping[str, NDArray[Any]],
    clusters: Sequence[Hashable],
    chances: Mapping[str, float],
    resamples: int = 1000,
    item_weights: Mapping[str, NDArray[Any]] | None = None,
) -> dict[str, Figure]:
    """Compute means with 95 % intervals from resampled clusters, the same draws for every figure.

    clusters: image of each item. item_weights: (items,) by figure, such as a mask; default ones.
    """
    numbers: dict[Hashable, int] = {}
    index = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])
    sums, weights = [], []
    for name, value in values.items():
        # An item outside a figure has weight 0 in its numerator and denominator.
        factors = (item_weights or {}).get(name, np.ones(len(index)))
        sums.append(np.bincount(index, np.asarray(value, dtype=float) * factors, len(numbers)))
        weights.append(np.bincount(index, np.asarray(factors, dtype=float), len(numbers)))
    total, weight = np.stack(sums, axis=1), np.stack(weights, axis=1)
    point = total.sum(0) / weight.sum(0)
    low, high = percentile_interval(bootstrap_means(total, weight, resamples=resamples))
    return {
        name: Figure(float(point[k]), float(low[k]), float(high[k]), chances.get(name, 0.0))
        for k, name in enumerate(values)
    }


def keep_scores(
    rows: Sequence[dict[str, Any]],
    values: Mapping[str, NDArray[Any]],
    masks: Mapping[str, NDArray[np.bool_]] | None = None,
) -> None:
    """Store in each row its value by figure, for comparisons item by item."""
    about = masks or {}
    for number, row in enumerate(rows):
        row["scores"] = {
            name: float(value[number])
            for name, value in values.items()
            if name not in about or about[name][number]
        }
