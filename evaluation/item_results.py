"""Evaluation of items in blocks, split over ranks, and figures with intervals over images."""

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
    """Items by index, such as `vlp.data.shards.shard_reader.Items`."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the shard folders, for messages."""

    def __len__(self) -> int:
        """Return the number of items."""

    def read(self, number: int) -> Any:
        """Read an item, which has a method `without_images`; raise BadSample to skip it."""


class EvaluatedItems(NamedTuple):
    """Rows of all usable items in order, and the number of skipped items by kind."""

    rows: list[Any]
    skipped: dict[str, int]


def item_blocks(items: int, batch: int) -> list[range]:
    """Return the item indices of each block of `batch` items, the last one shorter."""
    return [range(items)[start : start + batch] for start in range(0, items, batch)]


def _read(
    items: Readable, blocks: Sequence[range], make: Callable[[Any, int], Example], block: int
) -> tuple[list[tuple[Any, Example]], list[SkippedSample]]:
    """Read and prepare the items of a block, in any process."""
    examples: list[tuple[Any, Example]] = []
    skipped: list[SkippedSample] = []
    for index in blocks[block]:
        try:
            item = items.read(index)
            # Workers send examples to this process: the prepared tensors, not the image's bytes.
            examples.append((item.without_images(), make(item, index)))
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
    """Read, prepare and evaluate every item once; ranks split the blocks.

    Args:
        make: prepares an item, given with its index, in any process; raises BadSample to skip it.
        evaluate: returns a picklable row, without images, for each (item, prepared item).
    """
    # Blocks depend on the data alone, so that figures do not depend on the number of ranks.
    processes = ProcessGroup.current()
    blocks = item_blocks(len(items), options.batch)
    quiet = not (options.progress and processes.first)
    reader = BlockReader(partial(_read, items, blocks, make), device, options.workers)

    def work(block: int) -> tuple[list[Any], list[SkippedSample]]:
        examples, skipped = reader[block]
        rows = list(evaluate(examples)) if examples else []
        bar.update()
        return rows, skipped

    share = processes.share(len(blocks))
    with (
        tqdm(total=len(share), desc="evaluate", unit="block", disable=quiet) as bar,
        reader.prefetch(share),
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
    """Compute weighted means of items with 95 % intervals; resamples are shared by all figures.

    values: (items,) by figure. clusters: image of each item; images are resampled. item_weights:
    (items,) by figure, such as a mask; 1 each by default.
    """
    ids: dict[Hashable, int] = {}
    cluster_ids = np.array([ids.setdefault(cluster, len(ids)) for cluster in clusters])
    sums, weights = [], []
    for name, value in values.items():
        # An item outside a figure has weight 0 in numerator and denominator.
        factors = (item_weights or {}).get(name, np.ones(len(cluster_ids)))
        sums.append(np.bincount(cluster_ids, np.asarray(value, dtype=float) * factors, len(ids)))
        weights.append(np.bincount(cluster_ids, np.asarray(factors, dtype=float), len(ids)))
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
    """Set `scores` of each row: its value by figure, without figures that `masks` exclude."""
    all_items = np.ones(len(rows), dtype=bool)
    for index, row in enumerate(rows):
        row["scores"] = {
            name: float(value[index])
            for name, value in values.items()
            if (masks or {}).get(name, all_items)[index]
        }
