"""Take-down lists of duplicate images, and of pretraining images that are in evaluation sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from typer import Option

from data_tools.builder.samples import Line, write_list
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
    """List the keys of duplicate images; the first image of each group of duplicates stays.

        vlp data dedup shards/cc3m shards/sbu --out repeated.txt

    Duplicates have the same stored bytes (sha256). Without --exact near-duplicates count, too:
    images saved again, reduced, squeezed or slightly cropped. Images are compared in the order of
    the folders, so name the folder to keep first. Samples of two images always stay.

    The list has one key a line with a comment above, which names the sample that stays instead;
    builders take it as --take-down. Hashes of finished shards stay in LIST.hashes for a run after
    an interruption; delete them when done. Memory: some 200 bytes an image.
    """
    images = near.load(shards_of(folders), "hash")
    records = images.records
    drops = duplicate_images(records, near.max_distance)
    is_exact = records["bytes"][drops.dropped] == records["bytes"][drops.originals]
    bits = differing_bits(records["coarse"][drops.dropped], records["coarse"][drops.originals])
    heading = (
        f"{len(drops.dropped)} of {len(records)} images repeat another one: {int(is_exact.sum())} "
        f"with the same bytes, {int((~is_exact).sum())} that look like it"
    )
    lines = _drop_lines(images, drops, is_exact, bits, near)
    write_list(near.out, f"dedup: {heading}", lines, folders)
    print(f"{near.out}: {heading}")
    for mask, text in (
        (records["state"] == UNREADABLE, "images cannot be decoded (see verify) and were left out"),
        (records["state"] == FLAT_IMAGE, "images of one colour were compared by their bytes alone"),
        (records["second"], "samples have two images and were left out"),
    ):
        if mask.any():
            print(f"  {mask.sum()} {text}")
    _warn_of_shared_keys(images, np.isin(np.arange(len(records)), drops.dropped))
    return 0


def _drop_lines(
    images: HashedImages,
    drops: Drops,
    is_exact: NDArray[np.bool_],
    differing_bits: NDArray[np.int64],
    near: NearOptions,
) -> Iterator[Line]:
    indices = np.union1d(drops.dropped, drops.originals)
    keys = dict(zip(indices.tolist(), images.keys(indices, near.workers())))
    pairs = zip(drops.dropped, drops.originals, is_exact, differing_bits)
    for dropped, original, exact, bits in pairs:
        relation = "the same bytes as" if exact else f"like ({bits} of 64 bits differ)"
        reason = f"{relation} {keys[original]} of {images.shards[images.shard[original]]}"
        yield images.shards[images.shard[dropped]].folder, keys[dropped], reason


def _warn_of_shared_keys(images: HashedImages, is_dropped: NDArray[np.bool_]) -> None:
    """Print the number of samples to keep that have the key of a dropped sample elsewhere."""
    keys = images.records["key"]
    shared = int(np.isin(keys[~is_dropped & ~images.records["second"]], keys[is_dropped]).sum())
    if shared:
        print(
            f"  careful: {shared} samples to keep have the key of a dropped sample in another "
            "folder; build each folder again with the same --out, which then reads only its part "
            "of the list"
        )


BY_NAME, BY_BYTES, BY_LOOKS = 1, 2, 4
WAYS = {BY_NAME: "the same image_id", BY_BYTES: "the same bytes", BY_LOOKS: "looks alike"}
# Indices of a pretraining and an evaluation image that are the same image.
MATCH = np.dtype(
    [
        ("pretraining", "<i8"),
        ("evaluation", "<i8"),
        ("ways", "u1"),  # BY_NAME | BY_BYTES | BY_LOOKS
        ("bits", "u1"),  # of 64 bits of the perceptual hash that differ
    ]
)


def overlap(
    pretraining: Annotated[list[Path], Option(metavar="FOLDER", help="to look in")],
    evaluation: Annotated[list[Path], Option(metavar="FOLDER", help="to look for")],
    near: NearOptions,
) -> int:
    """List the keys of pretraining samples that show images of evaluation sets.

        vlp data overlap --pretraining shards/coco/train shards/cc3m \\
            --evaluation shards/flickr30k/test shards/coco/test --out leaked.txt

    Two images are one if they have the same `source` and `image_id`, or the same bytes, or without
    --exact if they are near-duplicates. Second images of samples count, too.

    The list has one key a line with the reason above it; builders take it as --take-down. The exit
    code is 0 whether images overlap or not. Hashes of finished shards stay in LIST.hashes for a run
    after an interruption. Memory: some 100 bytes an image.
    """
    shards, evaluation_shards = shards_of(pretraining), shards_of(evaluation)
    evaluation_images = near.load(evaluation_shards, "evaluation")
    images = near.load(shards, "pretraining")
    matches = find_matches(images.records, evaluation_images.records, near.max_distance)
    heading = "overlap: pretraining samples that show evaluation images"
    lines = _match_lines(matches, images, evaluation_images, near)
    count = write_list(near.out, heading, lines, pretraining)
    samples = int((~images.records["second"]).sum())
    print(f"{near.out}: {count} of {samples} pretraining samples show an evaluation image")
    _print_counts(matches, images, evaluation_images)
    states = np.concatenate([images.records["state"], evaluation_images.records["state"]])
    if unreadable := int((states == UNREADABLE).sum()):
        print(f"  {unreadable} images cannot be decoded (see verify): only name and bytes count")
    sample_ids = _sample_ids(images)
    _warn_of_shared_keys(images, np.isin(sample_ids, sample_ids[matches["pretraining"]]))
    return 0


def find_matches(
    records: NDArray[np.void], evaluation_records: NDArray[np.void], distance: int | None
) -> NDArray[np.void]:
    """Return a MATCH for each pair of a pretraining and an evaluation image that are the same.

    Images are RECORDs. Near-duplicates differ in at most `distance` of 64 bits; None ignores them.
    """
    both = (records, evaluation_records)
    parts = [
        _matches(BY_NAME, "name", both, [images["name"] != 0 for images in both], 0),
        _matches(BY_BYTES, "bytes", both, [np.ones(len(images), bool) for images in both], 0),
    ]
    if distance is not None:
        is_readable = [images["state"] == READABLE for images in both]
        near = _matches(BY_LOOKS, "coarse", both, is_readable, distance)
        distances = fine_distance(
            records["fine"][near["pretraining"]], evaluation_records["fine"][near["evaluation"]]
        )
        parts.append(near[distances <= FINE_DISTANCE])
    # A pair may match in several ways.
    all_matches = np.concatenate(parts)
    pairs = all_matches[["pretraining", "evaluation"]]
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    matches = all_matches[first]
    np.bitwise_or.at(matches["ways"], inverse.reshape(-1), all_matches["ways"])
    matches["bits"] = differing_bits(
        records["coarse"][matches["pretraining"]],
        evaluation_records["coarse"][matches["evaluation"]],
    )
    return matches


def _matches(
    way: int,
    field: str,
    both: tuple[NDArray[np.void], NDArray[np.void]],
    has_hash: Sequence[NDArray[np.bool_]],
    distance: int,
) -> NDArray[np.void]:
    """Return the pairs of images with 64-bit hashes in `field` within `distance` bits.

    both: pretraining and evaluation records. has_hash: (images,) of each, False to leave out.
    """
    pretraining, evaluation = map(np.flatnonzero, has_hash)
    hashes, evaluation_hashes = both[0][field][pretraining], both[1][field][evaluation]
    parts = [np.empty(0, MATCH)]
    for query, stored in near_pairs(evaluation_hashes, distance, hashes):
        part = np.zeros(len(query), MATCH)
        part["pretraining"], part["evaluation"] = pretraining[query], evaluation[stored]
        part["ways"] = way
        parts.append(part)
    return np.concatenate(parts)


def _sample_ids(images: HashedImages) -> Indices:
    """Return ids of the images' samples, (images,): both images of a sample have the same id."""
    return images.shard << 32 | images.records["sample"].astype(np.int64)


def _match_lines(
    matches: NDArray[np.void],
    images: HashedImages,
    evaluation_images: HashedImages,
    near: NearOptions,
) -> Iterator[Line]:
    # One line per sample, with its match in most ways, then in fewest differing bits, as reason.
    samples = _sample_ids(images)[matches["pretraining"]]
    order = np.lexsort((matches["bits"], -matches["ways"].astype(int), samples))
    best = matches[order][np.unique(samples[order], return_index=True)[1]]
    executor, indices = near.workers(), np.unique(best["evaluation"])
    evaluation_keys = dict(zip(indices.tolist(), evaluation_images.keys(indices, executor)))
    for match, key in zip(best, images.keys(best["pretraining"], executor)):
        image = int(match["evaluation"])
        shard = evaluation_images.shards[evaluation_images.shard[image]]
        ways = ", ".join(text for way, text in WAYS.items() if match["ways"] & way)
        reason = f"{evaluation_keys[image]} of {shard}: {ways}"
        yield images.shards[images.shard[match["pretraining"]]].folder, key, reason


def _print_counts(
    matches: NDArray[np.void], images: HashedImages, evaluation_images: HashedImages
) -> None:
    folders = list(dict.fromkeys(shard.folder for shard in evaluation_images.shards))
    folder_of_shard = np.array([folders.index(shard.folder) for shard in evaluation_images.shards])
    folder_of_image = folder_of_shard[evaluation_images.shard]
    samples = _sample_ids(images)
    for number, folder in enumerate(folders):
        part = matches[folder_of_image[matches["evaluation"]] == number]
        print(
            f"  {folder}: {len(np.unique(part['evaluation']))} of "
            f"{(folder_of_image == number).sum()} images are shown in pretraining"
        )
        for way, text in WAYS.items():
            by_way = part[(part["ways"] & way) != 0]
            num_samples = len(np.unique(samples[by_way["pretraining"]]))
            print(f"    {text}: {len(np.unique(by_way['evaluation']))}, by {num_samples} samples")
