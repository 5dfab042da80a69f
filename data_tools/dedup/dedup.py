"""Find images that come more than once and list the keys to drop, the first of each is kept.

    python -m data_tools dedup shards/cc3m shards/sbu --out repeated.txt
    python -m data_tools dedup shards/cc3m --out repeated.txt --exact       # equal bytes only
    python -m data_tools dedup shards/cc3m --out repeated.txt --sheet pairs.png

Exact means the same stored bytes (sha256). Near means that two images look alike: saved again,
reduced, squeezed or slightly cut; data_tools/dedup/perceptual_hash.py tells how
that is measured and what it
cannot see. All pairs within `--distance` are found. Folders are taken in the order given, and a
image is dropped for the first one that it looks like. Samples of two images are left alone.

The list has one key a line and, in a comment above each, the sample that is kept for it; builders
take it as `--take-down`. Hashes of finished shards are kept beside it in LIST.hashes, so that an
interrupted run goes on and the next one is quick; delete them when done. While the command runs, 62
bytes an image lie there in columns, which tasks share; its memory is some 9 bytes an image, of
which it maps most, where one in fifty is a duplicate. A killed run leaves them in
LIST.hashes/columns-*: delete these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_tools.builder.take_down import Line, keys_of, warn_of_shared_keys, write_list
from data_tools.dedup.dedup_options import (
    add_near_duplicate_options,
    hash_folder,
    required_distance,
)
from data_tools.dedup.duplicate_images import (
    Drops,
    duplicate_images,
    kept_with_dropped_keys,
)
from data_tools.dedup.image_columns import ImageColumns, image_columns
from data_tools.dedup.near_duplicates import Places
from data_tools.dedup.perceptual_hash import differing_bits, hash_shards
from data_tools.executor.executor import Executor
from data_tools.executor.options import add_executor, executor_of
from data_tools.inspect.contact_sheet import SheetCell, draw_pairs
from data_tools.scan.shard_reader import Shard, shards_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folder of shards")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="LIST", help="list of the keys to drop"
    )
    add_near_duplicate_options(parser)
    add_executor(parser)


def run(arguments: argparse.Namespace) -> int:
    """Hash, compare, write the list and say what is on it."""
    distance, executor = required_distance(arguments), executor_of(arguments)
    shards = shards_of(arguments.folders)
    hashes = hash_folder(arguments)
    with image_columns(hash_shards(shards, hashes, executor, "hash"), hashes) as images:
        drops = duplicate_images(images, distance, executor)
        ours = _HashedImages(shards, images)
        same = images["bytes"][drops.dropped] == images["bytes"][drops.kept]
        heading = (
            f"{len(drops.dropped)} of {len(images)} images repeat another one: {int(same.sum())} "
            f"with the same bytes, {int((~same).sum())} that look like it"
        )
        write_list(arguments.out, f"dedup: {heading}", _lines(ours, drops, same, executor))
        print(f"{arguments.out}: {heading}")
        _say_what_was_left(images, drops)
        if arguments.sheet is not None:
            pairs = _pairs_to_show(ours, drops, arguments.pairs)
            if pairs:
                draw_pairs(pairs, arguments.sheet)
                print(f"{arguments.sheet}: {len(pairs)} pairs, the most different first")
    return 0


class _HashedImages(NamedTuple):
    """All images, and the shards that they come from."""

    shards: Sequence[Shard]
    images: ImageColumns


def _lines(
    ours: _HashedImages, drops: Drops, same: NDArray[np.bool_], executor: Executor
) -> Iterator[Line]:
    """Yield a line for each dropped image; an image that is kept for it came before it."""
    images = ours.images
    bits = differing_bits(images["coarse"][drops.dropped], images["coarse"][drops.kept])
    rows = zip(*drops, same, bits)
    is_kept = np.unique(drops.kept)
    names: dict[int, tuple[str, Shard]] = {}
    for shard, key, image in _names(ours, np.union1d(drops.dropped, is_kept), executor):
        if is_kept[np.searchsorted(is_kept, image) % len(is_kept)] == image:
            names[image] = key, shard
            continue
        _, kept, equal, distance = next(rows)
        how = "the same bytes as" if equal else f"like ({distance} bits of 64)"
        name, place = names[int(kept)]
        yield Line(shard.folder, key, f"{how} {name} of {place}")


def _names(
    ours: _HashedImages, images: Places, executor: Executor
) -> Iterator[tuple[Shard, str, int]]:
    """Yield the shard and the key of images, in their order."""
    places, starts = np.unique(ours.images.shards_of(images), return_index=True)
    samples = ours.images["sample"][images]
    bounds = [*starts.tolist(), len(images)]
    # As arrays: of a billion images, tens of millions may be wanted.
    wanted: dict[int, Any] = {
        shard: samples[start:end] for shard, (start, end) in zip(places.tolist(), pairwise(bounds))
    }
    numbers = iter(images.tolist())
    for shard, keys in keys_of(wanted, ours.shards, executor):
        for key, image in zip(keys, numbers):
            yield ours.shards[shard], key, image


def _pairs_to_show(
    ours: _HashedImages, drops: Drops, count: int
) -> list[tuple[SheetCell, SheetCell]]:
    images = ours.images
    bits = differing_bits(images["coarse"][drops.dropped], images["coarse"][drops.kept])
    pairs = []
    for place in np.argsort(-bits, kind="stable")[:count]:
        notes = f"kept, {bits[place]} bits apart", "dropped"
        both = np.array([drops.kept[place], drops.dropped[place]])
        first, second = (
            SheetCell(ours.shards[shard], int(sample), note)
            for shard, sample, note in zip(images.shards_of(both), images["sample"][both], notes)
        )
        pairs.append((first, second))
    return pairs


def _say_what_was_left(images: ImageColumns, drops: Drops) -> None:
    for count, what in (
        (images.unreadable, "images cannot be decoded (see verify) and were left out"),
        (images.flat, "images of one colour were compared by their bytes alone"),
        (images.paired, "samples have two images and were left out"),
    ):
        if count:
            print(f"  {count} {what}")
    warn_of_shared_keys(kept_with_dropped_keys(images, drops.dropped))
