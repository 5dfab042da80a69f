"""Statistics of shards; counts of many shards add up in bounded memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from data_tools.scan.keys import keys_in
from data_tools.scan.repeated_ids import Numbers, numbers_of
from data_tools.scan.shard_reader import ShardReader
from vlp.data.image.decode import open_image, reading
from vlp.data.schema import captions_of
from vlp.data.shards.sample_files import BadSample, RawSample

WORD = re.compile(r"\w+(?:['’]\w+)*")
"""A word: letters and digits, apostrophes within."""

QUANTITIES = {
    "captions per sample": "captions",
    "words per caption": "words",
    "tokens per caption": "tokens",
    "width": "pixels",
    "height": "pixels",
    "shorter side": "pixels",
    "aspect ratio": "width / height",
    "image size": "bytes",
}
"""Quantities with a histogram, and their units."""

_MOST_NAMES = 1000
_OTHERS = "(others)"
_PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


class Tally:
    """Counts, histograms and the most frequent names; `add` another one to it.

    Histograms hold whole numbers as they are, and others to two digits: so they stay small
    whatever the number of samples.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.histograms: dict[str, Counter[float]] = {name: Counter() for name in QUANTITIES}
        self.formats: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()

    def add(self, other: Tally) -> None:
        """Add what another one counted."""
        self.counts.update(other.counts)
        for name, histogram in other.histograms.items():
            self.histograms[name].update(histogram)
        self.formats.update(other.formats)
        self.bad.update(other.bad)
        self.sources.update(other.sources)
        if len(self.sources) > _MOST_NAMES:
            rest = self.sources.total() - self.sources[_OTHERS]
            most = Counter(dict(self.sources.most_common(_MOST_NAMES // 2)))
            most[_OTHERS] += rest - (most.total() - most[_OTHERS])
            self.sources = most

    def summary(self) -> dict[str, Any]:
        """Return all of it as JSON; histograms as [value, count] in order of value."""
        return {
            **self.counts,
            "formats": dict(self.formats.most_common()),
            "sources": dict(self.sources.most_common()),
            "bad samples": dict(self.bad.most_common()),
            "quantities": {
                name: {"unit": QUANTITIES[name], **describe(histogram)}
                for name, histogram in self.histograms.items()
                if histogram
            },
        }


class ShardTally(NamedTuple):
    """Counts of a shard or several, and their keys, image names and words as numbers."""

    tally: Tally
    keys: Numbers
    names: Numbers
    words: Numbers
    shards: int = 1


def joined(first: ShardTally, second: ShardTally) -> ShardTally:
    """Return the counts of both, keys and names in order."""
    first.tally.add(second.tally)
    return ShardTally(
        first.tally,
        np.concatenate((first.keys, second.keys)),
        np.concatenate((first.names, second.names)),
        np.union1d(first.words, second.words),
        first.shards + second.shards,
    )


def tally_shard(shard: ShardReader, tokens: Callable[[str], int] | None, limit: int) -> ShardTally:
    """Count what a shard holds; images are read up to their headers.

    Args:
        shard: open shard.
        tokens: the number of tokens of a caption; None counts no tokens.
        limit: captions of more tokens are counted; of more words, where there are no tokens.
    """
    tally = Tally()
    names: list[str] = []
    words: set[str] = set()
    for number in range(len(shard)):
        tally.counts["samples"] += 1
        try:
            sample = shard.read(number)
        except BadSample as bad:
            tally.bad[bad.kind] += 1
            continue
        if sample.annotation.source and sample.annotation.image_id:
            names.append(f"{sample.annotation.source}\0{sample.annotation.image_id}")
        tally.sources[sample.annotation.source or "(none)"] += 1
        _count_captions(tally, captions_of(sample.annotation), words, tokens, limit)
        _count_images(tally, sample)
    if shard.problem:
        tally.bad["missing shard" if shard.missing else "corrupt shard"] += 1
    return ShardTally(tally, numbers_of(keys_in(shard)), numbers_of(names), numbers_of(words))


def describe(histogram: Counter[float]) -> dict[str, Any]:
    """Count, mean, extremes and percentiles of a histogram, and the histogram itself."""
    values = np.array(sorted(histogram), dtype=float)
    counts = np.array([histogram[value] for value in sorted(histogram)], dtype=np.int64)
    below = np.cumsum(counts)
    places = [np.searchsorted(below, below[-1] * share / 100) for share in _PERCENTILES]
    return {
        "count": int(below[-1]),
        "mean": float((values * counts).sum() / below[-1]),
        "min": values[0],
        "max": values[-1],
        "percentiles": {str(share): values[p] for share, p in zip(_PERCENTILES, places)},
        "histogram": [[value, int(count)] for value, count in zip(values.tolist(), counts)],
    }


def _count_captions(
    tally: Tally,
    captions: list[str],
    vocabulary: set[str],
    tokens: Callable[[str], int] | None,
    limit: int,
) -> None:
    tally.counts["captions"] += len(captions)
    tally.counts["samples without caption"] += not captions
    tally.histograms["captions per sample"][len(captions)] += 1
    for caption in captions:
        words = WORD.findall(caption.lower())
        vocabulary.update(words)
        length = len(words)
        tally.histograms["words per caption"][length] += 1
        if tokens is not None:
            length = tokens(caption)
            tally.histograms["tokens per caption"][length] += 1
        tally.counts["captions that are too long"] += length > limit


def _count_images(tally: Tally, sample: RawSample) -> None:
    for data in (sample.image, sample.second_image):
        if data is None:
            continue
        tally.counts["images"] += 1
        tally.counts["bytes of images"] += len(data)
        tally.histograms["image size"][rounded(len(data))] += 1
        try:
            with reading(sample.key), open_image(data, sample.key) as image:
                (width, height), kind = image.size, image.format or "?"
        except BadSample as bad:
            tally.bad[bad.kind] += 1
            continue
        tally.formats[kind] += 1
        tally.histograms["width"][width] += 1
        tally.histograms["height"][height] += 1
        tally.histograms["shorter side"][min(width, height)] += 1
        tally.histograms["aspect ratio"][rounded(width / height)] += 1


def rounded(value: float) -> float:
    """Return a positive number to two digits."""
    return float(f"{value:.1e}") if value else 0.0
