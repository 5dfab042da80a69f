"""Plain tar files: members appended with reproducible bytes, and found again in damaged files."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import IO, NamedTuple

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
