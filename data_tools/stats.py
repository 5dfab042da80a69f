"""Statistics of shards, tallied shard by shard and added up in bounded memory."""

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
    NameHashes,
    Shard,
    ShardReader,
    find_repeated,
    hash_names,
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
    """Count samples, captions, images and sources, with histograms of lengths and sizes.

        vlp data stats shards/cc3m --out stats.json --vocabulary bert-base-uncased \\
            --max-tokens 30

    The main numbers are printed; FILE has all, with histograms. Words are runs of letters and
    digits in lower case; --vocabulary also counts a caption's tokens, with [CLS] and [SEP]. Image
    sizes are read from headers. After an interruption the same command counts the rest.
    Memory: some 24 bytes a sample.
    """
    # Errors of the arguments come before any work.
    shards_of(folders)
    if vocabulary is not None:
        _token_counter(vocabulary)
    work = partial(tally_shard, vocabulary=vocabulary, limit=max_tokens)
    unit = "words" if vocabulary is None else "tokens"
    tally, names, words = Tally(), list[NameHashes](), set[int]()
    num_shards = num_repeated_keys = 0
    with open_ledger(out.with_name(f"{out.name}.tasks")) as ledger:
        for folder in folders:
            # Keys must be unique in their folder only.
            shards, title, keys = shards_of([folder]), f"stats {folder}", list[NameHashes]()
            for _, shard_tally in scan(work, shards, workers.workers(), title, ledger=ledger):
                num_shards += 1
                tally.add(shard_tally.tally)
                names.append(shard_tally.names)
                words.update(shard_tally.words.tolist())
                keys.append(shard_tally.keys)
            num_repeated_keys += len(find_repeated(keys)[1])
    num_names, repeated_names = find_repeated(names)
    counts = ("samples", "captions", "images", "bytes of images", "samples without caption")
    summary = {
        "folders": [str(folder) for folder in folders],
        "shards": num_shards,
        "limit": f"{max_tokens} {unit}",
        **dict.fromkeys((*counts, "captions that are too long"), 0),
        **tally.summary(),
        "vocabulary size": len(words),
        "repeated": {
            "keys": num_repeated_keys,
            "named images": num_names,
            "images": len(repeated_names),
        },
    }
    write_json(out, summary, indent=1, error=ConfigError, ensure_ascii=False)
    print_summary(summary)
    print(f"{out} has the histograms")
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
        low, median, high = (percentiles[percent] for percent in ("5", "50", "95"))
        print(f"  {name}: {low:g} to {high:g} (5 to 95 %), median {median:g} {quantity['unit']}")
    print(f"  different words: {summary['vocabulary size']}")
    for kind in ("formats", "sources", "bad samples"):
        counts = list(summary[kind].items())
        more = f" and {len(counts) - 8} more" if len(counts) > 8 else ""
        shown = ", ".join(f"{name} {count}" for name, count in counts[:8])
        print(f"  {kind}: {shown or 'none'}{more}")
    repeated = summary["repeated"]
    print(
        f"  repeated keys within a folder: {repeated['keys']}; images (source and image_id) in "
        f"more than one sample: {repeated['images']} of {repeated['named images']}"
    )


@cache
def _token_counter(vocabulary: str) -> Callable[[str], int]:
    # Imported here, as it imports torch, which counting words does not need.
    from vlp.data.text.tokenizer import TextProcessor

    tokenizer = TextProcessor.load(vocabulary, max_tokens=512).tokenizer
    return lambda caption: len(tokenizer.encode(caption).ids)


WORD = re.compile(r"\w+(?:['’]\w+)*")  # letters and digits, with apostrophes between them
# Quantities with a histogram, and their units.
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
_MAX_SOURCES = 1000
_OTHERS = "(others)"
_PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


class Tally:
    """Counts and histograms of shards; bytes and aspect ratios are rounded to two digits."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.histograms: dict[str, Counter[float]] = {name: Counter() for name in QUANTITIES}
        self.formats: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()

    def add(self, other: Tally) -> None:
        """Add another tally; of many sources the rarest become one."""
        self.counts.update(other.counts)
        for name, histogram in other.histograms.items():
            self.histograms[name].update(histogram)
        self.formats.update(other.formats)
        self.bad.update(other.bad)
        self.sources.update(other.sources)
        if len(self.sources) > _MAX_SOURCES:
            frequent = Counter(dict(self.sources.most_common(_MAX_SOURCES // 2)))
            frequent[_OTHERS] += self.sources.total() - frequent.total()
            self.sources = frequent

    def summary(self) -> dict[str, Any]:
        """Return the tally as JSON; a histogram has [value, count] pairs in order of value."""
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
    """Tally of a shard, and hashes of its keys, of its images' names and of its words."""

    tally: Tally
    keys: NameHashes
    names: NameHashes
    words: NameHashes


def tally_shard(shard: Shard, vocabulary: str | None, limit: int) -> ShardTally:
    """Tally a shard; captions of more than `limit` tokens (words without a vocabulary) are long."""
    count_tokens = None if vocabulary is None else _token_counter(vocabulary)
    tally = Tally()
    names: list[str] = []
    words: set[str] = set()
    with ShardReader(shard.path) as reader:
        for sample in reader.samples:
            tally.counts["samples"] += 1
            try:
                raw = reader.read(sample)
            except BadSample as bad:
                tally.bad[bad.kind] += 1
                continue
            source, image_id = raw.annotation.source, raw.annotation.image_id
            if source and image_id:
                names.append(f"{source}\0{image_id}")
            tally.sources[source or "(none)"] += 1
            _count_captions(tally, captions_of(raw.annotation), words, count_tokens, limit)
            _count_images(tally, raw)
        if reader.problem:
            tally.bad["missing shard" if reader.missing else "corrupt shard"] += 1
        elif not reader.samples:
            tally.bad["empty shard"] += 1
        return ShardTally(tally, hash_names(reader.keys), hash_names(names), hash_names(words))


def describe(histogram: Counter[float]) -> dict[str, Any]:
    """Return count, mean, extremes and percentiles of a histogram, and the histogram itself."""
    values = np.array(sorted(histogram), dtype=float)
    counts = np.array([histogram[value] for value in sorted(histogram)], dtype=np.int64)
    cumulative = np.cumsum(counts)
    total = cumulative[-1]
    indices = [np.searchsorted(cumulative, total * percent / 100) for percent in _PERCENTILES]
    return {
        "count": int(total),
        "mean": float((values * counts).sum() / total),
        "min": values[0],
        "max": values[-1],
        "percentiles": {str(percent): values[i] for percent, i in zip(_PERCENTILES, indices)},
        "histogram": [[value, int(count)] for value, count in zip(values.tolist(), counts)],
    }


def _count_captions(
    tally: Tally,
    captions: list[str],
    vocabulary: set[str],
    count_tokens: Callable[[str], int] | None,
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
        if count_tokens is not None:
            length = count_tokens(caption)
            tally.histograms["tokens per caption"][length] += 1
        tally.counts["captions that are too long"] += length > limit


def _count_images(tally: Tally, raw: RawSample) -> None:
    for data in (raw.image, raw.second_image):
        if data is None:
            continue
        tally.counts["images"] += 1
        tally.counts["bytes of images"] += len(data)
        tally.histograms["image size"][round_to_2_digits(len(data))] += 1
        try:
            with decoder_errors(raw.key), open_image(data, raw.key) as image:
                (width, height), image_format = image.size, image.format or "?"
        except BadSample as bad:
            tally.bad[bad.kind] += 1
            continue
        tally.formats[image_format] += 1
        tally.histograms["width"][width] += 1
        tally.histograms["height"][height] += 1
        tally.histograms["shorter side"][min(width, height)] += 1
        tally.histograms["aspect ratio"][round_to_2_digits(width / height)] += 1


def round_to_2_digits(value: float) -> float:
    """Round a number to two significant digits."""
    return float(f"{value:.1e}")
