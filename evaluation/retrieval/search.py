"""Exact ranks and the nearest candidates of every query, without the full score matrix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.core.work_sharding import Ranks

QUERY_CHUNK = 1024
CANDIDATE_CHUNK = 8192
NOTHING = -1


class Search(NamedTuple):
    """Results of a dual encoder for each query.

    ranks: (queries,) int64, wrong candidates scored at least as high as the best right one.
    nearest: (queries, top) int64, candidates by falling score; of equal scores the earlier one.
    scores: (queries, top) float32, their similarities.
    """

    ranks: NDArray[np.int64]
    nearest: NDArray[np.int64]
    scores: NDArray[np.float32]


def similarity(query: Tensor, candidate: Tensor) -> Tensor:
    """Similarities (queries, candidates) in float32, whatever autocast says.

    The products are summed in float64 and rounded once. A float32 matrix product may give two equal
    columns different last bits, depending on where in the matrix they stand, and then the ranks
    depend on the chunks. Under autocast a bare `@` would be bfloat16, where ties abound.
    """
    with torch.autocast(query.device.type, enabled=False):
        return (query.double() @ candidate.double().T).float()


def search(
    query: Tensor,
    candidate: Tensor,
    positives: NDArray[np.int64],
    top: int = 0,
    *,
    query_chunk: int = QUERY_CHUNK,
    candidate_chunk: int = CANDIDATE_CHUNK,
    ranks: Ranks | None = None,
) -> Search:
    """Rank each query's best right candidate among all candidates and keep the `top` nearest.

    Memory is bounded by query_chunk x candidate_chunk scores; query chunks are shared by the ranks.

    Args:
        query: (queries, d) float32 features.
        candidate: (candidates, d) float32 features.
        positives: (queries, most) indices of right candidates, at least one in a row, the rest -1.
        top: candidates to keep for each query, at most all.
    """
    ranks = ranks or Ranks.current()
    top = min(top, len(candidate))
    starts = range(0, len(query), query_chunk)

    def chunk(number: int) -> tuple[NDArray, NDArray, NDArray]:
        rows = slice(starts[number], starts[number] + query_chunk)
        right = torch.from_numpy(positives[rows]).to(query.device)
        return _search_chunk(query[rows], candidate, right, top, candidate_chunk)

    parts = ranks.map_blocks(len(starts), chunk)
    if not parts:
        none = np.zeros((0, top), dtype=np.int64)
        return Search(none.sum(axis=1), none, none.astype(np.float32))
    return Search(*(np.concatenate(column) for column in zip(*parts)))


def _search_chunk(
    query: Tensor, candidate: Tensor, right: Tensor, top: int, step: int
) -> tuple[NDArray, NDArray, NDArray]:
    best = _best_right(query, candidate, right)
    before = torch.zeros(len(query), dtype=torch.int64, device=query.device)
    # One integer holds score and index, so that the order of equal scores is settled.
    keys = torch.empty(len(query), 0, dtype=torch.int64, device=query.device)
    for start in range(0, len(candidate), step):
        scores = similarity(query, candidate[start : start + step])
        wrong_before = ~(scores < best[:, None])
        column = right - start
        row, slot = ((column >= 0) & (column < scores.shape[1])).nonzero(as_tuple=True)
        wrong_before[row, column[row, slot]] = False
        before += wrong_before.sum(dim=1)
        if top:
            index = torch.arange(start, start + scores.shape[1], device=query.device)
            new = _keys(scores, index)
            new = new.topk(min(top, new.shape[1]), dim=1).values
            keys = torch.cat([keys, new], dim=1)
            keys = keys.topk(min(top, keys.shape[1]), dim=1).values
    scores, nearest = _unpack(keys)
    return before.cpu().numpy(), nearest.cpu().numpy(), scores.cpu().numpy()


def _best_right(query: Tensor, candidate: Tensor, right: Tensor) -> Tensor:
    """Score of the best right candidate; -inf where all are NaN, behind everything."""
    best = torch.full((len(query),), -torch.inf, device=query.device)
    for slot in range(right.shape[1]):
        chosen = candidate[right[:, slot].clamp(min=0)]
        scores = (query.double() * chosen.double()).sum(dim=1).float()
        scores = scores.masked_fill((right[:, slot] == NOTHING) | scores.isnan(), -torch.inf)
        best = torch.maximum(best, scores)
    return best


def _keys(scores: Tensor, index: Tensor) -> Tensor:
    """Score and index as one int64 that sorts by score, then by earlier index; NaN comes last."""
    scores = torch.where(scores.isnan(), -torch.inf, scores) + 0.0  # + 0.0 turns -0.0 into 0.0
    bits = scores.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (0xFFFFFFFF - index)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    ordered = (keys >> 32).int()
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)
