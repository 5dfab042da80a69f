"""Shards: plain WebDataset tars, how they are written, indexed and read at random.

A sample is `KEY.jpg|jpeg|png|webp` with `KEY.txt` and/or `KEY.json` beside it, and perhaps a second
picture `KEY.1.jpg`. `index.json` beside the tars says how many samples each one holds, which is all
the training order needs; where a sample lies in its tar is read from the tar's own headers, once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from vlp.config import ConfigError
from vlp.data.recent import Recent
from vlp.data.schema import Annotation, captions_of
from vlp.data.stored import (
    PICTURES,
    BadSample,
    Contents,
    RawSample,
    SampleFiles,
    contents,
    parse,
    parse_annotation,
)
from vlp.data.tar import Member, append_member, close_tar

__all__ = [
    "PICTURES",
    "BadSample",
    "RawSample",
    "ShardEntry",
    "ShardIndex",
    "ShardWriter",
    "index_folder",
]

INDEX_NAME = "index.json"
INDEX_VERSION = 1

# A list of contents is small (a name and two numbers per file); open files are a scarce resource.
_CONTENTS_KEPT = 4096
_FILES_KEPT = 128


class ShardEntry(BaseModel):
    """One shard of an index; `captions` holds the number of captions of each sample."""

    model_config = ConfigDict(frozen=True)

    name: str
    samples: int
    bytes: int
    captions: list[int]


class _IndexFile(BaseModel):
    version: int
    shards: list[ShardEntry]


class ShardWriter:
    """Writes samples into numbered shards; `with ShardWriter(folder) as writer: writer.write(...)`.

    A shard appears under its name only when it is whole and on disk, so an interrupted run leaves
    finished shards alone. Run again, `done` holds the keys of those; a producer that skips them
    gets the same bytes as without the interruption. The index is written on a clean exit.
    """

    def __init__(
        self, folder: str | Path, samples_per_shard: int = 1000, prefix: str = "shard"
    ) -> None:
        if samples_per_shard < 1:
            raise ValueError(f"samples_per_shard is {samples_per_shard}, it must be at least 1")
        self.folder = Path(folder)
        self.samples_per_shard = samples_per_shard
        self.prefix = prefix
        self.done: set[str] = set()
        self._entries: list[ShardEntry] = []
        self._captions: list[int] = []
        self._file: Any = None
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{prefix}-*.tar.tmp"):
            leftover.unlink()
        for path in sorted(self.folder.glob(f"{prefix}-*.tar")):
            found, captions = _survey(path)
            if found.problem:
                raise ConfigError(f"{path}: {found.problem}; delete this shard and run again")
            self.done.update(sample.key for sample in found.samples)
            self._entries.append(_entry(path, captions))

    def write(
        self,
        key: str,
        image: bytes,
        extension: str,
        annotation: Annotation,
        second_image: bytes | None = None,
    ) -> None:
        """Append one sample.

        Args:
            key: name of the sample, unique in the folder, without dots or slashes.
            image: the encoded picture.
            extension: `jpg`, `jpeg`, `png` or `webp`; of both pictures.
            annotation: written as `KEY.json`.
            second_image: the other picture of a paired sample, written as `KEY.1.EXTENSION`.

        Raises:
            ValueError: the key is not usable or was written before, or the extension is unknown.
        """
        if not key or "." in key or "/" in key:
            raise ValueError(f"{key!r} cannot be a key: it may hold neither dots nor slashes")
        if key in self.done:
            raise ValueError(f"the key {key!r} is already in {self.folder}")
        if extension not in PICTURES:
            raise ValueError(f"{key}: extension {extension!r} is not one of {', '.join(PICTURES)}")
        if self._file is None:
            self._file = open(self._path().with_suffix(".tar.tmp"), "wb")  # noqa: SIM115
        append_member(self._file, f"{key}.{extension}", image)
        if second_image is not None:
            append_member(self._file, f"{key}.1.{extension}", second_image)
        append_member(self._file, f"{key}.json", annotation.to_json())
        self.done.add(key)
        self._captions.append(len(captions_of(annotation)))
        if len(self._captions) == self.samples_per_shard:
            self._finish_shard()

    def close(self) -> None:
        """Finish the last shard and write the index."""
        if self._file is not None:
            self._finish_shard()
        _write_index(self.folder, self._entries)

    def abandon(self) -> None:
        """Drop the unfinished shard; finished ones stay, and the next run goes on from them."""
        if self._file is not None:
            self._file.close()
            self._path().with_suffix(".tar.tmp").unlink(missing_ok=True)
            self._file = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _path(self) -> Path:
        return self.folder / f"{self.prefix}-{len(self._entries):06d}.tar"

    def _finish_shard(self) -> None:
        path = self._path()
        close_tar(self._file)
        _sync(self._file)
        self._file.close()
        self._file = None
        path.with_suffix(".tar.tmp").rename(path)
        _sync_folder(self.folder)
        self._entries.append(_entry(path, self._captions))
        self._captions = []


class ShardIndex:
    """A folder of shards, read at random.

    Safe to hand to forked or spawned processes: files are opened where they are read, and reads
    carry their own offset.
    """

    def __init__(self, folder: Path, shards: Sequence[ShardEntry]) -> None:
        self.folder = folder
        self.shards = tuple(shards)
        self._contents: Recent[Contents] = Recent(_CONTENTS_KEPT)
        self._files: Recent[int] = Recent(_FILES_KEPT, dispose=os.close)

    @classmethod
    def open(cls, folder: str | Path) -> ShardIndex:
        """Read `folder/index.json`.

        Raises:
            ConfigError: there is no such folder, no shard in it, no index, an index that cannot be
                read, or one that does not know every shard of the folder.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder of shards")
        make_it = f"make one with: python -m data_tools index {folder}"
        path = folder / INDEX_NAME
        if not path.exists():
            if not any(folder.glob("*.tar")):
                raise ConfigError(f"{folder}: holds no shards (*.tar)")
            raise ConfigError(f"{folder}: the shards have no {INDEX_NAME}; {make_it}")
        try:
            content = _IndexFile.model_validate_json(path.read_bytes())
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"{path}: not an index of shards ({reason}); {make_it}") from error
        if content.version != INDEX_VERSION:
            raise ConfigError(f"{path}: version {content.version} is unknown here; {make_it}")
        known = {entry.name for entry in content.shards}
        unknown = sorted(path.name for path in folder.glob("*.tar") if path.name not in known)
        if unknown:
            raise ConfigError(f"{path}: does not know {unknown[0]}, it is too old; {make_it}")
        return cls(folder, content.shards)

    def __len__(self) -> int:
        return sum(entry.samples for entry in self.shards)

    def read(self, shard_number: int, sample_number: int) -> RawSample:
        """The sample at a place of the index.

        Raises:
            BadSample: the shard is missing or damaged there, the sample has no picture, or its JSON
                or text cannot be read.
            IndexError: the index has no such place.
        """
        sample, read, where = self._find(shard_number, sample_number)
        # The files of a sample lie side by side: one read instead of one for each.
        start = min(member.offset for member in sample.files.values())
        end = max(member.offset + member.size for member in sample.files.values())
        data = read(Member(sample.key, start, end - start))

        def part(member: Member) -> bytes:
            return data[member.offset - start : member.offset - start + member.size]

        return parse(sample, part, where)

    def read_annotation(self, shard_number: int, sample_number: int) -> Annotation:
        """The annotation alone, its pictures left unread; raises as `read` does."""
        return parse_annotation(*self._find(shard_number, sample_number))

    def _find(
        self, shard_number: int, sample_number: int
    ) -> tuple[SampleFiles, Callable[[Member], bytes], str]:
        entry = self.shards[shard_number]
        if not 0 <= sample_number < entry.samples:
            raise IndexError(f"{entry.name} has {entry.samples} samples, none at {sample_number}")
        path = self.folder / entry.name
        found = self._contents.get(entry.name, lambda: contents(path))
        if sample_number >= len(found.samples):
            kind = "missing shard" if found.missing else "corrupt shard"
            reason = found.problem or "it holds fewer samples than its index says"
            raise BadSample(kind, f"{path}, sample {sample_number} ({reason})")
        sample = found.samples[sample_number]
        return sample, lambda member: self._read(entry.name, member), f"{path}, {sample.key}"

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "shards": self.shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], state["shards"])  # type: ignore[misc]

    def _read(self, shard: str, member: Member) -> bytes:
        path = self.folder / shard
        try:
            file = self._files.get(shard, lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            data = os.pread(file, member.size, member.offset)
        except OSError as error:
            raise BadSample("missing shard", f"{path} ({error.strerror})") from error
        if len(data) != member.size:
            raise BadSample("corrupt shard", f"{path}: cut off inside {member.name}")
        return data


def index_folder(folder: str | Path) -> list[str]:
    """Write `index.json` for the shards of a folder, whoever wrote them.

    Returns:
        One line for each shard that is empty or damaged; what can be reached in it is indexed.

    Raises:
        ConfigError: there is no such folder, or no shard in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder of shards")
    paths = sorted(folder.glob("*.tar"))
    if not paths:
        raise ConfigError(f"{folder}: holds no shards (*.tar)")
    problems = []
    entries = []
    for path in paths:
        found, captions = _survey(path)
        if found.problem:
            problems.append(f"{path.name}: {found.problem}, {len(found.samples)} samples before it")
        elif not found.samples:
            problems.append(f"{path.name}: empty")
        entries.append(_entry(path, captions))
    _write_index(folder, entries)
    return problems


def _survey(path: Path) -> tuple[Contents, list[int]]:
    """What a shard holds, and each sample's number of captions (0 where it cannot be read)."""
    found = contents(path)
    if found.missing:
        raise ConfigError(f"{path}: cannot read this shard ({found.problem})")
    captions = []
    with open(path, "rb") as file:

        def read(member: Member) -> bytes:
            file.seek(member.offset)
            return file.read(member.size)

        for sample in found.samples:
            try:
                captions.append(len(captions_of(parse_annotation(sample, read, sample.key))))
            except BadSample:
                captions.append(0)
    return found, captions


def _entry(path: Path, captions: list[int]) -> ShardEntry:
    return ShardEntry(
        name=path.name, samples=len(captions), bytes=path.stat().st_size, captions=captions
    )


def _write_index(folder: Path, entries: Sequence[ShardEntry]) -> None:
    content = _IndexFile(version=INDEX_VERSION, shards=list(entries))
    temporary = folder / f"{INDEX_NAME}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content.model_dump(), file, separators=(",", ":"))
        file.write("\n")
        _sync(file)
    temporary.rename(folder / INDEX_NAME)
    _sync_folder(folder)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
