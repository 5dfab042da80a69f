"""Hashes of all images as columns in files: a billion of them are more than a machine's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_tools.dedup.near_duplicates import Places
from data_tools.dedup.perceptual_hash import FLAT_IMAGE, READABLE, RECORD, UNREADABLE
from vlp.config import ConfigError

_FIELDS = ("key", "bytes", "coarse", "fine", "sample")
_FLAGS = ("usable", "textured")


class ImageColumns:
    """Columns of RECORDs in a folder; tasks open it by its path and map the columns they need.

    Two columns of bools stand beside the fields: `usable`, images that are compared at all, and
    `textured`, those of them that are compared by their looks.

    Args:
        folder: where the columns lie.
        ends: (shards,) number of images up to and with each shard; None in tasks, which need none.
        unreadable: images that cannot be decoded.
        flat: images of one colour.
        paired: samples of two images.
    """

    def __init__(
        self,
        folder: Path,
        ends: Places | None = None,
        unreadable: int = 0,
        flat: int = 0,
        paired: int = 0,
    ) -> None:
        self.folder = folder
        self.ends = np.empty(0, np.int64) if ends is None else ends
        self.unreadable, self.flat, self.paired = unreadable, flat, paired

    def __len__(self) -> int:
        return (self.folder / "usable").stat().st_size

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Map a column, (images,) or, of `fine`, (images, 4)."""
        return self._mapped(name, writable=False)

    def leave_out(self, images: Places) -> None:
        """Compare images no more."""
        for name in _FLAGS:
            column = self._mapped(name, writable=True)
            column[images] = False
            if isinstance(column, np.memmap):
                column.flush()

    def shards_of(self, images: Places) -> Places:
        """Return the number of each image's shard."""
        return np.searchsorted(self.ends, images, side="right")

    def _mapped(self, name: str, writable: bool) -> NDArray[Any]:
        path = self.folder / name
        dtype, shape = (
            RECORD[name].subdtype or (RECORD[name], ()) if name in _FIELDS else (bool, ())
        )
        if not path.stat().st_size:  # which cannot be mapped
            return np.empty((0, *shape), dtype)
        column = np.memmap(path, dtype, "r+" if writable else "r")
        return column.reshape(-1, *shape)


@contextmanager
def image_columns(
    shards: Iterable[NDArray[np.void]], folder: Path | None = None
) -> Iterator[ImageColumns]:
    """Write the RECORDs of shards as columns, for the time of a `with`.

    Images that cannot be decoded are not usable, nor are those of a sample of two images.

    Args:
        shards: RECORDs of each shard, in order.
        folder: beside what they lie, where all machines can read; None: a temporary folder.

    Raises:
        ConfigError: the folder cannot be written.
    """
    with ExitStack() as stack:
        with _writing(folder):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            name = stack.enter_context(TemporaryDirectory(prefix="columns-", dir=folder))
        yield _written(shards, Path(name))


def _written(shards: Iterable[NDArray[np.void]], folder: Path) -> ImageColumns:
    counts, found = [0], np.zeros(3, np.int64)
    with ExitStack() as stack:
        with _writing(folder):
            files = {
                name: stack.enter_context(open(folder / name, "wb")) for name in (*_FIELDS, *_FLAGS)
            }
        for records in shards:
            state, second = records["state"], records["second"]
            paired = second.copy()
            paired[:-1] |= second[1:]
            usable = ~paired & (state != UNREADABLE)
            with _writing(folder):
                for name in _FIELDS:
                    np.ascontiguousarray(records[name]).tofile(files[name])
                usable.tofile(files["usable"])
                (usable & (state == READABLE)).tofile(files["textured"])
            counts.append(len(records))
            found += [(state == UNREADABLE).sum(), (state == FLAT_IMAGE).sum(), second.sum()]
    return ImageColumns(folder, np.cumsum(counts)[1:], *found.tolist())


@contextmanager
def _writing(folder: Path | None) -> Iterator[None]:
    """Name the file or folder that cannot be written; numpy says of a full disk how much is."""
    try:
        yield
    except OSError as error:
        place, why = error.filename or folder, error.strerror or error
        raise ConfigError(f"{place}: cannot be written ({why})") from error
