"""Compressed tars as places of images: each is unpacked once, for as long as a command runs.

Images are read at random, by offset, which a compressed tar does not allow. It becomes a plain
tar in a temporary folder; no name inside it ever becomes a path on the disk.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vlp.config import ConfigError
from vlp.data.limits import MAX_UNPACKED_RATIO
from vlp.lock import FolderLock

TOO_MUCH = f"unpacks to more than {MAX_UNPACKED_RATIO} times its size; unpack it yourself"
SUFFIXES = (".tar.xz", ".tar.gz", ".tar.bz2", ".txz", ".tgz", ".tbz2")
_PREFIX, _LOCK = ".unpacked-", ".unpacking-"
_STARTS = {b"\xfd7zXZ\x00": lzma.open, b"\x1f\x8b": gzip.open, b"BZh": bz2.open}


@contextmanager
def unpacked(places: Sequence[Path], room: Path) -> Iterator[list[Path]]:
    """Yield the places with a plain tar instead of each compressed one.

    Args:
        places: folders, tars, compressed tars (told by their first bytes, whatever they are
            called) or anything else; of a folder its compressed tars follow the folder itself.
        room: folder to unpack into, with as much space as the images take. What is unpacked goes
            when the context ends; what a killed run left there goes now.

    Raises:
        ConfigError: an archive is damaged, or does not fit into `room`; or another process unpacks
            there.
    """
    with unpacking_room(room) as folder:
        yield list(_plain(places, folder))


@contextmanager
def unpacking_room(room: Path) -> Iterator[Path]:
    """Yield a temporary folder in `room`, as `unpacked` uses it.

    Raises:
        ConfigError: another process unpacks there.
    """
    with FolderLock(room, _LOCK):
        for leftover in room.glob(f"{_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=room) as folder:
            yield Path(folder)


def _plain(places: Sequence[Path], folder: Path) -> Iterator[Path]:
    for place in places:
        archives = [place]
        if place.is_dir():
            yield place
            archives = sorted(path for path in place.iterdir() if path.name.endswith(SUFFIXES))
        for archive in archives:
            yield plain_file(archive, folder, f"{archive.name}.tar")


def plain_file(path: Path, folder: Path, name: str) -> Path:
    """Return a file itself, or what a compressed one holds as a file of that name in `folder`.

    Raises:
        ConfigError: it is damaged, or does not fit there.
    """
    opener = _opener(path)
    if opener is None:
        return path
    # Two files may have one name; a folder of its own keeps each apart.
    target = Path(tempfile.mkdtemp(dir=folder), name)
    _unpack(path, opener, target)
    return target


def most_unpacked(archive: Path) -> int:
    """Return how many bytes may come out of a compressed file, at least 64 MiB."""
    return max(2**26, MAX_UNPACKED_RATIO * archive.stat().st_size)


def _opener(path: Path) -> Any:
    """Return the function that opens a compressed file; None for any other file."""
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        start = file.read(8)
    return next((opener for magic, opener in _STARTS.items() if start.startswith(magic)), None)


def _unpack(archive: Path, opener: Any, target: Path) -> None:
    try:
        source: IO[bytes]
        with opener(archive, "rb") as source, open(target, "wb") as file:
            most = most_unpacked(archive)
            while block := source.read(1 << 20):
                most -= file.write(block)
                if most < 0:
                    raise ConfigError(f"{archive}: {TOO_MUCH}")
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{archive}: a damaged archive ({error}); download it again") from error
    except OSError as error:
        raise ConfigError(
            f"{archive}: cannot be unpacked into {target.parents[2]} ({error}); where it is too "
            "large, unpack it elsewhere and name the folder"
        ) from error
