"""Re-ranking the dual encoder's nearest candidates with the cross-modal encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.encoder import PADDING, BlockCache, Collection
from evaluation.work_sharding import ProcessGroup, inference
from vlp.config import Precision
from vlp.models.itm_scorer import ITMScorer

QUERY_CHUNK = 1024
CANDIDATE_CHUNK = 8192


class Search(NamedTuple):
    """Results of a dual encoder for each query."""

    # (queries,): negatives scored at least as high as the best-ranked positive.
    ranks: NDArray[np.int64]
    # (queries, top): candidates by descending score, ties by index.
    nearest: NDArray[np.int64]
    # (queries, top): their similarities.
    scores: NDArray[np.float32]


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
    """Rank each query's best positive from 0 among all candidates, and keep the `top` nearest.

    Memory is query_chunk x candidate_chunk scores; processes share query chunks. query, candidate:
    (., d) float32 features; positives: (queries, max_positives) candidate indices, at least one in
    a row, the rest -1.
    """
    processes = processes or ProcessGroup.current()
    top = min(top, len(candidate))
    starts = range(0, len(query), query_chunk)

    def chunk(number: int) -> tuple[NDArray, NDArray, NDArray]:
        rows = slice(starts[number], starts[number] + query_chunk)
        chunk_positives = torch.from_numpy(positives[rows]).to(query.device)
        return _search_chunk(query[rows], candidate, chunk_positives, top, candidate_chunk)

    parts = processes.map_blocks(len(starts), chunk)
    if not parts:
        empty = np.zeros((0, top), dtype=np.int64)
        return Search(empty.sum(axis=1), empty, empty.astype(np.float32))
    return Search(*(np.concatenate(column) for column in zip(*parts)))


def _search_chunk(
    query: Tensor, candidate: Tensor, positives: Tensor, top: int, step: int
) -> tuple[NDArray, NDArray, NDArray]:
    best = _best_positive(query, candidate, positives)
    num_ahead = torch.zeros(len(query), dtype=torch.int64, device=query.device)
    # One integer holds score and index, so that equal scores have one order on every device.
    keys = torch.empty(len(query), 0, dtype=torch.int64, device=query.device)
    for start in range(0, len(candidate), step):
        scores = similarity(query, candidate[start : start + step])
        # Ties and NaN count against the model.
        is_ahead = ~(scores < best[:, None])
        column = positives - start
        row, entry = ((column >= 0) & (column < scores.shape[1])).nonzero(as_tuple=True)
        is_ahead[row, column[row, entry]] = False
        num_ahead += is_ahead.sum(dim=1)
        if top:
            index = torch.arange(start, start + scores.shape[1], device=query.device)
            chunk_keys = _pack(scores, index)
            chunk_keys = chunk_keys.topk(min(top, chunk_keys.shape[1]), dim=1).values
            keys = torch.cat([keys, chunk_keys], dim=1)
            keys = keys.topk(min(top, keys.shape[1]), dim=1).values
    scores, nearest = _unpack(keys)
    return num_ahead.cpu().numpy(), nearest.cpu().numpy(), scores.cpu().numpy()


def _best_positive(query: Tensor, candidate: Tensor, positives: Tensor) -> Tensor:
    """Return the score of the best positive; -inf if all are NaN."""
    best = torch.full((len(query),), -torch.inf, device=query.device)
    for column in range(positives.shape[1]):
        features = candidate[positives[:, column].clamp(min=0)]
        scores = (query.double() * features.double()).sum(dim=1).float()
        scores = scores.masked_fill((positives[:, column] == PADDING) | scores.isnan(), -torch.inf)
        best = torch.maximum(best, scores)
    return best


def _pack(scores: Tensor, index: Tensor) -> Tensor:
    """Return score and index as one int64 that sorts by score, then by earlier index; NaN last."""
    # + 0.0 turns -0.0 into 0.0: equal scores need equal bits.
    scores = torch.where(scores.isnan(), -torch.inf, scores) + 0.0
    # Bits of negative floats are inverted to sort like integers.
    bits = scores.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (0xFFFFFFFF - index)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    ordered = (keys >> 32).int()
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)


class CandidatePairs(NamedTuple):
    """Unique (image, text) pairs in a fixed order: image (P,) and text (P,) int64 indices."""

    image: NDArray[np.int64]
    text: NDArray[np.int64]


def nearest_pairs(text_to_image: Search, image_to_text: Search) -> CandidatePairs:
    """Return pairs in the top of either direction, each once, sorted by image, then text."""
    text = np.arange(len(text_to_image.nearest))[:, None]
    image = np.arange(len(image_to_text.nearest))[:, None]
    codes = np.concatenate(
        [
            (text_to_image.nearest * len(text) + text).ravel(),
            (image * len(text) + image_to_text.nearest).ravel(),
        ]
    )
    unique = np.unique(codes)
    return CandidatePairs(unique // max(len(text), 1), unique % max(len(text), 1))


def match_pairs(
    pairs: CandidatePairs,
    match: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]],
    group: NDArray[np.int64],
    order: NDArray[np.int64],
    batch: int,
    *,
    processes: ProcessGroup | None = None,
    on_batch: Callable[[int], object] = lambda pairs: None,
) -> NDArray[np.float32]:
    """Score pairs group by group, split over processes: (P,) float32 in the order of `pairs`.

    Args:
        match: image and text indices of at most `batch` pairs, of one group -> (pairs,).
        group: (P,) group number of each pair; groups run in the order of their numbers.
        order: (P,) sort key within a group before it is cut into batches.
        on_batch: called with the number of pairs of each call.
    """
    processes = processes or ProcessGroup.current()
    sorted_indices = np.lexsort((order, group))
    ends = np.flatnonzero(np.diff(group[sorted_indices])) + 1
    # A group is cut into batches of equal size: a last batch of a few pairs would waste a call.
    batches = [
        part
        for run in np.split(sorted_indices, ends)
        if len(run)
        for part in np.array_split(run, -(-len(run) // batch))
    ]

    def score(number: int) -> NDArray[np.float32]:
        rows = batches[number]
        scores = match(pairs.image[rows], pairs.text[rows])
        on_batch(len(rows))
        return scores

    batch_scores = processes.map_blocks(len(batches), score)
    result = np.empty(len(sorted_indices), dtype=np.float32)
    for rows, scores in zip(batches, batch_scores):
        result[rows] = scores
    return result


def look_up(
    pairs: CandidatePairs,
    values: NDArray[np.float32],
    texts: int,
    image: NDArray[np.int64],
    text: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Return the values of index pairs (image, text), in the shape of `image`.

    All these pairs are in `pairs`, and `values` (P,) are theirs; texts: number of texts.
    """
    index = np.searchsorted(pairs.image * texts + pairs.text, image * texts + text)
    return values[index]


def reranked_ranks(
    dual: Search, scores: NDArray[np.floating], positives: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return ranks after re-ordering the nearest candidates by `scores` (queries, top).

    Ties and NaN count against the model. positives: (queries, max_positives), -1 pads.
    """
    is_positive = _is_positive(dual.nearest, positives)
    best = np.where(is_positive & ~np.isnan(scores), scores, -np.inf).max(
        axis=1, keepdims=True, initial=-np.inf
    )
    num_ahead = (~(scores < best) & ~is_positive).sum(axis=1)
    # Others stay after the top, so a positive outside it keeps its dual-encoder rank.
    return np.where(is_positive.any(axis=1), num_ahead, dual.ranks)


def list_losses(
    nearest: NDArray[np.int64], scores: NDArray[np.floating], positives: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return -log softmax of each query's positives among its candidates, (queries,) in nats.

    nearest, scores: (queries, top). NaN where no positive is among the candidates.
    """
    is_positive = _is_positive(nearest, positives)
    scores = scores.astype(np.float64)
    positive_scores = np.where(is_positive, scores, -np.inf)
    losses = np.logaddexp.reduce(scores, axis=1) - np.logaddexp.reduce(positive_scores, axis=1)
    return np.where(is_positive.any(axis=1), losses, np.nan)


def _is_positive(nearest: NDArray[np.int64], positives: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark candidates (queries, top) that are among `positives` (queries, max_positives)."""
    is_positive = np.zeros(nearest.shape, dtype=bool)
    # By columns: a caption of many images would make a large (queries, top, max_positives).
    for column in positives.T:
        is_positive |= (nearest == column[:, None]) & (column[:, None] != PADDING)
    return is_positive


# Images scored with every text bucket before the next images.
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
    """Interface of `Encoder`: blocks of encoded images and captions, the scorer of their pairs."""

    itm_scorer: ITMScorer
    images: BlockCache[int]
    texts: BlockCache[int]
    text_widths: NDArray[np.int64]
    batch: int
    device: torch.device
    precision: Precision | None


class PairScorer:
    """Log-odds of pairs of one image and texts of one bucket, from encoded blocks."""

    def __init__(self, encoded: EncodedBlocks, collection: Collection) -> None:
        self.encoded, self.collection = encoded, collection
        block, row = collection.text_location.T
        # Captions are sorted by length, then cut into blocks: block and row give that order.
        widths = encoded.text_widths
        self._position, self._width = block * encoded.batch + row, widths[block]
        self._bucket_of_block = assign_buckets(widths, encoded.batch, MAX_BUCKET_TOKENS)
        self._bucket_of_text = self._bucket_of_block[block]
        self._bucket: tuple[int, Any] = (-1, None)
        self._image: tuple[int, Any] = (-1, None)

    def groups(self, pairs: CandidatePairs) -> NDArray[np.int64]:
        """Return group numbers of pairs that may share a call: one image, one bucket of texts."""
        text_buckets = 1 + self._bucket_of_block.max(initial=0)
        bucket = pairs.image // IMAGES_PER_PASS * text_buckets + self._bucket_of_text[pairs.text]
        return bucket * len(self.collection.image) + pairs.image

    def order(self, pairs: CandidatePairs) -> NDArray[np.int64]:
        """Return the order inside a group, texts of similar length together."""
        return self._position[pairs.text]

    def __call__(self, image: NDArray[np.int64], text: NDArray[np.int64]) -> NDArray[np.float32]:
        """Score pairs of one group: indices of images and texts (pairs,) -> (pairs,)."""
        encoded = self.encoded
        with torch.no_grad(), inference(encoded.device, encoded.precision):
            prepared = self._prepared_image(int(image[0]))
            first, texts = self._prepared_texts(int(self._bucket_of_text[text[0]]))
            rows = torch.from_numpy(self._position[text] - first).to(encoded.device)
            pair_texts = texts.select(rows, int(self._width[text].max()))
            logits = encoded.itm_scorer.match(prepared, pair_texts)
        return logits.float().cpu().numpy()

    def _prepared_image(self, image: int) -> Any:
        if self._image[0] != image:
            # Freed before the next one is prepared, so that only one is in memory.
            self._image = (-1, None)
            block, row = self.collection.image_location[image]
            features = self.encoded.images[int(block)].features
            image_features = features.select(torch.tensor([row], device=self.encoded.device))
            self._image = (image, self.encoded.itm_scorer.prepare_image(image_features))
        return self._image[1]

    def _prepared_texts(self, bucket: int) -> tuple[int, Any]:
        """Return the position of a bucket's first text, and all its texts."""
        if self._bucket[0] != bucket:
            self._bucket = (-1, None)
            blocks = np.flatnonzero(self._bucket_of_block == bucket)
            parts = (self.encoded.texts[int(block)].features for block in blocks)
            prepared = [self.encoded.itm_scorer.prepare_texts(part) for part in parts]
            first = int(blocks[0]) * self.encoded.batch
            self._bucket = (bucket, (first, type(prepared[0]).stack(prepared)))
        return self._bucket[1]


def assign_buckets(widths: NDArray[np.int64], rows: int, tokens: int) -> NDArray[np.int64]:
    """Return the bucket of each block of texts, counted from 0.

    widths: (blocks,) tokens of each block's texts, non-decreasing. tokens: maximum of a bucket,
    padded to its widest block; a bucket has at least one block, even a larger one.
    """
    bucket = np.zeros(len(widths), dtype=np.int64)
    first = 0
    for block, width in enumerate(widths):
        if (block + 1 - first) * rows * width > tokens:
            first = block
        bucket[block] = bucket[block - 1] + (first == block) if block else 0
    return bucket
