"""Samples of several shard folders in a fixed order, with bad ones counted instead of fatal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from vlp.data.downstream.items import Items
from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.shards.remote import is_url
from vlp.data.shards.sample_files import BadSample
from vlp.io import Redacted


class EvaluationError(Redacted, ValueError):
    """An evaluation that cannot be done; the message is meant for the person at the terminal."""


@contextmanager
def said_in_one_line() -> Iterator[None]:
    """Turn a ValueError into one line for the person at the terminal.

    Raises:
        EvaluationError: the block raised ValueError.
    """
    try:
        yield
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error


class CaptionedSample(NamedTuple):
    """One image with its captions.

    image is decoded, or where features are stored the image tower's output (tokens, width);
    identity is equal for samples that show the same image (same source and image_id); key is
    that of its shard.
    """

    image: Image.Image
    captions: list[str]
    annotation: Annotation
    identity: tuple[str, str]
    key: str = ""


class Samples:
    """Random access over shard folders, in their order, shard by shard."""

    def __init__(self, folders: Sequence[str | Path], limit: int | None = None) -> None:
        """Open the folders' indices.

        Args:
            folders: shard folders.
            limit: only the first so many samples.

        Raises:
            ConfigError: as `Items`.
        """
        self._items = Items(folders, limit=limit)
        self.folders = list(self._items.folders)
        self._sources = [_place_of(folder) for folder in self.folders]

    def __len__(self) -> int:
        return len(self._items)

    def read(self, position: int, least: int | None = None) -> CaptionedSample | SkippedSample:
        """Read and decode one sample; a bad one comes back as what is wrong with it.

        Args:
            position: of the sample.
            least: pixels that both sides keep, as `vlp.data.image.decode.decode_image` takes it.
        """
        try:
            raw, _, where = self._items.read(position)
            captions = captions_of(raw.annotation)
            if not captions:
                raise BadSample("no text", where)
            image = self._image(position, raw.image, where, least)
        except BadSample as bad:
            return SkippedSample(bad.kind, bad.where)
        image_id = raw.annotation.image_id
        folder, shard, *_ = self._items.place(position)
        if image_id is None:
            shard_name = self._items.indices[folder].shards[shard].name
            identity = (self._sources[folder], f"{shard_name}, {raw.key}")
        else:
            identity = (raw.annotation.source or self._sources[folder], image_id)
        return CaptionedSample(image, captions, raw.annotation, identity, raw.key)

    def _image(self, position: int, data: bytes, where: str, least: int | None) -> Any:
        """Decode the image of a sample."""
        return decode_image(data, where, least)


def _place_of(folder: str) -> str:
    """Return the same for every spelling of a folder."""
    return folder if is_url(folder) else str(Path(folder).resolve())


def count_kinds(skipped: Sequence[SkippedSample]) -> dict[str, int]:
    """Count the bad samples of each kind."""
    return dict(sorted(Counter(skip.kind for skip in skipped).items()))


def kinds_in_words(counts: Mapping[str, int]) -> str:
    """Format the result of `count_kinds` for a table's notes: `3 no text, 1 unreadable image`."""
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
