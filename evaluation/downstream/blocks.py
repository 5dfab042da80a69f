"""Items of a benchmark in fixed blocks that ranks share, bad ones counted instead of fatal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from tqdm import tqdm

from evaluation.core.block_reader import BlockReader
from evaluation.core.samples import EvaluationError, count_kinds
from evaluation.core.work_sharding import Ranks
from vlp.data.downstream.items import Item
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.shards.sample_files import BadSample

Made = TypeVar("Made")


class Pictured(Protocol):
    """What is read of an item."""

    def without_images(self) -> Self:
        """Return what is left once its images are prepared."""


Read = TypeVar("Read", bound=Pictured)
Given = TypeVar("Given", bound=Pictured, covariant=True)


class Readable(Protocol[Given]):
    """Items by number, such as `vlp.data.downstream.items.Items`."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Their shard folders, for messages."""

    def __len__(self) -> int:
        """Items."""

    def read(self, number: int) -> Given:
        """One item; a BadSample is counted."""


class EvaluatedItems(NamedTuple):
    """Rows of all good items in their order, and the bad ones by kind."""

    rows: list[Any]
    skipped: dict[str, int]


def _read(
    items: Readable[Read],
    blocks: Sequence[range],
    make: Callable[[Read, int], Made],
    number: int,
) -> tuple[list[tuple[Read, Made]], list[SkippedSample]]:
    """Read and prepare the items of a block, in any process."""
    made: list[tuple[Read, Made]] = []
    skipped: list[SkippedSample] = []
    for item_number in blocks[number]:
        try:
            item = items.read(item_number)
            made.append((item.without_images(), make(item, item_number)))
        except BadSample as bad:
            skipped.append(SkippedSample(bad.kind, bad.where))
    return made, skipped


def evaluate_blocks(
    items: Readable[Read],
    batch: int,
    make: Callable[[Read, int], Made],
    evaluate: Callable[[Sequence[tuple[Read, Made]]], Sequence[Any]],
    progress: bool = False,
    *,
    device: torch.device,
    workers: int | None = None,
) -> EvaluatedItems:
    """Read, prepare and evaluate every item once, on some rank.

    A block is cut from the data alone and computed in one piece by one rank, so its numbers are the
    same however many ranks there are.

    Args:
        items: to evaluate.
        batch: items of a block.
        make: prepares an item of a number, in any process; a BadSample is counted.
        evaluate: one picklable row for each prepared item, which comes without its images.
        progress: a bar on the first rank.
        device: where `evaluate` computes.
        workers: processes that read, as a `BlockReader` takes them.

    Raises:
        EvaluationError: no item could be used.
    """
    ranks = Ranks.current()
    blocks = [range(start, min(start + batch, len(items))) for start in range(0, len(items), batch)]
    quiet = not (progress and ranks.first)

    reader = BlockReader(partial(_read, items, blocks, make), device, workers)

    def work(number: int) -> tuple[list[Any], list[SkippedSample]]:
        made, skipped = reader[number]
        rows = list(evaluate(made)) if made else []
        bar.update()
        return rows, skipped

    share = ranks.share(len(blocks))
    with (
        tqdm(total=len(share), desc="evaluate", unit="block", disable=quiet) as bar,
        reader.ahead(share),
    ):
        parts = ranks.map_blocks(len(blocks), work)
    rows = [row for found, _ in parts for row in found]
    skipped = [skip for _, skipped in parts for skip in skipped]
    if not rows:
        first = f"; the first: {skipped[0].kind}, {skipped[0].where}" if skipped else ""
        raise EvaluationError(f"{', '.join(items.folders)}: nothing could be used{first}")
    return EvaluatedItems(rows, count_kinds(skipped))


def image_of(item: Item) -> tuple[str, str]:
    """Return (source, id) of an item's image, which its other items share."""
    annotation = item.raw.annotation
    if annotation.image_id is None:
        return "", item.where
    return annotation.source or "", annotation.image_id


def image_name(item: Item) -> str:
    """Return the name of an item's image as rows have it."""
    return "/".join(image_of(item))
