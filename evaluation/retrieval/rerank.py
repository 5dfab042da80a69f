"""Re-ranking the dual encoder's nearest candidates with the cross-modal encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.encoder import PADDING, BlockCache, Collection
from evaluation.work_sharding import ProcessGroup, evaluation_autocast
from vlp.config import Precision
from vlp.models.itm_scorer import ITMScorer

QUERY_CHUNK = 1024
CANDIDATE_CHUNK = 8192


class Search(NamedTuple):
    """Results of the dual encoder for each query; `nearest` are the candidates to re-rank."""

    # (queries,): number of negatives at least as similar as the best-ranked positive.
    ranks: NDArray[np.int64]
    # (queries, top): indices of candidates by descending similarity, ties by index.
    nearest: NDArray[np.int64]
    # (queries, top): similarities of `nearest`.
    similarities: NDArray[np.float32]


def similarity(query: Tensor, candidate: Tensor) -> Tensor:
    """Return similarities (queries, candidates) in float32, under autocast too."""
    # Summed in float64 and rounded once: last bits of a float32 product depend on a column's index,
    # so ranks would depend on the chunks. Under autocast `@` would be bfloat16, with many ties.
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
    processes: ProcessGroup | None = None,
) -> Search:
    """Rank each query's best positive from 0 among all candidates, and find the `top` nearest.

    Memory is query_chunk x candidate_chunk similarities; processes share query chunks.

    Args:
        query, candidate: (., d) float32 features.
        positives: (queries, max_positives) candidate indices, at least one a row, padded with -1.
    """
    processes = processes or ProcessGroup.current()
    top = min(top, len(candidate))
    starts = range(0, len(query), query_chunk)

    def search_chunk(chunk: int) -> Search:
        rows = slice(starts[chunk], starts[chunk] + query_chunk)
        chunk_positives = torch.from_numpy(positives[rows]).to(query.device)
        return _search_chunk(query[rows], candidate, chunk_positives, top, candidate_chunk)

    chunks = processes.map_blocks(len(starts), search_chunk)
    return Search(*map(np.concatenate, zip(*chunks)))


def _search_chunk(
    query: Tensor, candidate: Tensor, positives: Tensor, top: int, candidate_chunk: int
) -> Search:
    best = _best_similarity(query, candidate, positives)
    num_ahead = torch.zeros(len(query), dtype=torch.int64, device=query.device)
    # An integer of similarity and index: ties have one order on every device.
    packed = torch.empty(len(query), 0, dtype=torch.int64, device=query.device)
    for start in range(0, len(candidate), candidate_chunk):
        similarities = similarity(query, candidate[start : start + candidate_chunk])
        # Ties and NaN count against the model.
        is_ahead = ~(similarities < best[:, None])
        # Positives are not counted. `column` of a positive in another chunk, or of padding, is
        # outside this chunk.
        column = positives - start
        row, entry = ((column >= 0) & (column < similarities.shape[1])).nonzero(as_tuple=True)
        is_ahead[row, column[row, entry]] = False
        num_ahead += is_ahead.sum(dim=1)
        if top:
            index = torch.arange(start, start + similarities.shape[1], device=query.device)
            chunk_packed = _pack(similarities, index)
            chunk_packed = chunk_packed.topk(min(top, chunk_packed.shape[1]), dim=1).values
            packed = torch.cat([packed, chunk_packed], dim=1)
            packed = packed.topk(min(top, packed.shape[1]), dim=1).values
    similarities, nearest = _unpack(packed)
    return Search(num_ahead.cpu().numpy(), nearest.cpu().numpy(), similarities.cpu().numpy())


def _best_similarity(query: Tensor, candidate: Tensor, positives: Tensor) -> Tensor:
    """Return each query's similarity to its best positive, (queries,); -inf if all are NaN."""
    best = torch.full((len(query),), -torch.inf, device=query.device)
    for indices in positives.T:
        features = candidate[indices.clamp(min=0)]
        similarities = (query.double() * features.double()).sum(dim=1).float()
        is_missing = (indices == PADDING) | similarities.isnan()
        best = torch.maximum(best, similarities.masked_fill(is_missing, -torch.inf))
    return best


def _pack(scores: Tensor, index: Tensor) -> Tensor:
    """Return score and index as one int64 that sorts by score, then by earlier index; NaN last."""
    # + 0.0 turns -0.0 into 0.0: equal scores need equal bits.
    scores = torch.where(scores.isnan(), -torch.inf, scores) + 0.0
    # Bits of negative floats are inverted to sort like integers.
    bits = scores.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (0xFFFFFFFF - index)


def _unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and indices from the result of `_pack`."""
    ordered = (packed >> 32).int()
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), 0xFFFFFFFF - (packed & 0xFFFFFFFF)


class CandidatePairs(NamedTuple):
    """Unique (image, text) pairs in a fixed order: image (P,) and text (P,) int64 indices."""

    image: NDArray[np.int64]
    text: NDArray[np.int64]


def nearest_pairs(text_to_image: Search, image_to_text: Search) -> CandidatePairs:
    """Return pairs in the top of either direction, each once, sorted by image, then text."""
    num_texts = len(text_to_image.nearest)
    text = np.arange(num_texts)[:, None]
    image = np.arange(len(image_to_text.nearest))[:, None]
    # A pair as one integer, image * num_texts + text, to sort pairs and drop repeated ones.
    codes = np.concatenate(
        [
            (text_to_image.nearest * num_texts + text).ravel(),
            (image * num_texts + image_to_text.nearest).ravel(),
        ]
    )
    return CandidatePairs(*np.divmod(np.unique(codes), num_texts))


def match_pairs(
    pairs: CandidatePairs,
    scorer: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]],
    group: NDArray[np.int64],
    order: NDArray[np.int64],
    match_batch: int,
    *,
    processes: ProcessGroup | None = None,
    on_batch: Callable[[int], object] = lambda num_pairs: None,
) -> NDArray[np.float32]:
    """Compute the match scores of pairs, (P,) float32; processes split the batches.

    Args:
        scorer: maps image and text indices (pairs,) of a batch to its match scores (pairs,).
        group: (P,) group number of each pair; a batch has pairs of one group. Groups run in the
            order of their numbers.
        order: (P,) sort key of the pairs in a group.
        match_batch: maximum pairs of a batch.
        on_batch: called with the number of pairs of each batch.
    """
    processes = processes or ProcessGroup.current()
    # Indices of pairs by group, then by `order`.
    by_group = np.lexsort((order, group))
    ends = np.flatnonzero(np.diff(group[by_group])) + 1
    batches: list[NDArray[np.int64]] = []
    for group_indices in np.split(by_group, ends):
        # Batches of about equal size: a last batch of a few pairs would waste a call.
        batches += np.array_split(group_indices, -(-len(group_indices) // match_batch))

    def score_batch(number: int) -> NDArray[np.float32]:
        indices = batches[number]
        scores = scorer(pairs.image[indices], pairs.text[indices])
        on_batch(len(indices))
        return scores

    match_scores = np.empty(len(by_group), dtype=np.float32)
    for indices, scores in zip(batches, processes.map_blocks(len(batches), score_batch)):
        match_scores[indices] = scores
    return match_scores


def look_up(
    pairs: CandidatePairs,
    match_scores: NDArray[np.float32],
    num_texts: int,
    image: NDArray[np.int64],
    text: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Return the match scores of (image, text) pairs, in the shape that both index arrays share.

    match_scores: (P,), of `pairs`, which are sorted and must contain every (image, text).
    """
    index = np.searchsorted(pairs.image * num_texts + pairs.text, image * num_texts + text)
    return match_scores[index]


def reranked_ranks(
    dual: Search, scores: NDArray[np.floating], positives: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return each query's rank, from 0, of its best positive after re-ranking: (queries,).

    scores: (queries, top), by which the nearest candidates are sorted; ties and NaN count against
    the model. positives: (queries, max_positives), padded with -1.
    """
    is_positive = _is_positive(dual.nearest, positives)
    # `initial` is the maximum without candidates (top = 0).
    best = np.where(is_positive & ~np.isnan(scores), scores, -np.inf).max(
        axis=1, keepdims=True, initial=-np.inf
    )
    num_ahead = (~(scores < best) & ~is_positive).sum(axis=1)
    # The nearest stay ahead of other candidates, so a query without a positive among its nearest
    # keeps its dual-encoder rank.
    return np.where(is_positive.any(axis=1), num_ahead, dual.ranks)


def listwise_losses(
    nearest: NDArray[np.int64], scores: NDArray[np.floating], positives: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return each query's -log probability of its positives, (queries,) in nats.

    Probabilities are the softmax of `scores` (queries, top) over the query's `nearest` candidates.
    NaN where no positive is among the nearest.
    """
    is_positive = _is_positive(nearest, positives)
    scores = scores.astype(np.float64)
    positive_scores = np.where(is_positive, scores, -np.inf)
    losses = np.logaddexp.reduce(scores, axis=1) - np.logaddexp.reduce(positive_scores, axis=1)
    return np.where(is_positive.any(axis=1), losses, np.nan)


def _is_positive(nearest: NDArray[np.int64], positives: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark entries of `nearest` (queries, top) that are in `positives` (queries, max_positives)."""
    is_positive = np.zeros(nearest.shape, dtype=bool)
    # Column by column: a mask (queries, top, max_positives) is large if a caption has many images.
    for column in positives.T:
        is_positive |= (nearest == column[:, None]) & (column[:, None] != PADDING)
    return is_positive


# Images of one pass, which reads every text bucket once.
IMAGES_PER_PASS = 512
# Text tokens of a bucket, padding counted; a gibibyte of prepared states at width 768.
MAX_BUCKET_TOKENS = 2**18


def match_batch_for(device: torch.device, batch: int | None = None) -> int:
    """Return the maximum pairs of one call: `batch`, else 64 on a CPU and 1,024 elsewhere."""
    # A GPU computes 64 pairs in less time than the host takes to start a call.
    if batch is not None:
        return batch
    return 64 if device.type == "cpu" else 1024


class EncodedBlocks(Protocol):
    """Part of `Encoder` that re-ranking reads: encoded blocks, and the scorer of their pairs."""

    itm_scorer: ITMScorer
    image_blocks: BlockCache[int]
    text_blocks: BlockCache[int]
    text_lengths: NDArray[np.int64]
    batch: int
    device: torch.device
    precision: Precision | None


class PairScorer:
    """Match log-odds of pairs of one image and texts of one bucket, from encoded blocks."""

    def __init__(self, encoded: EncodedBlocks, collection: Collection) -> None:
        self.encoded, self.collection = encoded, collection
        block, row = collection.text_location.T
        # Captions were sorted by length, then cut into blocks: the index among sorted captions.
        self._sorted_index = block * encoded.batch + row
        self._length = encoded.text_lengths[block]
        self._bucket_of_block = assign_buckets(
            encoded.text_lengths, encoded.batch, MAX_BUCKET_TOKENS
        )
        self._bucket_of_text = self._bucket_of_block[block]
        # The most recent bucket and image, with their prepared states.
        self._prepared_bucket: tuple[int, Any] = (-1, None)
        self._prepared_image: tuple[int, Any] = (-1, None)

    def groups(self, pairs: CandidatePairs) -> NDArray[np.int64]:
        """Return group numbers (P,): pairs of one image and text bucket may share a call."""
        num_buckets = 1 + self._bucket_of_block.max(initial=0)
        pass_and_bucket = (
            pairs.image // IMAGES_PER_PASS * num_buckets + self._bucket_of_text[pairs.text]
        )
        return pass_and_bucket * len(self.collection.image_features) + pairs.image

    def order(self, pairs: CandidatePairs) -> NDArray[np.int64]:
        """Return sort keys (P,) that bring texts of similar length together."""
        return self._sorted_index[pairs.text]

    def __call__(self, image: NDArray[np.int64], text: NDArray[np.int64]) -> NDArray[np.float32]:
        """Score pairs of one group: indices of images and texts (pairs,) -> (pairs,)."""
        encoded = self.encoded
        with torch.no_grad(), evaluation_autocast(encoded.device, encoded.precision):
            prepared = self._prepare_image(int(image[0]))
            bucket_start, texts = self._prepare_bucket(int(self._bucket_of_text[text[0]]))
            rows = torch.from_numpy(self._sorted_index[text] - bucket_start).to(encoded.device)
            pair_texts = texts.select(rows, int(self._length[text].max()))
            log_odds = encoded.itm_scorer.match(prepared, pair_texts)
        return log_odds.float().cpu().numpy()

    def _prepare_image(self, image: int) -> Any:
        if self._prepared_image[0] != image:
            # Freed before the next image is prepared, so that only one is in memory.
            self._prepared_image = (-1, None)
            block, row = self.collection.image_location[image]
            features = self.encoded.image_blocks[int(block)].features
            image_features = features.select(torch.tensor([row], device=self.encoded.device))
            self._prepared_image = (image, self.encoded.itm_scorer.prepare_image(image_features))
        return self._prepared_image[1]

    def _prepare_bucket(self, bucket: int) -> tuple[int, Any]:
        """Return the sorted index of a bucket's first text, and the prepared texts."""
        if self._prepared_bucket[0] != bucket:
            self._prepared_bucket = (-1, None)
            blocks = np.flatnonzero(self._bucket_of_block == bucket)
            features = (self.encoded.text_blocks[int(block)].features for block in blocks)
            prepared = [self.encoded.itm_scorer.prepare_texts(part) for part in features]
            bucket_start = int(blocks[0]) * self.encoded.batch
            self._prepared_bucket = (bucket, (bucket_start, type(prepared[0]).stack(prepared)))
        return self._prepared_bucket[1]


def assign_buckets(lengths: NDArray[np.int64], batch: int, max_tokens: int) -> NDArray[np.int64]:
    """Return the bucket, from 0, of each block of `batch` texts: (blocks,).

    lengths: (blocks,) tokens to which a block is padded, non-decreasing. max_tokens: maximum tokens
    of a bucket's texts, padded to its longest block; a single block may exceed it.
    """
    buckets = np.zeros(len(lengths), dtype=np.int64)
    # Number of the current bucket, and its first block.
    bucket, first = 0, 0
    for block, length in enumerate(lengths):
        if block > first and (block + 1 - first) * batch * length > max_tokens:
            bucket, first = bucket + 1, block
        buckets[block] = bucket
    return buckets
