"""Own images by content: duplicates become one sample, near-duplicates get one split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data_tools.dedup.hashes import RECORD, UNREADABLE, image_record, near_duplicate_groups
from data_tools.executor import Executor, raise_if_stopped
from data_tools.originals import ImageLocation
from data_tools.own.file_tree import FileTree
from data_tools.own.forms import UserImage
from data_tools.own.tables import require_splits
from data_tools.shards import hash_name
from vlp.config import ConfigError
from vlp.data.file_names import SPLIT_NAMES, split_of
from vlp.data.shards.sample_files import BadSample

SPLITS = tuple(SPLIT_NAMES)  # train, val, test
_CHUNK = 32  # images of one job


class UserSample(NamedTuple):
    """An image with all its captions and its split."""

    image: UserImage
    digest: str  # of its bytes, 64 bits in hex; empty if unreadable
    split: str


class Splitting(NamedTuple):
    """Samples in order with their splits, and counts for messages."""

    samples: list[UserSample]
    groups: list[int]  # of near-duplicates, by sample
    num_merged: int  # images merged into an earlier image of equal bytes
    from_data: bool  # the data set has splits
    num_unsplit: int  # samples without a split in a data set with splits


_ImageJob = tuple[str, ImageLocation | None]  # path, location


def merge_rows(rows: Iterable[UserImage]) -> list[UserImage]:
    """Return each image once, with the captions of all its rows, each caption once."""
    by_path: dict[str, UserImage] = {}
    for row in rows:
        image = by_path.get(row.path)
        by_path[row.path] = row if image is None else _merge(image, row)
    return list(by_path.values())


def split_images(
    images: Sequence[UserImage],
    tree: FileTree,
    shares: Sequence[float],
    executor: Executor,
    earlier: Mapping[str, str],
    has_split_column: bool,
    exact: bool = False,
) -> Splitting:
    """Merge images of equal bytes, and assign them to train, val and test by `shares`.

    `earlier` has the splits of an earlier run by path; `exact` ignores near-duplicates.
    """
    records = _hash_images(images, tree, executor)
    index_by_digest: dict[int, int] = {}  # in `unique`
    unique: list[UserImage] = []
    for image, digest in zip(images, records["bytes"].tolist()):
        index = index_by_digest.setdefault(digest, len(unique))
        if index < len(unique):
            unique[index] = _merge(unique[index], image)
        else:
            unique.append(image)
    # The first record of each digest, in the order of the images.
    records = records[np.sort(np.unique(records["bytes"], return_index=True)[1])]
    groups = np.arange(len(records)) if exact else near_duplicate_groups(records)
    splits_of_data = data_splits([image.split for image in unique], has_split_column)
    earlier_splits = [earlier.get(image.path) for image in unique]
    is_readable = records["state"] != UNREADABLE
    splits = assign_splits(
        groups, records["bytes"], splits_of_data, shares, earlier_splits, is_readable
    )
    digests = [
        int(digest).to_bytes(8, "little").hex() if readable else ""
        for digest, readable in zip(records["bytes"], is_readable)
    ]
    has_splits = any(splits_of_data)
    return Splitting(
        list(map(UserSample, unique, digests, splits)),
        groups.tolist(),
        num_merged=len(images) - len(unique),
        from_data=has_splits,
        num_unsplit=splits_of_data.count(None) if has_splits else 0,
    )


def data_splits(names: Sequence[str | None], is_explicit: bool) -> list[str | None]:
    """Return train, val, test or None for each name; all None if implicit names give one split."""
    counts = Counter(name for name in names if name is not None)
    split_by_name = {name: split_of(name) for name in counts}
    unknown = sorted(name for name, split in split_by_name.items() if split is None)
    if unknown and is_explicit:
        raise ConfigError(
            f"--split-column: {unknown[0]!r} is not a split; it should hold train, val or test"
        )
    require_splits(counts, "splits of the data")
    # `train` alone, or one split for all images, is no division.
    is_divided = len(set(split_by_name.values())) > 1 or (
        None in names and "train" not in split_by_name.values()
    )
    if unknown or not (is_divided or is_explicit):
        return [None] * len(names)
    return [None if name is None else split_by_name[name] for name in names]


def assign_splits(
    groups: NDArray[np.int64],
    digests: NDArray[np.uint64],
    splits_of_data: Sequence[str | None],
    shares: Sequence[float],
    earlier_splits: Sequence[str | None] = (),
    is_readable: NDArray[np.bool_] | None = None,
) -> list[str]:
    """Return the split of each image: the data's, else the earlier run's, else its group's.

    A group without a split gets one by its smallest digest, or train if the data has splits.
    """
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    smallest = np.full(num_groups, np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(smallest, groups, digests)
    _, val, test = shares
    # Digests are uniform and depend on the image alone, so images added later move no other.
    uniform = smallest / 2.0**64
    new_splits = np.where(uniform < test, "test", np.where(uniform < test + val, "val", "train"))
    if any(splits_of_data):
        new_splits[:] = "train"
    elif not any(earlier_splits):
        is_usable = np.zeros(num_groups, np.bool_)
        is_usable[groups if is_readable is None else groups[is_readable]] = True
        _fill_empty_splits(new_splits, uniform, dict(zip(SPLITS, shares)), is_usable)
    image_splits = [
        split or earlier for split, earlier in zip_longest(splits_of_data, earlier_splits)
    ]
    split_by_group: dict[int, str] = {}
    for group, split in zip(groups.tolist(), image_splits):
        if split is not None:
            split_by_group[group] = min(split, split_by_group.get(group, split), key=_priority)
    return [
        split or split_by_group.get(group) or str(new_splits[group])
        for group, split in zip(groups.tolist(), image_splits)
    ]


def _fill_empty_splits(
    splits: NDArray[np.str_],
    uniform: NDArray[np.float64],
    shares: Mapping[str, float],
    is_usable: NDArray[np.bool_],
) -> None:
    """Move a group of the largest split into each empty split, in place, as small data may need.

    All arrays are (groups,); groups of unreadable images alone are not usable.
    """
    for split, share in shares.items():
        if share == 0 or (is_usable & (splits == split)).any():
            continue
        largest = max(SPLITS, key=lambda name: int((is_usable & (splits == name)).sum()))
        groups = np.flatnonzero(is_usable & (splits == largest))
        if len(groups) > 1:
            # The group that would change to this split first if its share grew.
            order = groups[np.argsort(uniform[groups])]
            splits[order[-1] if split == "train" else order[0]] = split


def _merge(image: UserImage, duplicate: UserImage) -> UserImage:
    captions = list(dict.fromkeys((*image.captions, *duplicate.captions)))
    splits = [split for split in (image.split, duplicate.split) if split is not None]
    split = min(splits, key=_priority) if splits else None
    return image._replace(captions=captions, split=split, url=image.url or duplicate.url)


def _priority(name: str) -> int:
    """Return a sort key: test before val before train, so that a test set loses no image."""
    split = split_of(name)
    return 0 if split is None else -SPLITS.index(split)


def _hash_images(
    images: Sequence[UserImage], tree: FileTree, executor: Executor
) -> NDArray[np.void]:
    chunks: Iterator[list[_ImageJob]] = (
        [(image.path, tree.find(image.path)) for image in images[start : start + _CHUNK]]
        for start in range(0, len(images), _CHUNK)
    )
    parts = [np.empty(0, RECORD)]
    with tqdm(total=len(images), desc="comparing images", unit=" images", disable=None) as bar:
        for part in executor.map(_hash_chunk, chunks):
            parts.append(part)
            bar.update(len(part))
    return np.concatenate(parts)


def _hash_chunk(chunk: Iterable[_ImageJob]) -> NDArray[np.void]:
    records = []
    for path, location in chunk:
        raise_if_stopped()
        try:
            if location is None:
                raise BadSample("missing image", path)
            records.append(image_record(location.read(), path))
        except BadSample:
            # The path is hashed in place of the bytes, so that unreadable images are not merged.
            no_hash = np.zeros(4, np.uint64)
            records.append((0, 0, hash_name(path), 0, no_hash, 0, False, UNREADABLE))
    return np.array(records, dtype=RECORD)
