"""Evaluation split over ranks: blocks of items, their gathered rows, and figures with intervals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from evaluation.options import EvalOptions
from evaluation.results import Figure
from evaluation.samples import BlockReader, EvaluationError, count_kinds
from vlp import distributed
from vlp.config import Precision
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.distributed import default_device
from vlp.metrics import bootstrap_means, percentile_interval
from vlp.tasks.task import autocast

Example = TypeVar("Example")
Result = TypeVar("Result")


class ProcessGroup(NamedTuple):
    """Rank of this process and number of processes; a single process is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def current(cls) -> ProcessGroup:
        """Return the running process group, or a single process."""
        return cls(distributed.rank(), distributed.world_size())

    @property
    def first(self) -> bool:
        """Return True on the rank that prints and writes."""
        return self.rank == 0

    def map_blocks(self, count: int, work: Callable[[int], Result]) -> list[Result]:
        """Return `work(block)` of blocks 0 to count - 1, which the ranks share, in order.

        With fewer blocks than ranks, the last ranks work. An error of one rank is raised on all.
        """
        local: dict[int, Result] = {}
        failure: Exception | None = None
        try:
            local = {block: work(block) for block in self.share(count)}
        except Exception as error:
            failure = error
        if self.world_size == 1:
            if failure is not None:
                raise failure
            return [local[block] for block in range(count)]
        # Also after an error, as the other ranks wait in this collective call.
        gathered = distributed.all_gather_object(
            (local, None if failure is None else repr(failure))
        )
        if failure is not None:
            raise failure
        for rank, (_, message) in enumerate(gathered):
            if message is not None:
                raise RuntimeError(f"evaluation failed on rank {rank}: {message}")
        merged = {block: result for blocks, _ in gathered for block, result in blocks.items()}
        return [merged[block] for block in range(count)]

    def share(self, count: int) -> range:
        """Return this rank's consecutive share of `count` blocks; shares differ by at most one."""
        return range(
            self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size
        )


@contextmanager
def evaluating(
    model: nn.Module, device: torch.device | str | None = None
) -> Iterator[torch.device]:
    """Move the model to the device (None: this rank's), set evaluation mode, yield the device.

    Afterwards the modes of all submodules are restored; the model stays on the device.
    """
    torch_device = torch.device(device) if device is not None else default_device()
    # Of each module, as frozen modules are in evaluation mode while the model trains.
    modes = [(module, module.training) for module in model.modules()]
    model.to(torch_device).eval()
    try:
        yield torch_device
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluation_autocast(device: torch.device, precision: Precision | None) -> Iterator[None]:
    """Set autocast for an evaluation; None: bf16 and TF32 on a GPU with bf16, else float32.

    It does not change whether gradients are computed.
    """
    if precision is not None or device.type != "cuda" or not torch.cuda.is_bf16_supported(False):
        with autocast(device, precision or "float32"):
            yield
        return
    with _TF32, autocast(device, "bf16"):
        yield


class _Tf32:
    """Context in which float32 products use TF32."""

    def __init__(self) -> None:
        # The setting is global: the last of nested or concurrent contexts restores it.
        self._lock, self._depth, self._outer_precision = threading.Lock(), 0, ""

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._outer_precision = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("high")
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                torch.set_float32_matmul_precision(self._outer_precision)


_TF32 = _Tf32()


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
        make: prepares an item and its index, in any process; raises BadSample to skip it.
        evaluate: returns a picklable row for each (item, prepared item); items have no images.
    """
    # Blocks, and so figures, do not depend on the number of ranks.
    processes = ProcessGroup.current()
    blocks = item_blocks(len(items), options.batch)
    quiet = not (options.progress and processes.first)
    reader = BlockReader(partial(_read, items, blocks, make), device, options.workers)

    def evaluate_block(block: int) -> tuple[list[Any], list[SkippedSample]]:
        examples, skipped = reader[block]
        rows = list(evaluate(examples)) if examples else []
        bar.update()
        return rows, skipped

    share = processes.share(len(blocks))
    with (
        tqdm(total=len(share), desc="evaluate", unit="block", disable=quiet) as bar,
        reader.prefetch(share),
    ):
        parts = processes.map_blocks(len(blocks), evaluate_block)
    rows = [row for block_rows, _ in parts for row in block_rows]
    skipped = [skip for _, block_skipped in parts for skip in block_skipped]
    if not rows:
        first = f"; the first: {skipped[0].kind}, {skipped[0].where}" if skipped else ""
        raise EvaluationError(f"{', '.join(items.folders)}: no usable item{first}")
    return EvaluatedItems(rows, count_kinds(skipped))


def clustered_figures(
    values: Mapping[str, NDArray[Any]],
    clusters: Sequence[Hashable],
    chances: Mapping[str, float],
    resamples: int = 1000,
    item_weights: Mapping[str, NDArray[Any]] | None = None,
) -> dict[str, Figure]:
    """Compute weighted means over items, with 95 % intervals from the same resamples of images.

    values: (items,) by figure. clusters: image of each item. chances: chance level by figure.
    item_weights: (items,) by figure, such as a mask; 1 by default.
    """
    ids: dict[Hashable, int] = {}
    cluster_ids = np.array([ids.setdefault(cluster, len(ids)) for cluster in clusters])
    sum_columns, weight_columns = [], []
    for name, value in values.items():
        # An item outside a figure has weight 0 in numerator and denominator.
        weight = np.asarray((item_weights or {}).get(name, np.ones(len(cluster_ids))), dtype=float)
        weighted = np.asarray(value, dtype=float) * weight
        sum_columns.append(np.bincount(cluster_ids, weighted, len(ids)))
        weight_columns.append(np.bincount(cluster_ids, weight, len(ids)))
    sums, weights = np.stack(sum_columns, axis=1), np.stack(weight_columns, axis=1)
    point = sums.sum(0) / weights.sum(0)
    low, high = percentile_interval(bootstrap_means(sums, weights, resamples=resamples))
    return {
        name: Figure(float(point[k]), float(low[k]), float(high[k]), chances.get(name, 0.0))
        for k, name in enumerate(values)
    }


def set_scores(
    rows: Sequence[dict[str, Any]],
    values: Mapping[str, NDArray[Any]],
    masks: Mapping[str, NDArray[np.bool_]] | None = None,
) -> None:
    """Set `scores` of each row, its value by figure.

    values: (rows,) by figure. masks: (rows,) by figure, False for rows outside the figure.
    """
    masks = masks or {}
    for index, row in enumerate(rows):
        row["scores"] = {
            name: float(value[index])
            for name, value in values.items()
            if name not in masks or masks[name][index]
        }
