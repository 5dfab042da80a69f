"""Limits on bad samples, beyond which they end a run instead of being counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from vlp.io import Redacted

if TYPE_CHECKING:  # the tools for shards come this way and have no use for PyTorch
    from vlp.data.stream.batch import Slots

# A rank that has seen nothing good for so long will see nothing good: of a billion samples, half an
# epoch is not waited for.
_MOST_IN_A_ROW = 10_000


class SkippedSample(NamedTuple):
    """A sample that could not be used: its slot stays empty and the run goes on."""

    kind: str
    where: str


class DataError(Redacted, RuntimeError):
    """The data cannot carry the run any further; the message is meant for the person."""

    @property
    def told(self) -> str:
        """The message alone: PyTorch puts a worker's traceback before what the worker said."""
        return str(self).rpartition("DataError: ")[2].strip()


class Shared(Protocol):
    """Interface of a training order that the watch needs."""

    def share(self, epoch: int, rank: int, world_size: int) -> int:
        """Return the number of elements of one epoch that fall to one rank."""


class SkippedShareWatch:
    """Ends a run whose data is mostly bad, epoch by epoch.

    It sees one rank's samples, from where the run started or resumed.

    Args:
        order: says how many samples of an epoch are this rank's.
        max_share: more bad ones than this share of them are too many.
        rank: whose samples.
        world_size: number of ranks.
    """

    def __init__(self, order: Shared, max_share: float, rank: int, world_size: int) -> None:
        self._order = order
        self._max_share = max_share
        self._ranks = rank, world_size
        self._epoch = -1
        self._expected = self._good = self._bad = self._in_a_row = 0
        self._last = SkippedSample("", "")

    def see(self, epoch: int, batch: Slots) -> None:
        """Count a batch.

        Raises:
            DataError: too much of the epoch is bad, or all of the one before was.
        """
        if epoch != self._epoch:
            self._end_epoch()
            self._epoch = epoch
            self._expected = self._order.share(epoch, *self._ranks)
            self._good = self._bad = 0
        good, bad = int(batch.valid.sum()), len(batch.skipped)
        self._good, self._bad = self._good + good, self._bad + bad
        self._in_a_row = 0 if good else self._in_a_row + bad
        if not bad:
            return
        self._last = batch.skipped[-1]
        if self._bad > self._max_share * self._expected:
            raise DataError(
                f"{self._bad} of {self._expected} samples of epoch {epoch} are bad, more than "
                f"data.max_skipped_share {self._max_share}; {self._last_one()}"
            )
        if self._in_a_row > _MOST_IN_A_ROW:
            raise DataError(
                f"{self._in_a_row} samples in a row are bad, none good; {self._last_one()}"
            )

    def _end_epoch(self) -> None:
        # After a resume near its end little of an epoch was seen, and that may well be bad.
        if 0 < self._expected <= self._bad:
            raise DataError(
                f"nothing is left of epoch {self._epoch}: all of its {self._bad} samples are bad; "
                f"{self._last_one()}"
            )

    def _last_one(self) -> str:
        return f"the last one: {self._last.kind}, {self._last.where}"
