"""Own images by content: equal ones are one sample, alike ones are of one split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data_tools.dedup.hashes import RECORD, UNREADABLE, image_record, near_duplicate_groups
from data_tools.executor import Executor, go_on
from data_tools.originals import ImageLocation
from data_tools.own.file_tree import FileTree
from data_tools.own.forms import UserImage
from data_tools.own.tables import require_splits
from data_tools.shards import number_of
from vlp.config import ConfigError
from vlp.data.file_names import SPLIT_NAMES, split_of
from vlp.data.shards.sample_files import BadSample

SPLITS = tuple(SPLIT_NAMES)
_CHUNK = 32


class UserSample(NamedTuple):
    """An image with all its captions; `digest` is hexadecimal, empty for one that is unreadable."""

    image: UserImage
    digest: str
    split: str


class Dealt(NamedTuple):
    """Samples in order with their splits; `groups` numbers near-duplicates."""

    samples: list[UserSample]
    groups: list[int]
    merged: int  # images of the bytes of another one
    from_data: bool  # the splits are the data's
    unsplit: int = 0  # samples without a split in the data

    @property
    def alike(self) -> int:
        """Return the number of groups of several images."""
        return sum(count > 1 for count in Counter(self.groups).values())

    @property
    def torn(self) -> int:
        """Return the number of groups on two sides."""
        sides = {(group, sample.split) for group, sample in zip(self.groups, self.samples)}
        return sum(count > 1 for count in Counter(group for group, _ in sides).values())


class _Chunk(NamedTuple):
    locations: tuple[tuple[str, ImageLocation | None], ...]

    def __str__(self) -> str:
        return self.locations[0][0]


def joined(images: Iterable[UserImage]) -> list[UserImage]:
    """Return each image once, with the captions of all its rows, each caption once."""
    by_path: dict[str, UserImage] = {}
    for image in images:
        previous = by_path.get(image.image)
        by_path[image.image] = image if previous is None else _with(previous, image)
    return list(by_path.values())


def deal(
    images: Sequence[UserImage],
    tree: FileTree,
    shares: Sequence[float],
    executor: Executor,
    earlier: Mapping[str, str],
    has_split_column: bool,
    exact: bool = False,
) -> Dealt:
    """Join images of equal bytes and give each a split by `shares` of train, val and test.

    `earlier` has splits of an earlier run by path; with `exact` near-duplicates may be parted.
    """
    records = _records(images, tree, executor)
    numbers: dict[int, int] = {}
    unique: list[UserImage] = []
    positions: list[int] = []
    for position, image in enumerate(images):
        digest = int(records["bytes"][position])
        number = numbers.setdefault(digest, len(unique))
        if number < len(unique):
            unique[number] = _with(unique[number], image)
        else:
            unique.append(image)
            positions.append(position)
    records = records[positions]
    groups = np.arange(len(records)) if exact else near_duplicate_groups(records)
    splits_of_data = data_splits([image.split for image in unique], has_split_column)
    previous = [earlier.get(image.image) for image in unique]
    is_readable = records["state"] != UNREADABLE
    splits = assign_splits(groups, records["bytes"], splits_of_data, shares, previous, is_readable)
    readable = is_readable.tolist()
    digests = [f"{int(value).to_bytes(8, 'little').hex()}" for value in records["bytes"]]
    return Dealt(
        [
            UserSample(image, digest if good else "", split)
            for image, digest, good, split in zip(unique, digests, readable, splits)
        ],
        groups.tolist(),
        merged=len(images) - len(unique),
        from_data=any(splits_of_data),
        unsplit=splits_of_data.count(None) if any(splits_of_data) else 0,
    )


def data_splits(names: Sequence[str | None], is_explicit: bool) -> list[str | None]:
    """Return the data's splits; all None if they divide nothing and are not `is_explicit`."""
    counts = Counter(name for name in names if name is not None)
    split_by_name = {name: split_of(name) for name in counts}
    strange = sorted(name for name, split in split_by_name.items() if split is None)
    if strange and is_explicit:
        raise ConfigError(
            f"--split-column: {strange[0]!r} is no split; it should hold train, val or test"
        )
    require_splits(counts, "splits of the data")
    # `train` alone, or one split for all, divides nothing.
    divided = len(set(split_by_name.values())) > 1 or (
        None in names and "train" not in split_by_name.values()
    )
    if strange or not (divided or is_explicit):
        return [None] * len(names)
    return [None if name is None else split_by_name[name] for name in names]


def assign_splits(
    groups: NDArray[np.int64],
    digests: NDArray[np.uint64],
    splits_of_data: Sequence[str | None],
    shares: Sequence[float],
    previous: Sequence[str | None] = (),
    is_readable: NDArray[np.bool_] | None = None,
) -> list[str]:
    """Return each image's split: the data's, the earlier run's, its group's, else train."""
    count = int(groups.max()) + 1 if len(groups) else 0
    smallest = np.full(count, np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(smallest, groups, digests)
    _, val, test = shares
    # A digest is uniform, so images stay in their split whatever else comes.
    levels = smallest / 2.0**64
    dealt = np.where(levels < test, "test", np.where(levels < test + val, "val", "train"))
    if any(splits_of_data):
        dealt[:] = "train"
    # A small data set may leave a split without any image, which then gets the next ones.
    elif not any(previous):
        is_usable = np.zeros(count, np.bool_)
        is_usable[groups if is_readable is None else groups[is_readable]] = True
        _fill(dealt, levels, dict(zip(SPLITS, shares)), is_usable)
    fixed = [split or former for split, former in zip_longest(splits_of_data, previous)]
    split_by_group: dict[int, str] = {}
    for group, split in zip(groups.tolist(), fixed):
        if split is not None:
            split_by_group[group] = min(split, split_by_group.get(group, split), key=_rank)
    return [
        split or split_by_group.get(group) or str(dealt[group])
        for group, split in zip(groups.tolist(), fixed)
    ]


def _fill(
    dealt: NDArray[np.str_],
    levels: NDArray[np.float64],
    shares: Mapping[str, float],
    is_usable: NDArray[np.bool_],
) -> None:
    for split, share in shares.items():
        if share == 0 or (is_usable & (dealt == split)).any():
            continue
        largest = max(SPLITS, key=lambda name: int((is_usable & (dealt == name)).sum()))
        groups = np.flatnonzero(is_usable & (dealt == largest))
        if len(groups) > 1:
            order = groups[np.argsort(levels[groups])]
            dealt[order[-1] if split == "train" else order[0]] = split


def _with(image: UserImage, duplicate: UserImage) -> UserImage:
    captions = list(dict.fromkeys((*image.captions, *duplicate.captions)))
    splits = [split for split in (image.split, duplicate.split) if split is not None]
    # Of two splits an image stays in the one that is evaluated on.
    split = min(splits, key=_rank) if splits else None
    return image._replace(captions=captions, split=split, url=image.url or duplicate.url)


def _rank(name: str) -> int:
    split = split_of(name)
    return 0 if split is None else -SPLITS.index(split)


def _records(images: Sequence[UserImage], tree: FileTree, executor: Executor) -> NDArray[np.void]:
    chunks: Iterator[_Chunk] = (
        _Chunk(
            tuple((image.image, tree.find(image.image)) for image in images[start : start + _CHUNK])
        )
        for start in range(0, len(images), _CHUNK)
    )
    parts = [np.empty(0, RECORD)]
    with tqdm(total=len(images), desc="comparing images", unit=" images", disable=None) as bar:
        for part in executor.map(_hashed, chunks):
            parts.append(part)
            bar.update(len(part))
    return np.concatenate(parts)


def _hashed(chunk: _Chunk) -> NDArray[np.void]:
    rows = []
    for name, location in chunk.locations:
        go_on()
        try:
            if location is None:
                raise BadSample("missing image", name)
            rows.append(image_record(location.read(), name))
        except BadSample:
            empty = number_of(name), 0, np.zeros(4, np.uint64), 0, False, UNREADABLE
            rows.append((0, 0, *empty))
    return np.array(rows, dtype=RECORD)
