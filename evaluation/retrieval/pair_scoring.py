"""Scores of (image, text) pairs for re-ranking: each image meets all its texts in a row.

Keys and values of an image take ten times the room of its states, so they are made when its turn
comes and then dropped. Its texts come from a shelf, consecutive blocks whose prepared states are
held together; images come in shelves too, so that neither side is encoded again and again when
the caches cannot hold it. Shelves are cut from the data alone: the calls, and with them the scores
to the last bit, depend neither on the number of ranks nor on the memory allowed.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from evaluation.core.encoder import Collection
from evaluation.core.eval_mode import inference
from evaluation.core.feature_cache import BlockCache
from evaluation.retrieval.rerank import CandidatePairs
from vlp.config import Precision
from vlp.models.itm_scorer import ITMScorer

IMAGES_HELD = 512
TOKENS_HELD = 2**18
"""Of texts, padding counted; a gibibyte of prepared states at width 768."""


def match_batch_for(device: torch.device, given: int | None = None) -> int:
    """Return the most pairs of one call: as given, else 64 on a CPU and 1,024 elsewhere.

    A GPU computes 64 pairs in less time than the host takes to start a call.
    """
    if given is not None:
        return given
    return 64 if device.type == "cpu" else 1024


class Encoded(Protocol):
    """Blocks of encoded images and captions, and what scores pairs of them: an `Encoder`."""

    itm_scorer: ITMScorer
    images: BlockCache[int]
    texts: BlockCache[int]
    text_widths: NDArray[np.int64]
    batch: int
    device: torch.device
    precision: Precision | None


class PairScorer:
    """Log-odds of pairs of one image and texts of one shelf, from encoded blocks."""

    def __init__(self, encoded: Encoded, collection: Collection) -> None:
        self.encoded, self.collection = encoded, collection
        block, row = collection.text_place.T
        # Captions are sorted by length before they are cut into blocks: this is that order.
        self._place, self._width = block * encoded.batch + row, encoded.text_widths[block]
        self._shelf_of_block = shelves(encoded.text_widths, encoded.batch, TOKENS_HELD)
        self._shelf_of_text = self._shelf_of_block[block]
        self._shelf: tuple[int, Any] = (-1, None)
        self._image: tuple[int, Any] = (-1, None)

    def groups(self, pairs: CandidatePairs) -> NDArray[np.int64]:
        """Pairs that may share a call, by number: those of one image and one shelf of texts."""
        of_texts = 1 + self._shelf_of_block.max(initial=0)
        shelf = pairs.image // IMAGES_HELD * of_texts + self._shelf_of_text[pairs.text]
        return shelf * len(self.collection.image) + pairs.image

    def order(self, pairs: CandidatePairs) -> NDArray[np.int64]:
        """The order inside a group: texts of like length stand together."""
        return self._place[pairs.text]

    def __call__(self, image: NDArray[np.int64], text: NDArray[np.int64]) -> NDArray[np.float32]:
        """Score pairs of one group: indices of images and texts (pairs,) -> (pairs,)."""
        encoded = self.encoded
        with torch.no_grad(), inference(encoded.device, encoded.precision):
            prepared = self._prepared_image(int(image[0]))
            first, texts = self._prepared_texts(int(self._shelf_of_text[text[0]]))
            rows = torch.from_numpy(self._place[text] - first).to(encoded.device)
            chosen = texts.select(rows, int(self._width[text].max()))
            logits = encoded.itm_scorer.match(prepared, chosen)
        return logits.float().cpu().numpy()

    def _prepared_image(self, image: int) -> Any:
        if self._image[0] != image:
            self._image = (-1, None)  # before the next one is made
            block, row = self.collection.image_place[image]
            features = self.encoded.images[int(block)].features
            chosen = features.select(torch.tensor([row], device=self.encoded.device))
            self._image = (image, self.encoded.itm_scorer.prepare_image(chosen))
        return self._image[1]

    def _prepared_texts(self, shelf: int) -> tuple[int, Any]:
        """The place of a shelf's first text, and all its texts."""
        if self._shelf[0] != shelf:
            self._shelf = (-1, None)
            blocks = np.flatnonzero(self._shelf_of_block == shelf)
            parts = (self.encoded.texts[int(block)].features for block in blocks)
            prepared = [self.encoded.itm_scorer.prepare_texts(part) for part in parts]
            first = int(blocks[0]) * self.encoded.batch
            self._shelf = (shelf, (first, type(prepared[0]).stack(prepared)))
        return self._shelf[1]


def shelves(widths: NDArray[np.int64], rows: int, tokens: int) -> NDArray[np.int64]:
    """Return the shelf that each block of texts lies on, numbers rising from 0.

    Args:
        widths: (blocks,) tokens of each block's texts, not falling.
        rows: texts of a block.
        tokens: most tokens of a shelf, padded to its widest block; one block always fits.
    """
    shelf = np.zeros(len(widths), dtype=np.int64)
    first = 0
    for block, width in enumerate(widths):
        if (block + 1 - first) * rows * width > tokens:
            first = block
        shelf[block] = shelf[block - 1] + (first == block) if block else 0
    return shelf
