"""Images of shards, encoded once and searched by any text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from evaluation.encoder import (
    GIBIBYTE,
    Block,
    BlockCache,
    Collection,
    Encoder,
    encode_image,
    require_finite,
)
from evaluation.options import EvalOptions
from evaluation.retrieval.rerank import similarity
from evaluation.samples import CaptionedSample, EvaluationError, Samples
from evaluation.work_sharding import ProcessGroup, evaluating, evaluation_autocast
from vlp.data.shards.sample_files import SkippedSample
from vlp.io import atomic_write
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.folder import Loaded

# Pairs of one call; on two cores a fifth faster than single pairs or all pairs in one call.
_MATCH_BATCH = 4


class Hit(NamedTuple):
    """A retrieved image: index, cosine with the text, match log-odds (None if not computed)."""

    image: int
    similarity: float
    match: float | None


class Gallery:
    """The images of shard folders with their features; samples of one image are merged.

    store: a file that keeps the images' features, and a hash of what they were computed from.
    Features read from that file leave `collection` unset.
    """

    collection: Collection

    def __init__(
        self,
        loaded: Loaded,
        shards: Sequence[str | Path],
        options: EvalOptions = EvalOptions(),
        store: tuple[Path, str] | None = None,
    ) -> None:
        self.loaded = loaded
        self._samples = Samples(shards, options.limit)
        self._encoded = BlockCache(self._encode_image, GIBIBYTE)
        with evaluating(loaded.model, options.device) as torch_device:
            self.encoder = Encoder(loaded, self._samples, options, torch_device)
            if store is not None and self._read(*store):
                return
            self.collection = self.encoder.collect(ProcessGroup.current())
        self._features = self.collection.image_features
        self._sample_indices = np.array([s.sample_index for s in self.collection.samples])
        with suppress(OSError):  # such as a full disk
            if store is not None:
                with atomic_write(store[0]) as file:
                    features, samples = self._features.cpu().numpy(), self._sample_indices
                    np.savez(file, inputs=store[1], features=features, samples=samples)

    def _read(self, file: Path, inputs: str) -> bool:
        """Read stored features; return False if they are missing, damaged or of other inputs."""
        try:
            with np.load(file) as stored:
                if str(stored["inputs"]) != inputs:
                    return False
                self._features = torch.from_numpy(stored["features"]).to(self.encoder.device)
                self._sample_indices = stored["samples"]
            # Code that the hash does not cover, such as a plugin's, may have changed: compare one
            # image's feature. Another precision alone leaves a cosine above this threshold.
            first = self._encoded[0].features.feature[0].float()
            return bool(first @ self._features[0] > 0.999)
        # A damaged file raises errors of many classes; its CRC-32 finds damage in the arrays.
        except Exception:
            return False

    def _encode_image(self, index: int) -> Block:
        """Encode one image, for its token states: `collection` has none."""
        with evaluation_autocast(self.encoder.device, self.encoder.precision):
            return Block(encode_image(self.loaded, self.image(index).image, self.encoder.device))

    def __len__(self) -> int:
        return len(self._features)

    def image(self, index: int, min_size: int | None = None) -> CaptionedSample:
        """Return an image and the captions of its first sample.

        Both sides keep `min_size` pixels, as in `vlp.data.image.decode.decode_image`.
        """
        sample = self._samples.read(int(self._sample_indices[index]), min_size)
        if isinstance(sample, SkippedSample):
            raise EvaluationError(f"{sample.kind}: {sample.where}")
        return sample

    def search(self, text: str, top: int, rerank: int) -> list[Hit]:
        """Return the `top` best images for a text, best first.

        The `rerank` nearest images are re-ranked by similarity / temperature + match log-odds.
        """
        model = self.loaded.model
        with torch.no_grad(), evaluating(model, self.encoder.device) as torch_device:
            tokens = [part.to(torch_device) for part in self.loaded.text([text])]
            with evaluation_autocast(torch_device, self.encoder.precision):
                query = model.encode_text(*tokens)
            if not query.word_mask.any():
                raise EvaluationError(f"the text {text!r} holds no word")
            similarities = similarity(query.feature, self._features)[0]
            require_finite(similarities)
            order = torch.argsort(similarities, descending=True, stable=True)
            nearest, hits = order[: max(top, rerank)].tolist(), []
            for start in range(0, len(nearest[:rerank]), _MATCH_BATCH):
                indices = nearest[:rerank][start : start + _MATCH_BATCH]
                hits += [
                    Hit(index, float(similarities[index]), match)
                    for index, match in zip(indices, self._match(indices, query), strict=True)
                ]
            temperature = float(model.temperature())
        hits.sort(key=lambda hit: -(hit.similarity / temperature + (hit.match or 0.0)))
        # Images without a match score follow in the order of their similarity.
        hits += [Hit(index, float(similarities[index]), None) for index in nearest[rerank:]]
        return hits[:top]

    def _match(self, indices: list[int], query: TextFeatures) -> list[float]:
        """Return the match log-odds of images with the query, a batch of one."""
        features = [self._encoded[index].features for index in indices]
        # Each field of `ImageFeatures`, concatenated over the images.
        images = ImageFeatures(*map(torch.cat, zip(*features, strict=True)))
        query_rows = torch.zeros(len(indices), dtype=torch.int64, device=self.encoder.device)
        with evaluation_autocast(self.encoder.device, self.encoder.precision):
            log_odds = self.loaded.model.match(images, query.select(query_rows))
        return require_finite(log_odds.float()).tolist()
