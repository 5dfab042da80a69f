"""Sharding of an evaluation over ranks: whole blocks of work, gathered in block order.

Blocks are cut from the data alone, never from the number of ranks, and a block is computed by one
rank in one piece. So nothing is padded, nothing is counted twice, and the numbers that leave a
block are the same however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from vlp import distributed

Result = TypeVar("Result")


class Ranks(NamedTuple):
    """This process among its peers; one process is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """The process group that is running, or one process when there is none."""
        return cls(distributed.rank(), distributed.world_size())

    @property
    def first(self) -> bool:
        """Return whether this rank prints and writes."""
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
        gathered = distributed.gather_to_all((mine, None if failure is None else repr(failure)))
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
