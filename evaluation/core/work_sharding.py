"""How ranks share an evaluation: whole blocks of work, gathered in block order.

Blocks are cut from the data alone, never from the number of ranks, and a block is computed by one
rank in one piece. So nothing is padded, nothing is counted twice, and the numbers that leave a
block are the same however many ranks there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


class Ranks(NamedTuple):
    """This process among its peers; one process is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """The process group that is running, or one process when there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def map_blocks(self, count: int, work: Callable[[int], Result]) -> list[Result]:
        """Call `work(block)` for each of `count` blocks once, on some rank.

        Returns:
            The results of all blocks in block order, on every rank.

        Raises:
            RuntimeError: the work failed on another rank; on the rank where it failed, that error.
                No rank waits for one that has failed.
        """
        mine: dict[int, Result] = {}
        failure: Exception | None = None
        try:
            mine = {block: work(block) for block in self.share(count)}
        except Exception as error:
            failure = error
        if self.world_size == 1:
            if failure is not None:
                raise failure
            return [mine[block] for block in range(count)]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, (mine, None if failure is None else repr(failure)))
        if failure is not None:
            raise failure
        for rank, (_, message) in enumerate(gathered):
            if message is not None:
                raise RuntimeError(f"evaluation failed on rank {rank}: {message}")
        merged = {block: result for blocks, _ in gathered for block, result in blocks.items()}
        return [merged[block] for block in range(count)]

    def share(self, count: int) -> range:
        """This rank's consecutive blocks; lengths differ by at most one."""
        return range(
            self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size
        )


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the ranks that `torchrun` or `accelerate launch` announces in the environment.

    Without them, or inside a group that is already running, nothing is started. Only Python objects
    travel, so gloo serves GPUs as well.
    """
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced < 2 or dist.is_initialized():
        yield Ranks.current()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks.current()
    finally:
        dist.destroy_process_group()


def default_device() -> torch.device:
    """This rank's GPU when there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
