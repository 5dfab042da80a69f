"""Every loss is a local sum with a local count; one collective turns them into global means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vlp.compute.region import region
from vlp.distributed import global_sum, world_size


class Loss(NamedTuple):
    """Sum over this rank's items and how many they are; both scalars, `count` an integer."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


def normalise(losses: Mapping[str, Loss]) -> dict[str, Tensor]:
    """Scale local sums so that the average over ranks is the global mean.

    Each result is total * world_size / max(global count, 1): a loss without a single item is 0,
    and ranks with fewer items (empty slots) weigh less. Every rank must call it with the same
    names; it costs one all-reduce of the stacked counts.
    """
    if not losses:
        return {}
    counts = global_sum(torch.stack([loss.count.to(torch.int64) for loss in losses.values()]))
    means = _over_counts([loss.total for loss in losses.values()], counts, world_size())
    return dict(zip(losses, means, strict=True))


@region
def _over_counts(totals: list[Tensor], counts: Tensor, ranks: int) -> list[Tensor]:
    counts = counts.clamp(min=1)
    return [total * ranks / counts[row] for row, total in enumerate(totals)]
