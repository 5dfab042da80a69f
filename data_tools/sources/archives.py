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

_SUFFIXES = (".tar.xz", ".tar.gz", ".tar.bz2", ".txz", ".tgz", ".tbz2")
_PREFIX = ".unpacked-"
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
        ConfigError: an archive is damaged, or does not fit into `room`.
    """
    room.mkdir(parents=True, exist_ok=True)
    for leftover in room.glob(f"{_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=room) as folder:
        plain: list[Path] = []
        for place in places:
            archives = [place]
            if place.is_dir():
                plain.append(place)
                archives = sorted(path for path in place.iterdir() if path.name.endswith(_SUFFIXES))
            for archive in archives:
                opener = _opener(archive)
                if opener is None:
                    plain.append(archive)
                    continue
                # Two archives may have one name; the number keeps them apart.
                target = Path(folder) / f"{len(plain)}-{archive.name}.tar"
                _unpack(archive, opener, target)
                plain.append(target)
        yield plain


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
            shutil.copyfileobj(source, file, 1 << 20)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{archive}: a damaged archive ({error}); download it again") from error
    except OSError as error:
        raise ConfigError(
            f"{archive}: cannot be unpacked into {target.parent.parent} ({error}); where it is too "
            "large, unpack it elsewhere and name the folder"
        ) from error
