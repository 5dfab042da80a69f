"""Global features of all images and captions of an evaluation, and blocks for re-ranking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evaluation.core.eval_mode import inference
from evaluation.core.feature_cache import Block, BlockCache
from evaluation.core.samples import (
    CaptionedSample,
    EvaluationError,
    Samples,
    count_kinds,
    kinds_in_words,
)
from evaluation.core.work_sharding import Ranks
from evaluation.retrieval.search import NOTHING
from vlp.config import Precision
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.text.tokenizer import TextTokens
from vlp.models.folder import Loaded
from vlp.models.itm.scorer import ITMScorer


class Collection(NamedTuple):
    """Every image once and all captions, in the order of the shards.

    image (I, d) and text (T, d) are unit float32 features on the device; image_of_text (T,);
    image_place (I, 2) and text_place (T, 2) are (block, row), so that a block can be encoded again.
    """

    image: Tensor
    text: Tensor
    captions: list[str]
    image_of_text: NDArray[np.int64]
    image_place: NDArray[np.int64]
    text_place: NDArray[np.int64]
    skipped: dict[str, int]

    def texts_of_image(self) -> NDArray[np.int64]:
        """(I, most) caption indices of each image, filled up with -1."""
        counts = np.bincount(self.image_of_text, minlength=len(self.image))
        table = np.full((len(counts), counts.max(initial=1)), NOTHING, dtype=np.int64)
        order = np.argsort(self.image_of_text, kind="stable")
        slot = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        table[self.image_of_text[order], slot] = order
        return table


class _Read(NamedTuple):
    """Result of one block of samples: features and captions of the good ones."""

    features: NDArray[np.float32]
    captions: list[list[str]]
    identities: list[tuple[str, str]]
    skipped: list[SkippedSample]


class Encoder:
    """Encodes fixed blocks of `batch` samples or captions with one model on one device.

    Blocks of captions hold captions of like length, and are cut to their longest: most padding is
    never computed, neither here nor in the cross-modal encoder. `itm_scorer` scores pairs of their
    features; once everything is collected, `text_widths` (blocks,) are the captions' tokens.
    """

    def __init__(
        self,
        loaded: Loaded,
        samples: Samples,
        *,
        batch: int,
        device: torch.device,
        precision: Precision | None,
        memory: int,
    ) -> None:
        self.loaded = loaded
        self.itm_scorer = ITMScorer(loaded.model)
        self.samples = samples
        self.batch = batch
        self.device = device
        self.precision = precision
        self.images = BlockCache(self._encode_images, memory)
        self.texts: BlockCache[int] = BlockCache(self._encode_texts, memory)
        self._tokens = TextTokens(*(torch.empty(0) for _ in TextTokens._fields))
        self.text_widths = np.zeros(0, dtype=np.int64)

    def collect(self, ranks: Ranks, step: Callable[[int], object]) -> Collection:
        """Encode everything once; samples that show the same image become one image.

        Raises:
            EvaluationError: no sample could be used.
        """

        def read(block: int) -> _Read:
            encoded = self.images[block]
            step(len(range(len(self.samples))[self._rows(block)]))
            return _Read(_global(encoded.features), *encoded.extra)

        reads = ranks.map_blocks(-(-len(self.samples) // self.batch), read)
        skipped = count_kinds([skip for part in reads for skip in part.skipped])
        known: dict[tuple[str, str], int] = {}
        place: list[tuple[int, int]] = []
        captions: list[list[str]] = []
        for block, part in enumerate(reads):
            for row, (identity, own) in enumerate(zip(part.identities, part.captions)):
                if identity not in known:
                    known[identity] = len(known)
                    place.append((block, row))
                    captions.append([])
                captions[known[identity]].extend(own)
        if not place:
            kinds = kinds_in_words(skipped)
            raise EvaluationError(
                f"{', '.join(self.samples.folders)}: no usable sample in "
                f"{len(self.samples)} ({kinds})"
            )
        image = np.stack([reads[block].features[row] for block, row in place])
        texts = [caption for own in captions for caption in own]
        tokens = self.loaded.text(texts)
        order = tokens.attention_mask.sum(dim=1).argsort(stable=True)
        self._tokens = TextTokens(*(part[order] for part in tokens))
        self.text_widths = self._widths(self._tokens.attention_mask)
        blocks = -(-len(texts) // self.batch)
        text = np.concatenate(
            ranks.map_blocks(blocks, lambda block: _global(self.texts[block].features))
        )
        rank_of = order.argsort().numpy()
        return Collection(
            image=torch.from_numpy(image).to(self.device),
            text=torch.from_numpy(text[rank_of]).to(self.device),
            captions=texts,
            image_of_text=np.repeat(np.arange(len(place)), [len(own) for own in captions]),
            image_place=np.array(place, dtype=np.int64),
            text_place=np.stack([rank_of // self.batch, rank_of % self.batch], axis=1),
            skipped=skipped,
        )

    def _widths(self, mask: Tensor) -> NDArray[np.int64]:
        """Tokens to which each block of captions is cut, from their sorted masks."""
        lengths = mask.sum(dim=1).numpy()
        if self.itm_scorer.reads_padding:
            lengths = np.full_like(lengths, mask.shape[1])
        last = np.arange(0, len(lengths), self.batch) + self.batch - 1
        return lengths[last.clip(max=len(lengths) - 1)]

    def _rows(self, block: int) -> slice:
        return slice(block * self.batch, (block + 1) * self.batch)

    def _encode_images(self, block: int) -> Block:
        pixels, captions, identities = [], [], []
        skipped: list[SkippedSample] = []
        for position in range(len(self.samples))[self._rows(block)]:
            sample = self.samples.read(position)
            if isinstance(sample, CaptionedSample):
                image: Any = sample.image
                is_stored = isinstance(image, Tensor)
                pixels.append(image if is_stored else self.loaded.preprocess(image))
                captions.append(sample.captions)
                identities.append(sample.identity)
            else:
                skipped.append(sample)
        extra = (captions, identities, skipped)
        if not pixels:
            return Block(None, extra)
        batch = torch.stack(pixels).to(self.device)
        with torch.no_grad(), inference(self.device, self.precision):
            return Block(self.loaded.model.encode_image(batch), extra)

    def _encode_texts(self, block: int) -> Block:
        tokens = TextTokens(*(part[self._rows(block)] for part in self._tokens))
        cut = (part[:, : self.text_widths[block]].to(self.device) for part in tokens)
        with torch.no_grad(), inference(self.device, self.precision):
            return Block(self.loaded.model.encode_text(*cut))


def _global(features: Any) -> NDArray[np.float32]:
    """The (rows, d) unit features of a block; none for a block without a good sample."""
    if features is None:
        return np.zeros((0, 0), dtype=np.float32)
    return features.feature.float().cpu().numpy()
