"""Places of a run's checkpoints: a folder on a disk, or one behind a URL that fsspec knows.

On a disk a checkpoint is complete because it has its name, which it gets in one step. A store has
no such step; there it is complete because it has its SHA256SUMS, which come last and go first.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from vlp.config import ConfigError
from vlp.data.shards.outages import DEFAULT_OUTAGES, Unreachable, patiently
from vlp.data.shards.remote import connected
from vlp.io import as_url, redacted, replace_folder, restore_folder, sha256_of, sync

STATE = "state.json"
SUMS = "SHA256SUMS"
EXTRA = "extra.safetensors"
METADATA = ".metadata"
PARTIAL, CORRUPT = ".tmp", ".corrupt"

# What has no step of replacing a checkpoint writes the same step under a second number.
_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?")

Value = TypeVar("Value")


class Place(Protocol):
    """Complete checkpoints by name, `step_N`; `scratch` is where they are written at first."""

    scratch: Path

    def __truediv__(self, name: str) -> str:
        """Return what messages call a checkpoint."""

    def names(self) -> list[str]:
        """List the names of complete checkpoints, the newest first."""

    def damaged(self) -> list[str]:
        """List the names of checkpoints that were set aside as damaged."""

    def clean(self) -> None:
        """Remove what a kill left incomplete."""

    def has(self, name: str) -> bool:
        """Return whether this process sees a checkpoint."""

    def open(self, name: str, file: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file of a checkpoint to read."""

    def read(self, name: str, file: str) -> bytes:
        """Return the content of a small file."""

    def digest(self, name: str, file: str) -> str:
        """Return a file's SHA-256 in hexadecimal digits."""

    def fetched(self, name: str) -> AbstractContextManager[Path]:
        """Give a folder with the files of a checkpoint."""

    def new_name(self, step: int, before: str | None) -> str:
        """Return the name of a checkpoint to be written, after that of the one before."""

    def send(self, partial: Path, name: str, files: Sequence[str]) -> None:
        """Bring files of a folder to where the checkpoint will be; any rank brings its own."""

    def publish(self, partial: Path, name: str, files: Sequence[str]) -> None:
        """Bring what is not there yet of all files, and make the checkpoint complete."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint."""

    def set_aside(self, name: str) -> None:
        """Rename a damaged checkpoint to `step_N.corrupt`."""


class LocalPlace:
    """A folder on a disk.

    Raises:
        OSError: of all methods; the disk cannot be read or written now, which says nothing about
            its checkpoints. A file that is missing is a FileNotFoundError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = self.scratch = folder

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)

    def names(self) -> list[str]:
        """List the names of complete checkpoints, the newest first."""
        return _newest_first(self._folders())

    def damaged(self) -> list[str]:
        """List the names of checkpoints that were set aside as damaged."""
        return _set_aside(self._folders())

    def _folders(self) -> list[str]:
        try:  # not `glob`, which passes over a folder that it may not read
            with os.scandir(self.folder) as entries:
                names = [entry.name for entry in entries if entry.name.startswith("step_")]
        except FileNotFoundError:
            return []
        return [name for name in names if stat.S_ISDIR((self.folder / name).stat().st_mode)]

    def clean(self) -> None:
        """Remove what a kill left incomplete, and bring back what it left aside."""
        for aside in self.folder.glob(".step_*.replaced"):
            restore_folder(self.folder / aside.name[1:].removesuffix(".replaced"))
        _remove_partial(self.folder)

    def has(self, name: str) -> bool:
        """Return whether this process sees a checkpoint."""
        return (self.folder / name / SUMS).is_file()

    def open(self, name: str, file: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file of a checkpoint to read."""
        return (self.folder / name / file).open("rb")

    def read(self, name: str, file: str) -> bytes:
        """Return the content of a small file."""
        return (self.folder / name / file).read_bytes()

    def digest(self, name: str, file: str) -> str:
        """Return a file's SHA-256 in hexadecimal digits.

        Raises:
            FileNotFoundError: it is no file.
        """
        path = self.folder / name / file
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise FileNotFoundError(path)
        return sha256_of(path)

    @contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """Give the checkpoint's folder."""
        yield self.folder / name

    def new_name(self, step: int, before: str | None) -> str:
        """Return `step_N`: it takes the place of one of the same step."""
        return f"step_{step}"

    def send(self, partial: Path, name: str, files: Sequence[str]) -> None:
        """Do nothing: all ranks write into the same folder."""

    def publish(self, partial: Path, name: str, files: Sequence[str]) -> None:
        """Give the folder its name.

        Raises:
            OSError: the disk refuses it, or files of other ranks are not in this folder.
        """
        if missing := [file for file in files if not (partial / file).is_file()]:
            raise OSError(
                f"{partial} lacks {missing[0]}: ranks of other nodes write elsewhere; "
                "training.checkpoint_folder is to be a folder that all nodes share, or a URL"
            )
        replace_folder(partial, self.folder / name)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, which is none any more from the start."""
        going = self.folder / f"{name}{PARTIAL}"
        with suppress(OSError):
            (self.folder / name).rename(going)
        shutil.rmtree(going, ignore_errors=True)

    def set_aside(self, name: str) -> None:
        """Rename a damaged checkpoint to `step_N.corrupt`."""
        aside = self.folder / f"{name}{CORRUPT}"
        shutil.rmtree(aside, ignore_errors=True)
        (self.folder / name).rename(aside)


class RemotePlace:
    """A folder behind a URL.

    Args:
        url: of the folder.
        scratch: a folder on a disk.

    Raises:
        ConfigError: its protocol is not known or needs a package. Of all methods: the store
            refuses, or fails for longer than `DEFAULT_OUTAGES` says.
    """

    def __init__(self, url: str, scratch: Path) -> None:
        if url.startswith(("http://", "https://")):
            raise ConfigError(f"{url}: nothing can be written to a web server")
        self._url, self.scratch = url.rstrip("/"), scratch
        self._files, place = connected(url, DEFAULT_OUTAGES.silence)
        self._root = place.rstrip("/")

    def __truediv__(self, name: str) -> str:
        return f"{redacted(self._url)}/{name}"

    def names(self) -> list[str]:
        """List the names of complete checkpoints, the newest first."""
        return _newest_first([name for name in self._folders() if self.has(name)])

    def damaged(self) -> list[str]:
        """List the names of checkpoints that were set aside as damaged."""
        return _set_aside(self._folders())

    def clean(self) -> None:
        """Remove folders without SHA256SUMS."""
        _remove_partial(self.scratch)
        for name in self._folders():
            if _NAME.fullmatch(name) and not self.has(name):
                self.remove(name)

    def has(self, name: str) -> bool:
        """Return whether this process sees a checkpoint."""
        return self._exists(self._at(name, SUMS))

    def open(self, name: str, file: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file of a checkpoint to read."""
        opened: AbstractContextManager[IO[bytes]]
        opened = self._try(self._files.open, self._at(name, file), "rb")
        return opened

    def read(self, name: str, file: str) -> bytes:
        """Return the content of a small file."""
        content: bytes = self._try(self._files.cat_file, self._at(name, file))
        return content

    def digest(self, name: str, file: str) -> str:
        """Return a file's SHA-256 in hexadecimal digits."""

        def attempt() -> str:
            with self._files.open(self._at(name, file), "rb") as content:
                return hashlib.file_digest(content, "sha256").hexdigest()

        return self._try(attempt)

    @contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """Give a copy of the checkpoint, for as long as the block lasts."""
        copy = self.scratch / f"{name}{PARTIAL}"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True)
        try:
            for place in self._try(self._files.ls, self._at(name), False):
                file = place.rstrip("/").rpartition("/")[2]
                self._try(self._files.get_file, self._at(name, file), str(copy / file))
            yield copy
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def new_name(self, step: int, before: str | None) -> str:
        """Return `step_N`, or `step_N.2` after `step_N`, which stays until that is complete."""
        if before is None or _order(before)[0] != step:
            return f"step_{step}"
        return f"step_{step}.{_order(before)[1] + 1}"

    def send(self, partial: Path, name: str, files: Sequence[str]) -> None:
        """Move files of a folder on a disk to the store."""
        self._try(self._files.makedirs, self._at(name), True)
        for file in files:
            self._try(self._files.put_file, str(partial / file), self._at(name, file))
            (partial / file).unlink()
        with suppress(OSError):  # it holds other files still
            partial.rmdir()

    def publish(self, partial: Path, name: str, files: Sequence[str]) -> None:
        """Move the files that ranks have not moved yet, SHA256SUMS behind all others."""
        left = [file for file in files if (partial / file).exists()]
        self.send(partial, name, sorted(left, key=lambda file: file == SUMS))

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its SHA256SUMS first."""
        if self.has(name):
            self._try(self._files.rm_file, self._at(name, SUMS))
        self._try(self._files.rm, self._at(name), True)

    def set_aside(self, name: str) -> None:
        """Move a damaged checkpoint to `step_N.corrupt`."""
        if self._exists(self._at(f"{name}{CORRUPT}")):
            self._try(self._files.rm, self._at(f"{name}{CORRUPT}"), True)
        self._try(self._files.mv, self._at(name), self._at(f"{name}{CORRUPT}"), True)

    def _at(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _folders(self) -> list[str]:
        self._files.invalidate_cache()
        if not self._exists(self._root):
            return []
        found = self._try(self._files.ls, self._root, False)
        return [place.rstrip("/").rpartition("/")[2] for place in found]

    def _exists(self, place: str) -> bool:
        """Return whether the store has it; fsspec's `exists` says no where the store fails."""

        def attempt() -> bool:
            try:
                self._files.info(place)
            except FileNotFoundError:
                return False
            return True

        return self._try(attempt)

    def _try(self, act: Callable[..., Value], *arguments: Any) -> Value:
        try:
            return patiently(lambda: act(*arguments), DEFAULT_OUTAGES.seconds, redacted(self._url))
        except (Unreachable, PermissionError) as error:
            raise ConfigError(f"{self._url}: {error}") from error


def place_of(folder: str | Path, scratch: Path) -> LocalPlace | RemotePlace:
    """Return the place that a path or a URL names; arguments as of `RemotePlace`."""
    if as_url(folder) is None or str(folder).startswith("file://"):
        return LocalPlace(Path(str(folder).removeprefix("file://")))
    return RemotePlace(str(folder), scratch)


def step_of(name: str) -> int:
    """Return the step of a complete checkpoint's name."""
    return _order(name)[0]


def read_sums(place: Place, name: str) -> list[tuple[str, str]]:
    """Return the checksum and the name of each file of a checkpoint.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is none of a checkpoint.
        OSError: it cannot be read now.
    """
    lines = place.read(name, SUMS).decode().splitlines()
    sums = [(digest, path) for digest, path in (line.split("  ", 1) for line in lines)]
    if STATE not in (path for _, path in sums):
        raise ValueError(f"{SUMS} is incomplete")
    return sums


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write what `read_sums` reads, from each file's checksum by its name.

    Raises:
        OSError: the disk is full.
    """
    with (folder / SUMS).open("w", encoding="utf-8") as lines:
        lines.writelines(f"{digest}  {file}\n" for file, digest in sorted(sums.items()))
        sync(lines)


def problem_of(place: Place, name: str, sums: Sequence[tuple[str, str]]) -> str | None:
    """Return what is wrong with files of a checkpoint; None when they have their checksums.

    Raises:
        OSError: one cannot be read now, and may be whole.
    """
    for expected, file in sums:
        try:
            if Path(file).name != file:
                raise FileNotFoundError
            found = place.digest(name, file)
        except FileNotFoundError:
            return f"{SUMS} names {file!r}, which is no file of it"
        if found != expected:
            return f"{file} does not have its checksum"
    return None


def verify(path: Path) -> str | None:
    """Return what is wrong with a checkpoint folder; None when all checksums fit."""
    place = LocalPlace(path.parent)
    try:
        return problem_of(place, path.name, read_sums(place, path.name))
    except (OSError, ValueError) as error:
        return str(error)


def _remove_partial(folder: Path) -> None:
    for leftover in folder.glob(f"step_*{PARTIAL}"):
        shutil.rmtree(leftover, ignore_errors=True)


def _order(name: str) -> tuple[int, int]:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


def _set_aside(names: Sequence[str]) -> list[str]:
    return [n for n in names if n.endswith(CORRUPT) and _NAME.fullmatch(n.removesuffix(CORRUPT))]


def _newest_first(names: Sequence[str]) -> list[str]:
    return sorted(filter(_NAME.fullmatch, names), key=_order, reverse=True)
