"""Groups of images that are the same or look alike, directly or through others of the group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from data_tools.dedup.near_duplicates import Places, near_pairs
from data_tools.dedup.perceptual_hash import (
    DISTANCE,
    FINE_DISTANCE,
    READABLE,
    UNREADABLE,
    fine_distance,
)

_MOST_LINKS = 1 << 22


def alike_groups(images: NDArray[np.void], distance: int = DISTANCE) -> Places:
    """Return the number of each image's group; images that cannot be read are alone.

    Unlike `duplicate_images`, which keeps what looks like a dropped image alone, a chain of images
    is one group: what is dealt by groups has no two alike images on two sides.

    Args:
        images: RECORDs.
        distance: bits of 64 in which alike images differ at most.
    """
    usable = np.flatnonzero(images["state"] != UNREADABLE)
    links = [_to_first(images["bytes"][usable], usable)]
    textured = usable[images["state"][usable] == READABLE]
    looks = np.column_stack((images["coarse"][textured], images["fine"][textured]))
    looks = np.ascontiguousarray(looks).view(f"V{looks.itemsize * 5}").reshape(-1)
    same = _to_first(looks, textured)
    links.append(same)
    # Equal hashes count once: thousands of copies of an image would make millions of pairs.
    several = np.setdiff1d(textured, same[0])
    for pairs in near_pairs(images["coarse"][several], distance):
        first, second = several[pairs.first], several[pairs.second]
        near = fine_distance(images["fine"][first], images["fine"][second]) <= FINE_DISTANCE
        links.append(np.stack((first[near], second[near])))
        if sum(part.shape[1] for part in links) > _MOST_LINKS:
            links = [_to_first(_components(links, len(images)), np.arange(len(images)))]
    return _components(links, len(images))


def _to_first(values: NDArray[np.generic], among: Places) -> Places:
    """Link the others of equal values to their first one: (2, links)."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    links = np.stack((among, among[first[inverse.reshape(-1)]]))
    return links[:, links[0] != links[1]]


def _components(links: list[Places], count: int) -> Places:
    first, second = np.concatenate(links, axis=1)
    graph = coo_array((np.ones(len(first), np.int8), (first, second)), (count, count))
    groups: Places = connected_components(graph, directed=False)[1].astype(np.int64)
    return groups
