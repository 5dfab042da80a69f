"""Retrieval results of each query, one row each, so that two models can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluation.core.encoder import Collection
from evaluation.core.samples import Samples
from vlp.data.features.store import SourceFeatures, StoredFeatures, stored_sources
from vlp.data.image.transforms import Preprocessing


class StoredSamples(Samples):
    """Samples whose images may be there as stored features, plain views.

    Args:
        folders, limit: as of `Samples`.
        features: folders of them, together of all samples; without any, images are decoded.
        preprocessing: that these were made with.

    Raises:
        ConfigError: the features are of other shards, or were made otherwise.
    """

    def __init__(
        self,
        folders: Sequence[str | Path],
        limit: int | None,
        features: Sequence[StoredFeatures],
        preprocessing: Preprocessing,
    ) -> None:
        super().__init__(folders, limit)
        self._stored: list[SourceFeatures] | None = None
        if features:
            self._stored = stored_sources(features, preprocessing, self._items.indices)

    def _image(self, position: int, data: bytes, where: str, least: int | None) -> Any:
        if self._stored is None:
            return super()._image(position, data, where, least)
        folder, shard, sample, _ = self._items.place(position)
        self._stored[folder].views(shard, sample, False, where)  # says where there is no image
        return self._stored[folder].read(shard, sample, view=0)


def query_rows(
    ranks: Mapping[str, NDArray[np.int64]],
    direction: str,
    collection: Collection,
) -> list[dict[str, Any]]:
    """A row for each query of one direction.

    Rows hold `direction`, the image's `key` and `image`; for a caption its number among those
    of the image and its `text`; and `ranks`, that of the first right answer by stage, from 1.

    Args:
        ranks: of each query by stage, from 0.
        direction: "text_to_image" or "image_to_text".
        collection: what was searched.
    """
    queries: list[dict[str, Any]] = [
        {"key": first.key, "image": "/".join(first.identity)} for first in collection.samples
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
