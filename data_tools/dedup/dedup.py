"""Images that come more than once, or in evaluation sets too, and the list of keys to drop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from typer import Option

from data_tools.builder.samples import Line, warn_of_shared_keys, write_list
from data_tools.dedup.hashes import (
    FINE_DISTANCE,
    FLAT_IMAGE,
    READABLE,
    UNREADABLE,
    Drops,
    HashedImages,
    Indices,
    NearOptions,
    differing_bits,
    duplicate_images,
    fine_distance,
    near_pairs,
)
from data_tools.options import Folders
from data_tools.shards import shards_of


def dedup(folders: Folders, near: NearOptions) -> int:
    """Find images that come more than once and list the keys to drop, the first of each is kept.

        python -m data_tools dedup shards/cc3m shards/sbu --out repeated.txt

    Exact means the same stored bytes (sha256). Near means that two images look alike: saved again,
    reduced, squeezed or slightly cut. Folders are taken in the order given, and an image is dropped
    for the first one that it looks like. Samples of two images are left alone.

    The list has one key a line and, in a comment above each, the sample that is kept for it;
    builders take it as --take-down. Hashes of finished shards stay in LIST.hashes, so that an
    interrupted run goes on; delete them when done. Memory: some 200 bytes an image.
    """
    images = near.load(shards_of(folders), "hash")
    records = images.records
    drops = duplicate_images(records, near.max_distance)
    same = records["bytes"][drops.dropped] == records["bytes"][drops.originals]
    bits = differing_bits(records["coarse"][drops.dropped], records["coarse"][drops.originals])
    heading = (
        f"{len(drops.dropped)} of {len(records)} images repeat another one: {int(same.sum())} "
        f"with the same bytes, {int((~same).sum())} that look like it"
    )
    lines = _lines(images, drops, same, bits, near)
    write_list(near.out, f"dedup: {heading}", lines, folders)
    print(f"{near.out}: {heading}")
    for mask, text in (
        (records["state"] == UNREADABLE, "images cannot be decoded (see verify) and were left out"),
        (records["state"] == FLAT_IMAGE, "images of one colour were compared by their bytes alone"),
        (records["second"], "samples have two images and were left out"),
    ):
        if mask.any():
            print(f"  {mask.sum()} {text}")
    warn_of_shared_keys(images.count_shared_keys(np.isin(np.arange(len(records)), drops.dropped)))
    return 0


def _lines(
    images: HashedImages,
    drops: Drops,
    same: NDArray[np.bool_],
    bits: NDArray[np.int64],
    near: NearOptions,
) -> Iterator[Line]:
    used = np.union1d(drops.dropped, drops.originals)
    keys = dict(zip(used.tolist(), images.keys(used, near.workers())))
    for dropped, original, equal, count in zip(drops.dropped, drops.originals, same, bits):
        relation = "the same bytes as" if equal else f"like ({count} bits of 64)"
        reason = f"{relation} {keys[original]} of {images.shards[images.shard[original]]}"
        yield Line(images.shards[images.shard[dropped]].folder, keys[dropped], reason)


BY_NAME, BY_BYTES, BY_LOOKS = 1, 2, 4
WAYS = {BY_NAME: "the same image_id", BY_BYTES: "the same bytes", BY_LOOKS: "looks alike"}
# A pretraining image that is an evaluation image.
MATCH = np.dtype(
    [
        # Images of pretraining and evaluation.
        ("ours", "<i8"),
        ("theirs", "<i8"),
        ("ways", "u1"),
        ("bits", "u1"),  # of the 64 of the perceptual hash
    ]
)


def overlap(
    pretraining: Annotated[list[Path], Option(metavar="FOLDER", help="to look in")],
    evaluation: Annotated[list[Path], Option(metavar="FOLDER", help="to look for")],
    near: NearOptions,
) -> int:
    """Find the images of evaluation sets in pretraining data and list the keys to take out.

        python -m data_tools overlap --pretraining shards/coco/train shards/cc3m \\
            --evaluation shards/flickr30k/test shards/coco/test --out leaked.txt

    A pretraining image is in an evaluation set if both name the same image (`source` and
    `image_id`), or have the same bytes, or look alike. Second images of samples count, too.

    The list has one key a line with the reason above it; builders take it as --take-down. The exit
    code is 0 whether images overlap or not. Hashes of finished shards stay in LIST.hashes, so that
    an interrupted run goes on. Memory: some 100 bytes an image.
    """
    searched, sought = shards_of(pretraining), shards_of(evaluation)
    theirs, ours = near.load(sought, "evaluation"), near.load(searched, "pretraining")
    matches = find_matches(ours.records, theirs.records, near.max_distance)
    heading = "overlap: pretraining samples that show evaluation images"
    lines = _match_lines(matches, ours, theirs, near)
    count = write_list(near.out, heading, lines, pretraining)
    samples = int((~ours.records["second"]).sum())
    print(f"{near.out}: {count} of {samples} pretraining samples show an evaluation image")
    _print_counts(matches, ours, theirs)
    unreadable = sum(int((side.records["state"] == UNREADABLE).sum()) for side in (ours, theirs))
    if unreadable:
        print(f"  {unreadable} images cannot be decoded (see verify): only name and bytes count")
    dropped = np.isin(_samples(ours), _samples(ours)[matches["ours"]])
    warn_of_shared_keys(ours.count_shared_keys(dropped))
    return 0


def find_matches(
    ours: NDArray[np.void], theirs: NDArray[np.void], distance: int | None
) -> NDArray[np.void]:
    """Return a MATCH for every RECORD of `ours` that shows one of `theirs`; None: exact ones."""
    parts = [
        _joined(BY_NAME, ours["name"], theirs["name"], ours["name"] != 0, theirs["name"] != 0, 0),
        _joined(BY_BYTES, ours["bytes"], theirs["bytes"], None, None, 0),
    ]
    if distance is not None:
        readable = ours["state"] == READABLE, theirs["state"] == READABLE
        alike = _joined(BY_LOOKS, ours["coarse"], theirs["coarse"], *readable, distance)
        fine = fine_distance(ours["fine"][alike["ours"]], theirs["fine"][alike["theirs"]])
        parts.append(alike[fine <= FINE_DISTANCE])
    every = np.concatenate(parts)
    _, first, inverse = np.unique(every[["ours", "theirs"]], return_index=True, return_inverse=True)
    matches = every[first]
    np.bitwise_or.at(matches["ways"], inverse.reshape(-1), every["ways"])
    their_hashes = theirs["coarse"][matches["theirs"]]
    matches["bits"] = differing_bits(ours["coarse"][matches["ours"]], their_hashes)
    return matches


def _joined(
    way: int,
    ours: NDArray[np.uint64],
    theirs: NDArray[np.uint64],
    our_part: NDArray[np.bool_] | None,
    their_part: NDArray[np.bool_] | None,
    distance: int,
) -> NDArray[np.void]:
    # Masks leave out images without a name or hash.
    first = np.arange(len(ours)) if our_part is None else np.flatnonzero(our_part)
    second = np.arange(len(theirs)) if their_part is None else np.flatnonzero(their_part)
    parts = [np.empty(0, MATCH)]
    for query, stored in near_pairs(theirs[second], distance, ours[first]):
        part = np.zeros(len(query), MATCH)
        part["ours"], part["theirs"], part["ways"] = first[query], second[stored], way
        parts.append(part)
    return np.concatenate(parts)


def _samples(images: HashedImages) -> Indices:
    # The second image of a sample shares its number.
    return images.shard << 32 | images.records["sample"].astype(np.int64)


def _match_lines(
    matches: NDArray[np.void], ours: HashedImages, theirs: HashedImages, near: NearOptions
) -> Iterator[Line]:
    # Of a sample's matches the one in the most ways is the most telling.
    samples = _samples(ours)[matches["ours"]]
    order = np.lexsort((matches["bits"], -matches["ways"].astype(int), samples))
    best = matches[order][np.unique(samples[order], return_index=True)[1]]
    executor, shown = near.workers(), np.unique(best["theirs"])
    their_keys = dict(zip(shown.tolist(), theirs.keys(shown, executor)))
    for match, key in zip(best, ours.keys(best["ours"], executor)):
        image = int(match["theirs"])
        reason = f"{their_keys[image]} of {theirs.shards[theirs.shard[image]]}: {_ways(match)}"
        yield Line(ours.shards[ours.shard[match["ours"]]].folder, key, reason)


def _ways(match: np.void) -> str:
    return ", ".join(text for way, text in WAYS.items() if match["ways"] & way)


def _print_counts(matches: NDArray[np.void], ours: HashedImages, theirs: HashedImages) -> None:
    folders = list(dict.fromkeys(shard.folder for shard in theirs.shards))
    of_shard = np.array([folders.index(shard.folder) for shard in theirs.shards])
    of_image = of_shard[theirs.shard]
    for number, folder in enumerate(folders):
        part = matches[of_image[matches["theirs"]] == number]
        images = int((of_image == number).sum())
        print(
            f"  {folder}: {len(np.unique(part['theirs']))} of {images} images are shown in "
            "pretraining"
        )
        for way, text in WAYS.items():
            by_way = part[(part["ways"] & way) != 0]
            samples = len(np.unique(_samples(ours)[by_way["ours"]]))
            print(f"    {text}: {len(np.unique(by_way['theirs']))}, by {samples} samples")
