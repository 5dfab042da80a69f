"""Find the images of evaluation sets in pretraining data and list the keys to take out.

    python -m data_tools overlap --pretraining shards/coco/train shards/cc3m \\
        --evaluation shards/flickr30k/test shards/coco/test --out leaked.txt --sheet leaked.png

A pretraining image is in an evaluation set if both name the same image (`source` and
`image_id`), or have the same bytes, or look alike; data_tools/dedup/perceptual_hash.py tells
how the latter
is measured and what it cannot see. Second images of samples count too.

The list has one key a line with the reason above it; builders take it as `--take-down`. The exit
code is 0 whether images overlap or not. Hashes of finished shards are kept in LIST.hashes, so
that an interrupted run goes on. Memory: about a kilobyte for each evaluation image, next to
nothing for those of pretraining.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_tools.builder.take_down import Line, keys_of, warn_of_shared_keys, write_list
from data_tools.dedup.dedup_options import (
    add_near_duplicate_options,
    hash_folder,
    required_distance,
)
from data_tools.dedup.near_duplicates import NearIndex, Places
from data_tools.dedup.perceptual_hash import (
    FINE_DISTANCE,
    READABLE,
    UNREADABLE,
    differing_bits,
    fine_distance,
    hash_shards,
)
from data_tools.executor.executor import Executor
from data_tools.executor.options import add_executor, executor_of
from data_tools.inspect.contact_sheet import SheetCell, draw_pairs
from data_tools.scan.shard_reader import Shard, shards_of

BY_NAME, BY_BYTES, BY_LOOKS = 1, 2, 4
WAYS = {BY_NAME: "the same image_id", BY_BYTES: "the same bytes", BY_LOOKS: "looks alike"}

MATCH = np.dtype(
    [
        ("shard", "<i4"),  # of pretraining
        ("sample", "<u4"),
        ("image", "<i8"),  # of evaluation
        ("ways", "u1"),
        ("bits", "u1"),  # of the 64 of the perceptual hash
    ]
)
"""A pretraining sample that shows an evaluation image."""


class EvaluationImages:
    """The images that must not be trained on.

    Args:
        records: RECORDs of `image_hash`.
        distance: bits of 64 in which alike images may differ, or None for equal bytes only.
    """

    def __init__(self, records: NDArray[np.void], distance: int | None) -> None:
        self.records = records
        self._named = np.flatnonzero(records["name"])
        self._names = NearIndex(records["name"][self._named], 0)
        self._bytes = NearIndex(records["bytes"], 0)
        self._looking = np.flatnonzero(records["state"] == READABLE)
        self._looks = None
        if distance is not None:
            self._looks = NearIndex(records["coarse"][self._looking], distance)

    def matches(self, records: NDArray[np.void], shard: int) -> NDArray[np.void]:
        """Return a MATCH for every record that shows one of the images, in all its ways."""
        ours, theirs, ways = [], [], []
        for way, first, second in self._found(records):
            ours.append(first)
            theirs.append(second)
            ways.append(np.full(len(first), way, np.uint8))
        record, image = np.concatenate(ours), np.concatenate(theirs)
        pair, place = np.unique(record * len(self.records) + image, return_inverse=True)
        found = np.zeros(len(pair), MATCH)
        if len(pair):
            record, found["image"] = np.divmod(pair, len(self.records))
            found["shard"], found["sample"] = shard, records["sample"][record]
            np.bitwise_or.at(found["ways"], place, np.concatenate(ways))
            theirs_coarse = self.records["coarse"][found["image"]]
            found["bits"] = differing_bits(records["coarse"][record], theirs_coarse)
        return found

    def _found(self, records: NDArray[np.void]) -> Iterator[tuple[int, Places, Places]]:
        named = np.flatnonzero(records["name"])
        pairs = self._names.near(records["name"][named])
        yield BY_NAME, named[pairs.first], self._named[pairs.second]
        pairs = self._bytes.near(records["bytes"])
        yield BY_BYTES, pairs.first, pairs.second
        if self._looks is not None:
            looking = np.flatnonzero(records["state"] == READABLE)
            pairs = self._looks.near(records["coarse"][looking])
            first, second = looking[pairs.first], self._looking[pairs.second]
            fine = fine_distance(records["fine"][first], self.records["fine"][second])
            yield BY_LOOKS, first[fine <= FINE_DISTANCE], second[fine <= FINE_DISTANCE]


class Evaluation(NamedTuple):
    """All evaluation images, and the place of each one's shard in `shards`."""

    shards: Sequence[Shard]
    records: NDArray[np.void]
    places: Places


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--pretraining", type=Path, nargs="+", required=True, metavar="FOLDER", help="to look in"
    )
    parser.add_argument(
        "--evaluation", type=Path, nargs="+", required=True, metavar="FOLDER", help="to look for"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="LIST", help="list of the keys to take out"
    )
    add_near_duplicate_options(parser)
    add_executor(parser)


def run(arguments: argparse.Namespace) -> int:
    """Hash, compare, write the list, say how much was found and in which way."""
    distance = required_distance(arguments)
    pretraining, evaluation = shards_of(arguments.pretraining), shards_of(arguments.evaluation)
    hashes, executor = hash_folder(arguments), executor_of(arguments)
    parts = list(hash_shards(evaluation, hashes, executor, "evaluation"))
    places = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    theirs = Evaluation(evaluation, np.concatenate(parts), places)
    images = EvaluationImages(theirs.records, distance)
    found, gone, samples, unreadable = [], [], 0, int((theirs.records["state"] == UNREADABLE).sum())
    hashed = hash_shards(pretraining, hashes, executor, "pretraining")
    for number, records in enumerate(hashed):
        found.append(images.matches(records, number))
        gone.append(records["key"][_is_shown(records, found[-1])])
        samples += int((~records["second"]).sum())
        unreadable += int((records["state"] == UNREADABLE).sum())
    matches = np.concatenate(found)
    lines = _lines(matches, pretraining, theirs, executor)
    count = write_list(
        arguments.out, "overlap: pretraining samples that show evaluation images", lines
    )
    print(f"{arguments.out}: {count} of {samples} pretraining samples show an evaluation image")
    _print_counts(matches, theirs)
    if unreadable:
        print(f"  {unreadable} images cannot be decoded (see verify): only name and bytes count")
    if len({shard.folder for shard in pretraining}) > 1:
        again = hash_shards(pretraining, hashes, executor, "keys")
        warn_of_shared_keys(_kept_with_dropped_keys(again, found, np.concatenate(gone)))
    pairs = _pairs_to_show(matches, pretraining, theirs, arguments.pairs)
    if arguments.sheet is not None and pairs:
        draw_pairs(pairs, arguments.sheet)
        print(f"{arguments.sheet}: {len(pairs)} pairs, the most different first")
    return 0


def _is_shown(records: NDArray[np.void], matches: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which images of a shard are of samples on the list."""
    return np.isin(records["sample"], matches["sample"])


def _kept_with_dropped_keys(
    hashed: Iterable[NDArray[np.void]],
    found: Sequence[NDArray[np.void]],
    gone: NDArray[np.uint64],
) -> int:
    """Count the samples that are not on the list and have a key that is.

    Args:
        hashed: RECORDs of each shard of pretraining.
        found: its matches.
        gone: keys of the list.
    """
    shared = 0
    for records, matches in zip(hashed, found):
        stay = ~_is_shown(records, matches) & ~records["second"]
        shared += int(np.isin(records["key"][stay], gone).sum())
    return shared


def _lines(
    matches: NDArray[np.void], pretraining: Sequence[Shard], theirs: Evaluation, executor: Executor
) -> Iterator[Line]:
    """Yield one line for each sample, of its match that has the most ways."""
    order = np.lexsort((matches["bits"], -matches["ways"].astype(int), matches["sample"],
                        matches["shard"]))  # fmt: skip
    ordered = matches[order]
    places = ordered["shard"].astype(np.int64) << 32 | ordered["sample"]
    best = ordered[np.unique(places, return_index=True)[1]]
    images = np.unique(best["image"])
    by_shard = _grouped(theirs.places[images], theirs.records["sample"][images])
    their_names = [key for _, keys in keys_of(by_shard, theirs.shards, executor) for key in keys]
    ours = _grouped(best["shard"], best["sample"])
    rows = iter(best)
    for shard, keys in keys_of(ours, pretraining, executor):
        for key, match in zip(keys, rows):
            image = int(match["image"])
            name = their_names[int(np.searchsorted(images, image))]
            ways = ", ".join(text for way, text in WAYS.items() if match["ways"] & way)
            place = theirs.shards[theirs.places[image]]
            yield Line(pretraining[shard].folder, key, f"{name} of {place}: {ways}")


def _grouped(shards: NDArray[np.integer], samples: NDArray[np.integer]) -> dict[int, list[int]]:
    """Return sample numbers by shard, in the order given; shards come in runs."""
    grouped: dict[int, list[int]] = {}
    for shard, sample in zip(shards.tolist(), samples.tolist()):
        grouped.setdefault(shard, []).append(sample)
    return grouped


def _print_counts(matches: NDArray[np.void], theirs: Evaluation) -> None:
    folders = list(dict.fromkeys(shard.folder for shard in theirs.shards))
    number = {folder: place for place, folder in enumerate(folders)}
    of_shard = np.array([number[shard.folder] for shard in theirs.shards])
    of_image = of_shard[theirs.places]
    for place, folder in enumerate(folders):
        here = matches[of_image[matches["image"]] == place]
        images = int((of_image == place).sum())
        shown = len(np.unique(here["image"]))
        print(f"  {folder}: {shown} of {images} images are shown in pretraining")
        for way, text in WAYS.items():
            by_way = here[(here["ways"] & way) != 0]
            samples = len(np.unique(by_way[["shard", "sample"]]))
            print(f"    {text}: {len(np.unique(by_way['image']))}, by {samples} samples")


def _pairs_to_show(
    matches: NDArray[np.void], pretraining: Sequence[Shard], theirs: Evaluation, count: int
) -> list[tuple[SheetCell, SheetCell]]:
    pairs = []
    for match in matches[np.argsort(-matches["bits"].astype(int), kind="stable")][:count]:
        image = int(match["image"])
        ways = ", ".join(text for way, text in WAYS.items() if match["ways"] & way)
        ours = SheetCell(pretraining[match["shard"]], int(match["sample"]), f"pretraining: {ways}")
        their_shard = theirs.shards[theirs.places[image]]
        note = f"evaluation, {match['bits']} bits apart"
        pairs.append((ours, SheetCell(their_shard, int(theirs.records["sample"][image]), note)))
    return pairs
