"""A list of wanted samples, cut into the pieces that become shards; which of them must be made."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator
from tempfile import TemporaryFile
from typing import IO

from data_tools.builder.journal import REMEDY, Journal, Record, shard_name
from data_tools.builder.options import BuildOptions
from data_tools.builder.sample_spec import Refused, SampleSpec, has_text
from data_tools.builder.take_down import TakeDown
from data_tools.builder.write_shard import RETRIED, ShardItem, ShardJob
from data_tools.sources.image_sources import Originals
from vlp.config import ConfigError
from vlp.data.shards.sample_files import contents
from vlp.data.shards.tar import readable


class Pieces:
    """Cuts the list into pieces, and decides which of them must be made."""

    def __init__(
        self, originals: Originals, journal: Journal, options: BuildOptions, take_down: TakeDown
    ) -> None:
        self.originals = originals
        self.journal = journal
        self.options = options
        self.take_down = take_down
        self.refused: dict[str, list[str]] = defaultdict(list)
        self.shards = 0
        self.kept = 0  # samples of shards that need not be made

    def jobs(self, wanted: Iterable[SampleSpec | Refused]) -> Iterator[ShardJob]:
        """Yield the shards to be made, in order.

        The first one follows when the list is read as far as the last shard that is there: a list
        that is refused has changed none.

        Raises:
            ConfigError: one would lose samples, or is of a longer list.
        """
        last = self.journal.last_shard()
        with TemporaryFile(dir=self.journal.folder) as held:
            for piece in self._pieces(self._usable(wanted)):
                number, self.shards = self.shards, self.shards + 1
                job = self._job(number, piece)
                if job is None:
                    self.kept += len(piece)
                elif number < last:
                    pickle.dump(job, held)
                else:
                    yield from _taken(held)
                    yield job
            if self.shards <= last:
                raise ConfigError(
                    f"{self.journal.folder / shard_name(last)}: a shard of a longer list, and this "
                    f"one ends after {self.shards}; choose another --out, or {REMEDY}"
                )
            yield from _taken(held)

    def _usable(self, wanted: Iterable[SampleSpec | Refused]) -> Iterator[SampleSpec]:
        seen: set[str] = set()
        for item in wanted:
            if isinstance(item, Refused):
                self.refused[item.kind].append(readable(item.id))
            elif not item.key.isprintable() or not item.key or {*item.key} & {*"./ "}:
                self.refused["bad key"].append(readable(item.key))
            elif item.key in seen:
                self.refused["duplicate key"].append(item.key)
            elif not has_text(item.annotation):
                self.refused["no text"].append(item.key)
            else:
                seen.add(item.key)
                yield item

    def _pieces(self, wanted: Iterator[SampleSpec]) -> Iterator[list[ShardItem]]:
        """Cut where an earlier run cut, else after as many samples as have their images.

        A retry cuts the last piece after so many, too, once what its shard holds is in it: while a
        list is downloaded in parts, all that is not there yet is in that piece. Those before it
        stay as they are.
        """
        piece: list[ShardItem] = []
        present = number = 0
        last = max(self.journal.records, default=-1)
        held = self._held(last) if self.options.retry else {}
        for item in wanted:
            places = tuple(map(self.originals.find, item.images))
            piece.append(ShardItem(item.key, item.annotation, item.size, places, item.images))
            present += None not in places
            before = self.journal.records.get(number)
            cut_before = before is not None and len(piece) == before.wanted
            held.pop(item.key, None)
            may_cut = before is None or (self.options.retry and number == last and not held)
            if cut_before or (may_cut and present >= self.options.samples_per_shard):
                yield piece
                piece, present, number = [], 0, number + 1
        if piece:
            yield piece

    def _job(self, number: int, piece: list[ShardItem]) -> ShardJob | None:
        inputs = _digest(piece)
        taken = frozenset(
            item.key for item in piece if self.take_down.names(item.key, item.annotation)
        )
        before = self.journal.records.get(number)
        if before is None or before.inputs != inputs:
            self._require_kept(number, piece)
            before = None
        elif not self._is_there(before):
            before = None
        retry = self.options.retry and before is not None and bool(before.failures.keys() & RETRIED)
        if before is not None and set(before.taken_down) == taken and not retry:
            return None
        return ShardJob(
            number,
            self.journal.folder,
            piece,
            inputs,
            taken,
            self.options.max_side,
            self.options.quality,
            before,
            self.options.retry,
        )

    def _require_kept(self, number: int, piece: list[ShardItem]) -> None:
        """Refuse a list that lacks samples of the shard that stands where it has others."""
        wanted = {item.key for item in piece}
        lost = [key for key in self._held(number) if key not in wanted]
        if lost:
            path = self.journal.folder / shard_name(number)
            raise ConfigError(
                f"{path}: holds {lost[0]}, one of {len(lost)} samples that this list does not "
                "have there (new ones must follow those of before); choose another --out, or "
                f"{REMEDY}"
            )

    def _held(self, number: int) -> dict[str, None]:
        """Return the keys of the samples in the shard that stands there, in order."""
        path = self.journal.folder / shard_name(number)
        return (
            dict.fromkeys(sample.key for sample in contents(path).samples) if path.exists() else {}
        )

    def _is_there(self, record: Record) -> bool:
        path = self.journal.folder / record.name
        return not record.samples or (path.is_file() and path.stat().st_size == record.bytes)


def _taken(held: IO[bytes]) -> Iterator[ShardJob]:
    """Yield the jobs that a file holds, which is empty afterwards."""
    end = held.tell()
    held.seek(0)
    while held.tell() < end:
        yield pickle.load(held)
    held.seek(0)
    held.truncate()


def _digest(piece: list[ShardItem]) -> str:
    digest = hashlib.sha256()
    for item in piece:
        digest.update(json.dumps([item.key, item.names, item.size]).encode())
        digest.update(item.annotation.to_json())
    return digest.hexdigest()
