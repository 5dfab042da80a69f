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
interrupted run goes on and the next one is quick; delete them when done. Memory: some 150 bytes a
image.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_tools.builder.take_down import Line, keys_of, write_list
from data_tools.dedup.dedup_options import (
    add_near_duplicate_options,
    hash_folder,
    required_distance,
)
from data_tools.dedup.duplicate_images import Drops, duplicate_images
from data_tools.dedup.near_duplicates import Places
from data_tools.dedup.perceptual_hash import FLAT_IMAGE, UNREADABLE, differing_bits, hash_shards
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
    parts = list(hash_shards(shards, hash_folder(arguments), executor, "hash"))
    ends = np.cumsum([len(part) for part in parts])
    images = np.concatenate(parts)
    del parts
    drops = duplicate_images(images, distance, executor, hash_folder(arguments))
    places = np.searchsorted(ends, np.arange(len(images)), side="right")
    ours = _HashedImages(shards, images, places)
    same = images["bytes"][drops.dropped] == images["bytes"][drops.kept]
    heading = (
        f"{len(drops.dropped)} of {len(images)} images repeat another one: {int(same.sum())} "
        f"with the same bytes, {int((~same).sum())} that look like it"
    )
    write_list(arguments.out, f"dedup: {heading}", _lines(ours, drops, same, executor))
    print(f"{arguments.out}: {heading}")
    _say_what_was_left(ours, drops)
    pairs = _pairs_to_show(ours, drops, arguments.pairs)
    if arguments.sheet is not None and pairs:
        draw_pairs(pairs, arguments.sheet)
        print(f"{arguments.sheet}: {len(pairs)} pairs, the most different first")
    return 0


class _HashedImages(NamedTuple):
    """All images and the place of each one's shard in `shards`."""

    shards: Sequence[Shard]
    records: NDArray[np.void]
    places: Places


def _lines(
    ours: _HashedImages, drops: Drops, same: NDArray[np.bool_], executor: Executor
) -> Iterator[Line]:
    names = _names(ours, np.unique(np.concatenate(drops)), executor)
    bits = differing_bits(ours.records["coarse"][drops.dropped], ours.records["coarse"][drops.kept])
    for dropped, kept, equal, distance in zip(*drops, same, bits):
        how = "the same bytes as" if equal else f"like ({distance} bits of 64)"
        place = ours.shards[ours.places[kept]]
        yield Line(
            ours.shards[ours.places[dropped]].folder,
            names[int(dropped)],
            f"{how} {names[int(kept)]} of {place}",
        )


def _names(ours: _HashedImages, images: Places, executor: Executor) -> dict[int, str]:
    by_shard: dict[int, list[int]] = defaultdict(list)
    for image in images:
        by_shard[int(ours.places[image])].append(int(image))
    wanted = {
        shard: ours.records["sample"][members].tolist() for shard, members in by_shard.items()
    }
    return {
        image: key
        for shard, keys in keys_of(wanted, ours.shards, executor)
        for image, key in zip(by_shard[shard], keys)
    }


def _pairs_to_show(
    ours: _HashedImages, drops: Drops, count: int
) -> list[tuple[SheetCell, SheetCell]]:
    bits = differing_bits(ours.records["coarse"][drops.dropped], ours.records["coarse"][drops.kept])
    pairs = []
    for place in np.argsort(-bits, kind="stable")[:count]:
        notes = f"kept, {bits[place]} bits apart", "dropped"
        both = drops.kept[place], drops.dropped[place]
        first, second = (
            SheetCell(ours.shards[ours.places[image]], int(ours.records["sample"][image]), note)
            for image, note in zip(both, notes)
        )
        pairs.append((first, second))
    return pairs


def _say_what_was_left(ours: _HashedImages, drops: Drops) -> None:
    unreadable = int((ours.records["state"] == UNREADABLE).sum())
    flat = int((ours.records["state"] == FLAT_IMAGE).sum())
    paired = int(ours.records["second"].sum())
    for count, what in (
        (unreadable, "images cannot be decoded (see verify) and were left out"),
        (flat, "images of one colour were compared by their bytes alone"),
        (paired, "samples have two images and were left out"),
    ):
        if count:
            print(f"  {count} {what}")
    gone = ours.records["key"][drops.dropped]
    stay = np.ones(len(ours.records), bool)
    stay[drops.dropped] = False
    # A sample's second image has its key too, but such samples are never dropped.
    shared = int(np.isin(ours.records["key"][stay], gone).sum())
    if shared:
        print(
            f"  careful: {shared} samples that are kept have the same key as a dropped one of "
            "another folder; use the part of the list under '# of FOLDER' for each folder alone"
        )
