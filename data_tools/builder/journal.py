"""Journal of a build's finished shards: one line of JSON a shard, kept beside the shards.

The file is only ever appended to while shards are made, so a killed build loses at most the line
it was writing; a clean end writes it anew, in the order of the shards. A shard's record is written
before its file is put in place: should a kill fall in between, the sha256 of what is there tells
that the record before it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from vlp.config import ConfigError
from vlp.io import atomic_write, parse_json, sha256_of, sync, unfollowed

JOURNAL_NAME = "build.jsonl"
REMEDY = "--replace what is there"


class Record(BaseModel):
    """One finished shard; without samples (all of them failed) it has no file."""

    model_config = ConfigDict(frozen=True)

    number: int
    wanted: int
    """Samples of the list that this shard stands for, written or not."""
    inputs: str
    """sha256 of those: keys, images and annotations."""
    taken_down: list[str] = []
    samples: int = 0
    captions: int = 0
    bytes: int = 0
    sha256: str = ""
    failures: dict[str, list[str]] = {}

    @property
    def name(self) -> str:
        """File name of the shard."""
        return shard_name(self.number)


def require_same_settings(
    out: Path, found: Mapping[str, Any], settings: Mapping[str, Any], remedy: str
) -> None:
    """Refuse a folder that was begun with other settings; what it does not tell is taken as equal.

    Raises:
        ConfigError: it was; the message names the first setting that differs.
    """
    for name, value in {**dict.fromkeys(found), **settings}.items():
        if name in found and found[name] != value:
            raise ConfigError(
                f"{out} was begun with {name} {found[name]}, this command says {value}: choose "
                f"another --out, or {remedy}"
            )


def shard_name(number: int) -> str:
    """Return the file name of a shard, as `ShardWriter` names them."""
    return f"shard-{number:06d}.tar"


class Journal:
    """The records of a folder of shards, by number of the shard: `with Journal(...) as journal`.

    Args:
        folder: where the shards lie, locked by the caller.
        settings: what the bytes of all shards depend on.

    Raises:
        ConfigError: the folder was begun with other settings, or holds tars of another maker.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.records: dict[int, Record] = {}
        self._path = folder / JOURNAL_NAME
        self._settings = settings
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
        if self._is_new and not self.records and kind in (ConfigError, GeneratorExit):
            self._path.unlink()  # what was refused has not begun

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
                elif "withdrawn" in content:  # as journals had it once
                    self.records.pop(content["withdrawn"])
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
