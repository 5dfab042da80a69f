"""Retrieval results of each query, one row each, so that two models can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluation.core.encoder import Collection
from evaluation.core.samples import CaptionedSample, Samples
from evaluation.core.work_sharding import Ranks
from vlp.data.shards.bad_samples import SkippedSample

Images = Mapping[tuple[str, str], str]
"""Identity of each image -> key of its first sample, in the order of the shards."""


class KeyedSamples(Samples):
    """Samples that remember whose images were read on this rank."""

    def __init__(self, folders: Sequence[str | Path], limit: int | None = None) -> None:
        super().__init__(folders, limit)
        self._seen: dict[int, tuple[tuple[str, str], str]] = {}

    def read(self, position: int) -> CaptionedSample | SkippedSample:
        """Read and decode one sample."""
        sample = super().read(position)
        if isinstance(sample, CaptionedSample):
            self._seen[position] = sample.identity, sample.key
        return sample

    def images(self, ranks: Ranks) -> Images:
        """The images that all ranks together have read."""
        parts = ranks.map_blocks(ranks.world_size, lambda _: self._seen)
        places = {place: one for part in parts for place, one in part.items()}
        found: dict[tuple[str, str], str] = {}
        for _, (identity, key) in sorted(places.items()):
            found.setdefault(identity, key)
        return found


def query_rows(
    ranks: Mapping[str, NDArray[np.int64]],
    direction: str,
    collection: Collection,
    images: Images,
) -> list[dict[str, Any]]:
    """A row for each query of one direction.

    Rows hold `direction`, the image's `key` and `image`; for a caption its number among those
    of the image and its `text`; and `ranks`, that of the first right answer by stage, from 1.

    Args:
        ranks: of each query by stage, from 0.
        direction: "text_to_image" or "image_to_text".
        collection: what was searched.
        images: those of the collection.
    """
    queries: list[dict[str, Any]] = [
        {"key": key, "image": "/".join(name)} for name, key in images.items()
    ]
    if direction == "text_to_image":
        owners = collection.image_of_text
        numbers = np.arange(len(owners)) - np.searchsorted(owners, owners)
        queries = [
            {**queries[owner], "caption": int(number), "text": text}
            for owner, number, text in zip(owners, numbers, collection.captions)
        ]
    return [
        {
            "direction": direction,
            **query,
            "ranks": {stage: int(found[row]) + 1 for stage, found in ranks.items()},
        }
        for row, query in enumerate(queries)
    ]
