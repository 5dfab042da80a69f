"""A list of samples cut into the pieces that become shards, and the journal of finished ones.

The journal is one line of JSON a shard, kept beside the shards. It is only ever appended to while
shards are made, so a killed build loses at most the line it was writing; a clean end writes it
anew, in the order of the shards. A shard's record is written before its file is put in place:
should a kill fall in between, the sha256 of what is there tells that the record before it holds.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from pydantic import ValidationError

from data_tools.builder.samples import Refused, SampleSpec, TakeDown, has_text
from data_tools.builder.write_shard import RETRIED, Record, ShardItem, ShardJob, shard_name
from data_tools.options import BuildOptions
from data_tools.originals import Originals
from vlp.config import ConfigError
from vlp.data.shards.sample_files import contents
from vlp.data.shards.tar import readable
from vlp.io import atomic_write, parse_json, sha256_of, sync, unfollowed

JOURNAL_NAME = "build.jsonl"
REMEDY = "--replace what is there"


def require_same_settings(
    out: Path, found: Mapping[str, Any], settings: Mapping[str, Any], remedy: str
) -> None:
    """Refuse a folder that was begun with other settings; unknown ones are taken as equal."""
    for name, value in {**dict.fromkeys(found), **settings}.items():
        if name in found and found[name] != value:
            raise ConfigError(
                f"{out} was begun with {name} {found[name]}, this command says {value}: choose "
                f"another --out, or {remedy}"
            )


class Journal:
    """The records of a folder of shards, by number of the shard: `with Journal(...) as journal`.

    The caller holds the folder's lock; `settings` are what the bytes of all shards depend on.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.records: dict[int, Record] = {}
        self._path = folder / JOURNAL_NAME
        self._settings = settings
        was_there = self._path.exists()
        self._file = open(self._path, "ab", opener=unfollowed)  # noqa: SIM115
        try:
            begun = self._read()
            # A shard without a record was published just before a kill: it is made again. One in a
            # folder where no build began, or of another kind of name, is somebody else's.
            for path in folder.glob("*.tar"):
                if not (begun and _is_ours(path.name)):
                    raise ConfigError(
                        f"{path}: a shard that this command did not write; choose another --out, "
                        f"or {REMEDY}"
                    )
            self._is_new = not begun
            if self._is_new:
                self._append({"settings": settings})
        except BaseException:
            self._file.close()
            if not was_there:
                self._path.unlink()
            raise

    def add(self, record: Record) -> None:
        """Remember a finished shard, just before its file is put in its place."""
        self.records[record.number] = record
        self._append(record.model_dump())

    def last_shard(self) -> int:
        """Return the number of the last shard that has a file; -1 where none has."""
        names = (path.stem.removeprefix("shard-") for path in self.folder.glob("*.tar"))
        return max(map(int, names), default=-1)

    def finish(self, shards: int) -> None:
        """Write the file anew with the first `shards` records."""
        with atomic_write(self._path, durable=True) as file:
            file.write(_line({"settings": self._settings}))
            file.writelines(_line(self.records[number].model_dump()) for number in range(shards))
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._file.close()
        is_refused = kind is not None and issubclass(kind, (Exception, GeneratorExit))
        if self._is_new and not self.records and is_refused:
            self._path.unlink()  # what was refused has not begun; what was interrupted has

    def _read(self) -> bool:
        """Read what is there; whether a build began."""
        lines = self._path.read_bytes().split(b"\n")
        whole = 0
        last, before = None, None
        for number, line in enumerate(lines[:-1], 1):
            try:
                content = parse_json(line)
                if "settings" in content:
                    self._compare(content["settings"])
                else:
                    last = Record.model_validate(content)
                    before = self.records.get(last.number)
                    self.records[last.number] = last
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                raise ConfigError(
                    f"{self._path}: line {number} is not of a build ({reason}); delete this file "
                    "to build every shard again"
                ) from error
            whole += len(line) + 1
        if last is not None and before is not None:
            path = self.folder / last.name
            if not _holds(path, last) and _holds(path, before):
                self.records[before.number] = before
                whole -= len(lines[-2]) + 1
        # Behind the last line break lies the line a kill cut off.
        self._file.truncate(whole)
        return whole > 0

    def _compare(self, found: dict[str, Any]) -> None:
        require_same_settings(self.folder, found, self._settings, REMEDY)

    def _append(self, content: dict[str, Any]) -> None:
        self._file.write(_line(content))
        sync(self._file)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _holds(path: Path, record: Record) -> bool:
    return sha256_of(path) == record.sha256 if path.is_file() else not record.samples


def _is_ours(name: str) -> bool:
    digits = name.removeprefix("shard-").removesuffix(".tar")
    return digits.isdecimal() and name == shard_name(int(digits))


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
