"""Samples of shards that predictions speak of, found by their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from evaluation.core.samples import EvaluationError
from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import RawSample, contents
from vlp.data.shards.shard_index import BadSample, ShardIndex

Row = Mapping[str, Any]


def samples_of(
    rows: Sequence[Row], shards: Sequence[str | Path], fits: Callable[[Row, Annotation], bool]
) -> list[RawSample | None]:
    """The sample of each row, or None; only headers are read of those that no row is about.

    Args:
        rows: predictions, with their `key`.
        shards: local folders, in the order in which they are looked through.
        fits: whether a sample of that key is the row's: another folder may have the same keys.

    Raises:
        ConfigError: a folder cannot be read.
    """
    found: list[RawSample | None] = [None] * len(rows)
    wanted: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        wanted.setdefault(str(row.get("key")), []).append(number)
    for folder in shards:
        index = ShardIndex.open(Path(folder))
        for shard, entry in enumerate(index.shards):
            if None not in found:
                return found
            for place, sample in enumerate(contents(Path(folder) / entry.name).samples):
                numbers = [one for one in wanted.get(sample.key, ()) if found[one] is None]
                if not numbers:
                    continue
                try:
                    raw = index.read(shard, place)
                except BadSample:
                    continue
                for number in numbers:
                    if fits(rows[number], raw.annotation):
                        found[number] = raw
    return found


def images_of(raw: RawSample) -> list[Image.Image]:
    """Its one or two images.

    Raises:
        EvaluationError: one cannot be decoded.
    """
    stored = [raw.image] + ([raw.second_image] if raw.second_image is not None else [])
    try:
        return [decode_image(data, raw.key) for data in stored]
    except BadSample as error:
        raise EvaluationError(str(error)) from error
