"""Tar files: members appended with reproducible bytes, and found again in damaged files."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from vlp.config import ConfigError

_BLOCK = tarfile.BLOCKSIZE


class Member(NamedTuple):
    """A file inside a tar: where its content starts and how long it is, in bytes."""

    name: str
    offset: int
    size: int


def append_member(file: IO[bytes], name: str, content: bytes) -> None:
    """Append one file; no times, users or modes, so equal content gives equal bytes."""
    header = tarfile.TarInfo(name)
    header.size = len(content)
    file.write(header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
    file.write(content)
    file.write(bytes(-len(content) % _BLOCK))


def stored_files(
    file: Path, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Names and contents of a small tar file, compressed or not, that is read once and whole.

    Args:
        file: the tar file.
        wanted: which names are read.

    Raises:
        ConfigError: it is no tar file, or damaged.
    """
    try:
        with tarfile.open(file) as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if member.isfile() and wanted(name):
                    content = archive.extractfile(member)
                    assert content is not None  # it is a file
                    yield name, content.read()
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ConfigError(f"{file}: not a tar file that can be read ({error})") from error


def close_tar(file: IO[bytes]) -> None:
    """Write the two empty blocks that end a tar, padded to a whole record as tar itself does."""
    file.write(bytes(2 * _BLOCK))
    file.write(bytes(-file.tell() % tarfile.RECORDSIZE))


def read_members(path: Path) -> tuple[list[Member], str | None]:
    """List the regular files of a tar up to its end, or up to where it is damaged.

    Returns:
        The members whose content is wholly there, and what is wrong behind them (None: nothing).
        `tarfile` itself takes a damaged header for the end of the file, hence the check of what it
        left unread.

    Raises:
        OSError: the file cannot be opened or read.
    """
    size = path.stat().st_size
    if size == 0:
        return [], None
    members: list[Member] = []
    with open(path, "rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while True:
                    info = archive.next()
                    if info is None:
                        break
                    # tarfile keeps every header it has seen; a shard is read once, front to back.
                    archive.members = []  # type: ignore[attr-defined]
                    if info.isreg():
                        if info.offset_data + info.size > size:
                            return members, f"cut off inside {info.name}"
                        members.append(Member(info.name, info.offset_data, info.size))
                end = archive.offset
        except (tarfile.TarError, EOFError, ValueError) as error:
            return members, f"not a readable tar from here on ({error})"
        file.seek(end)
        block = file.read(_BLOCK)
    if block != bytes(_BLOCK):
        reason = "cut off" if len(block) < _BLOCK else "a damaged header"
        return members, f"{reason} at byte {end}"
    return members, None
