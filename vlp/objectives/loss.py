"""Losses as local sums with local counts, and fixed sample groups of a global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vlp.compilation import region
from vlp.config import ConfigError
from vlp.distributed import global_sum, world_size
from vlp.objectives.config import ObjectivesConfig


class Loss(NamedTuple):
    """Sum of a loss over this rank's items (rows, words or patches), and their number; scalars."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count


def normalise(losses: Mapping[str, Loss]) -> dict[str, Tensor]:
    """Scale local sums so that the average over ranks is the global mean.

    Each result is total * world_size / max(global count, 1). Every rank must call it with the same
    names, as it all-reduces the counts.
    """
    if not losses:
        return {}
    counts = global_sum(torch.stack([loss.count.to(torch.int64) for loss in losses.values()]))
    scaled = _divide([loss.total for loss in losses.values()], counts, world_size())
    return dict(zip(losses, scaled, strict=True))


@region
def _divide(totals: list[Tensor], counts: Tensor, ranks: int) -> list[Tensor]:
    counts = counts.clamp(min=1)
    return [total * ranks / counts[row] for row, total in enumerate(totals)]


def sample_groups(rows: int, group_size: int) -> tuple[int, int]:
    """Return the number and the size of groups of consecutive rows; fewer rows are one group."""
    if group_size < 1:
        raise ValueError(f"a sample group needs at least 1 row, not {group_size}")
    if rows <= group_size:
        return (1, rows) if rows else (0, group_size)
    if rows % group_size:
        raise ValueError(
            f"a rank's batch of {rows} rows cannot be cut into groups of {group_size}: choose "
            "training.batch so that each rank gets a multiple of the group, or a smaller group"
        )
    return rows // group_size, group_size


def require_whole_groups(
    objectives: ObjectivesConfig,
    batch: int,
    ranks: int,
    prefix: str = "objectives",
    chunk: int | None = None,
) -> None:
    """Require whole sample groups in each rank's batch and each chunk of `training.grad_cache`.

    Otherwise losses would depend on the number of ranks. prefix: of the keys in messages.
    """
    group_sizes = {}
    if objectives.itm:
        group_sizes[f"{prefix}.itm.group"] = objectives.itm.group
    if objectives.contrastive and objectives.contrastive.kind == "anchor":
        group_sizes[f"{prefix}.contrastive.token.group"] = objectives.contrastive.token.group
    rank_batch = batch // ranks
    for key, group_size in group_sizes.items():
        # A batch smaller than a group is one group, which needs a single rank.
        if rank_batch % min(group_size, batch):
            largest = max(size for size in range(1, group_size + 1) if rank_batch % size == 0)
            remedy = f"{key}={largest}" if largest > 1 else f"training.batch={group_size * ranks}"
            raise ConfigError(
                f"{key} {group_size} does not divide a rank's {rank_batch} samples "
                f"(training.batch {batch} on {ranks} ranks); set {remedy}"
            )
        if chunk is not None and chunk < rank_batch and chunk % group_size:
            raise ConfigError(
                f"training.grad_cache {chunk} is not a multiple of {key} {group_size}, and would "
                "split its groups"
            )
