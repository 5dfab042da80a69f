"""Images that come more than once, and the list of keys to drop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data_tools.builder.samples import Line, warn_of_shared_keys, write_list
from data_tools.dedup.hashes import (
    FLAT_IMAGE,
    UNREADABLE,
    HashedImages,
    NearOptions,
    differing_bits,
)
from data_tools.dedup.near import Drops, duplicate_images
from data_tools.options import Folders
from data_tools.shards import shards_of


def dedup(folders: Folders, near: NearOptions) -> int:
    """Find images that come more than once and list the keys to drop, the first of each is kept.

        python -m data_tools dedup shards/cc3m shards/sbu --out repeated.txt
        python -m data_tools dedup shards/cc3m --out repeated.txt --exact       # equal bytes only

    Exact means the same stored bytes (sha256). Near means that two images look alike: saved again,
    reduced, squeezed or slightly cut; data_tools/dedup/hashes.py tells how that is measured and
    what it cannot see. Folders are taken in the order given,
    and an image is dropped for the first one that it looks like. Samples of two images are left
    alone.

    The list has one key a line and, in a comment above each, the sample that is kept for it;
    builders take it as --take-down. Hashes of finished shards are kept beside it in LIST.hashes, so
    that an interrupted run goes on and the next one is quick; delete them when done. Memory: some
    200 bytes an image.
    """
    images = near.load(shards_of(folders), "hash")
    records = images.records
    drops = duplicate_images(records, near.most)
    same = records["bytes"][drops.dropped] == records["bytes"][drops.kept]
    bits = differing_bits(records["coarse"][drops.dropped], records["coarse"][drops.kept])
    heading = (
        f"{len(drops.dropped)} of {len(records)} images repeat another one: {int(same.sum())} "
        f"with the same bytes, {int((~same).sum())} that look like it"
    )
    write_list(near.out, f"dedup: {heading}", _lines(images, drops, same, bits, near))
    print(f"{near.out}: {heading}")
    for which, what in (
        (records["state"] == UNREADABLE, "images cannot be decoded (see verify) and were left out"),
        (records["state"] == FLAT_IMAGE, "images of one colour were compared by their bytes alone"),
        (records["second"], "samples have two images and were left out"),
    ):
        if which.any():
            print(f"  {which.sum()} {what}")
    warn_of_shared_keys(
        images.kept_with_shared_keys(np.isin(np.arange(len(records)), drops.dropped))
    )
    return 0


def _lines(
    images: HashedImages,
    drops: Drops,
    same: NDArray[np.bool_],
    bits: NDArray[np.int64],
    near: NearOptions,
) -> Iterator[Line]:
    """Yield a line for each dropped image."""
    wanted = np.union1d(drops.dropped, drops.kept)
    keys = dict(zip(wanted.tolist(), images.keys(wanted, near.workers())))
    for dropped, kept, equal, count in zip(drops.dropped, drops.kept, same, bits):
        how = "the same bytes as" if equal else f"like ({count} bits of 64)"
        reason = f"{how} {keys[kept]} of {images.shards[images.shard[kept]]}"
        yield Line(images.shards[images.shard[dropped]].folder, keys[dropped], reason)
