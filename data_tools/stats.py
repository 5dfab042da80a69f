"""Statistics of shards; counts of many shards add up in bounded memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from typer import Option

from data_tools.executor import open_ledger
from data_tools.options import File, Folders, N, WorkerOptions
from data_tools.shards import (
    Numbers,
    Shard,
    ShardReader,
    keys_in,
    numbers_of,
    repeated,
    scan,
    shards_of,
)
from vlp.config import ConfigError
from vlp.data.image.decode import decoder_errors, open_image
from vlp.data.schema import captions_of
from vlp.data.shards.sample_files import BadSample, RawSample
from vlp.io import write_json


def stats(
    folders: Folders,
    out: Annotated[Path, File(help="JSON to write")],
    workers: WorkerOptions,
    max_tokens: Annotated[
        int, N(help="count captions of more tokens, or of more words without --vocabulary")
    ] = 30,
    vocabulary: Annotated[
        str | None, Option(help="folder with tokenizer.json, or a name on the hub")
    ] = None,
) -> int:
    """Say what shards hold: captions and their lengths, images and their sizes, sources.

        python -m data_tools stats shards/cc3m --out stats.json --vocabulary bert-base-uncased \\
            --max-tokens 30

    FILE has the histograms, too. Words are runs of letters and digits in lower case; with
    --vocabulary captions are counted in its tokens, [CLS] and [SEP] included. Of images the headers
    are read. Interrupted and run again, it counts the rest. Memory: some 24 bytes a sample.
    """
    shards_of(folders)
    if vocabulary is not None:
        _tokens(vocabulary)
    work = partial(_tally, vocabulary=vocabulary, limit=max_tokens)
    unit = "words" if vocabulary is None else "tokens"
    tally, names, words = Tally(), list[Numbers](), set[int]()
    number = repeated_keys = 0
    with open_ledger(out.with_name(f"{out.name}.tasks")) as ledger:
        for folder in folders:
            shards, title, keys = shards_of([folder]), f"stats {folder}", list[Numbers]()
            for _, shard_tally in scan(work, shards, workers.workers(), title, ledger=ledger):
                number += 1
                tally.add(shard_tally.tally)
                names.append(shard_tally.names)
                words.update(shard_tally.words.tolist())
                keys.append(shard_tally.keys)
            repeated_keys += len(repeated(keys).values)
    distinct, copies = repeated(names)
    counts = ("samples", "captions", "images", "bytes of images", "samples without caption")
    summary = {
        "folders": [str(folder) for folder in folders],
        "shards": number,
        "limit": f"{max_tokens} {unit}",
        **dict.fromkeys((*counts, "captions that are too long"), 0),
        **tally.summary(),
        "vocabulary size": len(words),
        "repeated": {"keys": repeated_keys, "named images": distinct, "images": len(copies)},
    }
    write_json(out, summary, indent=1, error=ConfigError, ensure_ascii=False)
    print_summary(summary)
    print(f"{out} tells more")
    return 0


def print_summary(summary: dict[str, Any]) -> None:
    """Print the main numbers of a summary."""
    samples = summary["samples"]
    without = summary["samples without caption"]
    print(
        f"{samples} samples in {summary['shards']} shards, {summary['captions']} captions, "
        f"{summary['images']} images of {summary['bytes of images'] / 1e6:.1f} MB"
    )
    print(f"  without caption: {without} ({without / max(samples, 1):.1%})")
    longer = summary["captions that are too long"]
    print(f"  of more than {summary['limit']}: {longer} captions")
    for name, quantity in summary["quantities"].items():
        percentiles = quantity["percentiles"]
        low, middle, high = (percentiles[share] for share in ("5", "50", "95"))
        print(f"  {name}: {low:g} to {high:g}, median {middle:g} {quantity['unit']}")
    print(f"  different words: {summary['vocabulary size']}")
    for kind in ("formats", "sources", "bad samples"):
        shown = list(summary[kind].items())
        more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
        print(f"  {kind}: {', '.join(f'{name} {count}' for name, count in shown[:8])}{more}")
    repeated = summary["repeated"]
    print(
        f"  keys that a folder has more than once: {repeated['keys']}; images (source and "
        f"image_id) of more than one sample: {repeated['images']} of {repeated['named images']}"
    )


def _tally(shard: Shard, vocabulary: str | None, limit: int) -> ShardTally:
    with ShardReader(shard.path) as opened:
        return tally_shard(opened, None if vocabulary is None else _tokens(vocabulary), limit)


@cache
def _tokens(vocabulary: str) -> Callable[[str], int]:
    # Imported here: it brings torch along, which counting words does not need.
    from vlp.data.text.tokenizer import TextProcessor

    tokenizer = TextProcessor.load(vocabulary, max_tokens=512).tokenizer
    return lambda caption: len(tokenizer.encode(caption).ids)


WORD = re.compile(r"\w+(?:['’]\w+)*")  # letters and digits, apostrophes within
# With a histogram; units.
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
_MOST_NAMES = 1000
_OTHERS = "(others)"
_PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


class Tally:
    """Counts, histograms (rounded to two digits if not whole) and most frequent names."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.histograms: dict[str, Counter[float]] = {name: Counter() for name in QUANTITIES}
        self.formats: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()

    def add(self, other: Tally) -> None:
        """Add another tally."""
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
    """Counts of a shard, and its keys, image names and words as numbers."""

    tally: Tally
    keys: Numbers
    names: Numbers
    words: Numbers


def tally_shard(shard: ShardReader, tokens: Callable[[str], int] | None, limit: int) -> ShardTally:
    """Tally a shard from annotations and image headers; `limit` is in tokens, else in words."""
    tally = Tally()
    names: list[str] = []
    words: set[str] = set()
    for files in shard.samples:
        tally.counts["samples"] += 1
        try:
            sample = shard.read(files)
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
    elif not shard.samples:
        tally.bad["empty shard"] += 1
    return ShardTally(tally, numbers_of(keys_in(shard)), numbers_of(names), numbers_of(words))


def describe(histogram: Counter[float]) -> dict[str, Any]:
    """Count, mean, extremes and percentiles of a histogram, and the histogram itself."""
    values = np.array(sorted(histogram), dtype=float)
    counts = np.array([histogram[value] for value in sorted(histogram)], dtype=np.int64)
    below = np.cumsum(counts)
    indices = [np.searchsorted(below, below[-1] * share / 100) for share in _PERCENTILES]
    return {
        "count": int(below[-1]),
        "mean": float((values * counts).sum() / below[-1]),
        "min": values[0],
        "max": values[-1],
        "percentiles": {str(share): values[p] for share, p in zip(_PERCENTILES, indices)},
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
            with decoder_errors(sample.key), open_image(data, sample.key) as image:
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
