"""Samples of several shard folders in a fixed order, with bad ones counted instead of fatal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.shards.remote import is_url
from vlp.data.shards.shard_index import BadSample, ShardIndex
from vlp.io import Redacted


class EvaluationError(Redacted, ValueError):
    """An evaluation that cannot be done; the message is meant for the person at the terminal."""


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
            EvaluationError: there is no folder or no sample.
        """
        if not folders:
            raise EvaluationError("no shard folder is given")
        self.folders = [str(folder) for folder in folders]
        self._sources = [_place_of(folder) for folder in self.folders]
        self._indices = [ShardIndex.open(Path(folder)) for folder in folders]
        self._places = [
            (folder, shard, sample)
            for folder, index in enumerate(self._indices)
            for shard, entry in enumerate(index.shards)
            for sample in range(entry.samples)
        ]
        if limit is not None:
            if limit < 1:
                raise EvaluationError(f"limit {limit}: at least one sample is needed")
            self._places = self._places[:limit]
        if not self._places:
            raise EvaluationError(f"{', '.join(self.folders)}: the shards hold no sample")

    def __len__(self) -> int:
        return len(self._places)

    def read(self, position: int, least: int | None = None) -> CaptionedSample | SkippedSample:
        """Read and decode one sample; a bad one comes back as what is wrong with it.

        Args:
            position: of the sample.
            least: pixels that both sides keep, as `vlp.data.image.decode.decode_image` takes it.
        """
        folder, shard, number = self._places[position]
        index = self._indices[folder]
        try:
            raw = index.read(shard, number)
            where = f"{index.folder / index.shards[shard].name}, {raw.key}"
            captions = captions_of(raw.annotation)
            if not captions:
                raise BadSample("no text", where)
            image = self._image(self._places[position], raw.image, where, least)
        except BadSample as bad:
            return SkippedSample(bad.kind, bad.where)
        image_id = raw.annotation.image_id
        if image_id is None:
            shard_name = index.shards[shard].name
            identity = (self._sources[folder], f"{shard_name}, {raw.key}")
        else:
            identity = (raw.annotation.source or self._sources[folder], image_id)
        return CaptionedSample(image, captions, raw.annotation, identity, raw.key)

    def _image(
        self, place: tuple[int, int, int], data: bytes, where: str, least: int | None
    ) -> Any:
        """Decode the image at (folder, shard, sample)."""
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
