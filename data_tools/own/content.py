"""Own images by content: equal ones are one sample, alike ones are of one split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data_tools.dedup.hashes import RECORD, UNREADABLE, alike_groups, image_record
from data_tools.executor import Executor, go_on
from data_tools.originals import ImageLocation
from data_tools.own.file_tree import FileTree
from data_tools.own.forms import OwnImage
from data_tools.own.tables import require_splits
from data_tools.shards import number_of
from vlp.config import ConfigError
from vlp.data.file_names import SPLIT_NAMES, split_of
from vlp.data.shards.sample_files import BadSample

SPLITS = tuple(SPLIT_NAMES)
_CHUNK = 32


class OwnSample(NamedTuple):
    """An image with all its captions; `digest` is hexadecimal, empty for one that is unreadable."""

    image: OwnImage
    digest: str
    split: str


class Dealt(NamedTuple):
    """Samples in order with their splits; `groups` numbers near-duplicates.

    same: images merged into one of equal bytes; given: the splits are the data's; unsplit: its
    samples without a split.
    """

    samples: list[OwnSample]
    groups: list[int]
    same: int
    given: bool
    unsplit: int = 0

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
    places: tuple[tuple[str, ImageLocation | None], ...]

    def __str__(self) -> str:
        return self.places[0][0]


def joined(images: Iterable[OwnImage]) -> list[OwnImage]:
    """Return each image once, with the captions of all its rows, each caption once."""
    known: dict[str, OwnImage] = {}
    for image in images:
        before = known.get(image.image)
        known[image.image] = image if before is None else _with(before, image)
    return list(known.values())


def deal(
    images: Sequence[OwnImage],
    tree: FileTree,
    shares: Sequence[float],
    executor: Executor,
    before: Mapping[str, str],
    splits_named: bool,
    exact: bool = False,
) -> Dealt:
    """Join images of equal bytes and give each a split by `shares` of train, val and test.

    before: splits of an earlier run by path; splits_named: the command line names their column;
    exact: near-duplicates may be in different splits.
    """
    records = _records(images, tree, executor)
    first: dict[int, int] = {}
    kept: list[OwnImage] = []
    places: list[int] = []
    for place, image in enumerate(images):
        digest = int(records["bytes"][place])
        at = first.setdefault(digest, len(kept))
        if at < len(kept):
            kept[at] = _with(kept[at], image)
        else:
            kept.append(image)
            places.append(place)
    records = records[places]
    groups = np.arange(len(records)) if exact else alike_groups(records)
    given = given_splits([image.split for image in kept], splits_named)
    stay = [before.get(image.image) for image in kept]
    there = records["state"] != UNREADABLE
    splits = given_or_dealt(groups, records["bytes"], given, shares, stay, there)
    readable = there.tolist()
    digests = [f"{int(value).to_bytes(8, 'little').hex()}" for value in records["bytes"]]
    return Dealt(
        [
            OwnSample(image, digest if good else "", split)
            for image, digest, good, split in zip(kept, digests, readable, splits)
        ],
        groups.tolist(),
        same=len(images) - len(kept),
        given=any(given),
        unsplit=given.count(None) if any(given) else 0,
    )


def given_splits(names: Sequence[str | None], named: bool) -> list[str | None]:
    """Return the data's splits; all None if they divide nothing (`train` alone, or one for all).

    With `named` they count in any case.
    """
    counts = Counter(name for name in names if name is not None)
    known = {name: split_of(name) for name in counts}
    strange = sorted(name for name, split in known.items() if split is None)
    if strange and named:
        raise ConfigError(
            f"--split-column: {strange[0]!r} is no split; it should hold train, val or test"
        )
    require_splits(counts, "splits of the data")
    divided = len(set(known.values())) > 1 or (None in names and "train" not in known.values())
    if strange or not (divided or named):
        return [None] * len(names)
    return [None if name is None else known[name] for name in names]


def given_or_dealt(
    groups: NDArray[np.int64],
    digests: NDArray[np.uint64],
    given: Sequence[str | None],
    shares: Sequence[float],
    before: Sequence[str | None] = (),
    there: NDArray[np.bool_] | None = None,
) -> list[str]:
    """Return each image's split: the data's, the earlier run's, its group's, else train.

    Without splits in the data, a group's smallest digest (64 bits, uniform) in [0, 1) decides:
    below the share of test, then of val. A split without any image that is `there` gets the
    smallest digests.
    """
    count = int(groups.max()) + 1 if len(groups) else 0
    smallest = np.full(count, np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(smallest, groups, digests)
    _, val, test = shares
    level = smallest / 2.0**64
    dealt = np.where(level < test, "test", np.where(level < test + val, "val", "train"))
    if any(given):
        dealt[:] = "train"
    elif not any(before):
        alive = np.zeros(count, np.bool_)
        alive[groups if there is None else groups[there]] = True
        _fill(dealt, level, dict(zip(SPLITS, shares)), alive)
    known = [split or former for split, former in zip_longest(given, before)]
    of_group: dict[int, str] = {}
    for group, split in zip(groups.tolist(), known):
        if split is not None:
            of_group[group] = min(split, of_group.get(group, split), key=_rank)
    return [
        split or of_group.get(group) or str(dealt[group])
        for group, split in zip(groups.tolist(), known)
    ]


def _fill(
    dealt: NDArray[np.str_],
    level: NDArray[np.float64],
    shares: Mapping[str, float],
    alive: NDArray[np.bool_],
) -> None:
    for split, share in shares.items():
        if share == 0 or (alive & (dealt == split)).any():
            continue
        most = max(SPLITS, key=lambda name: int((alive & (dealt == name)).sum()))
        there = np.flatnonzero(alive & (dealt == most))
        if len(there) > 1:
            order = there[np.argsort(level[there])]
            dealt[order[-1] if split == "train" else order[0]] = split


def _with(before: OwnImage, more: OwnImage) -> OwnImage:
    captions = list(dict.fromkeys((*before.captions, *more.captions)))
    splits = [split for split in (before.split, more.split) if split is not None]
    # Of two splits an image stays in the one that is evaluated on.
    split = min(splits, key=_rank) if splits else None
    return before._replace(captions=captions, split=split, url=before.url or more.url)


def _rank(name: str) -> int:
    split = split_of(name)
    return 0 if split is None else -SPLITS.index(split)


def _records(images: Sequence[OwnImage], tree: FileTree, executor: Executor) -> NDArray[np.void]:
    chunks: Iterator[_Chunk] = (
        _Chunk(tuple((one.image, tree.find(one.image)) for one in images[start : start + _CHUNK]))
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
    for name, place in chunk.places:
        go_on()
        try:
            if place is None:
                raise BadSample("missing image", name)
            rows.append(image_record(place.read(), name))
        except BadSample:
            lost = number_of(name), 0, np.zeros(4, np.uint64), 0, False, UNREADABLE
            rows.append((0, 0, *lost))
    return np.array(rows, dtype=RECORD)
