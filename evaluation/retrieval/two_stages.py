"""Two stages of retrieval: ranks by the dual encoder, then by the re-ranking of its nearest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from evaluation.core.encoder import Collection
from evaluation.core.work_sharding import Ranks
from evaluation.retrieval.pair_scoring import Encoded, PairScorer, match_batch_for
from evaluation.retrieval.query_bank import normalised_sides
from evaluation.retrieval.rerank import look_up, match_pairs, nearest_pairs, reranked_ranks
from evaluation.retrieval.search import Search, search

Direction = Literal["text_to_image", "image_to_text"]
BANK_TEMPERATURE = 0.1
DIRECTIONS: tuple[Direction, ...] = ("text_to_image", "image_to_text")


def ranks_of_right(
    encoded: Encoded,
    collection: Collection,
    rerank: int = 0,
    temperature: float | None = None,
    match_batch: int | None = None,
    ranks: Ranks | None = None,
    quiet: bool = True,
    bank: Collection | None = None,
    bank_temperature: float = BANK_TEMPERATURE,
) -> dict[tuple[str, str], NDArray[np.int64]]:
    """Rank of each query's best right candidate, by (stage, direction).

    Args:
        encoded: the blocks that `collection` names.
        collection: global features of all images and captions.
        rerank: candidates of each query that the cross-modal encoder sees; 0 is none.
        temperature: of the similarity that is added to the cross-modal score; None adds none.
        match_batch: most pairs of one cross-modal call; None: `match_batch_for` the device.
        ranks: who shares the work.
        quiet: no bar.
        bank: other pairs, by whose queries similarities are normalised.
        bank_temperature: of that.
    """
    ranks = ranks or Ranks.current()
    positives: dict[Direction, NDArray[np.int64]] = {
        "text_to_image": collection.image_of_text[:, None],
        "image_to_text": collection.texts_of_image(),
    }
    sides: dict[Direction, tuple[Tensor, Tensor]] = {
        "text_to_image": (collection.text, collection.image),
        "image_to_text": (collection.image, collection.text),
    }
    if bank is not None:
        queries: dict[Direction, Tensor] = {"text_to_image": bank.text, "image_to_text": bank.image}
        sides = {
            direction: normalised_sides(*pair, queries[direction], bank_temperature)
            for direction, pair in sides.items()
        }
    found: dict[Direction, Search] = {
        direction: search(*sides[direction], positives[direction], rerank, ranks=ranks)
        for direction in DIRECTIONS
    }
    all_ranks: dict[tuple[str, str], NDArray[np.int64]] = {
        ("dual", direction): found[direction].ranks for direction in DIRECTIONS
    }
    if rerank:
        scores = _rerank_scores(encoded, collection, found, match_batch, ranks, quiet)
        for direction in DIRECTIONS:
            new = scores[direction]
            if temperature is not None:
                new = new + found[direction].scores.astype(np.float64) / temperature
            all_ranks["rerank", direction] = reranked_ranks(
                found[direction], new, positives[direction]
            )
    return all_ranks


def _rerank_scores(
    encoded: Encoded,
    collection: Collection,
    found: Mapping[Direction, Search],
    match_batch: int | None,
    ranks: Ranks,
    quiet: bool,
) -> dict[Direction, NDArray[np.floating]]:
    pairs = nearest_pairs(found["text_to_image"], found["image_to_text"])
    texts = len(collection.text)
    with tqdm(total=-(-len(pairs.image) // ranks.world_size), desc="match", disable=quiet) as bar:
        scorer = PairScorer(encoded, collection)
        matched = match_pairs(
            pairs,
            scorer,
            scorer.groups(pairs),
            scorer.order(pairs),
            match_batch_for(encoded.device, match_batch),
            ranks=ranks,
            step=bar.update,
        )
    near_image, near_text = found["text_to_image"].nearest, found["image_to_text"].nearest
    own_text = np.broadcast_to(np.arange(texts)[:, None], near_image.shape)
    own_image = np.broadcast_to(np.arange(len(near_text))[:, None], near_text.shape)
    return {
        "text_to_image": look_up(pairs, matched, texts, near_image, own_text),
        "image_to_text": look_up(pairs, matched, texts, own_image, near_text),
    }
