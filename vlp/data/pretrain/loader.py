"""Batches of pretraining: sources, order and preparation as the configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch.utils.data import DataLoader

from vlp.config import ConfigError
from vlp.data.config import DataConfig, SourceConfig
from vlp.data.features.store import HEADER_NAME, StoredFeatures, shards_sha256
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.pretrain.dataset import CaptionedSamples
from vlp.data.pretrain.resampled import ListedShards, ResampledSamples
from vlp.data.shards.remote import ShardCache
from vlp.data.shards.sample_files import DataError
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.stream.batch import Inputs
from vlp.data.stream.loader import OrderedData, read_at_once
from vlp.data.stream.sampler import EndlessSampler, Pool, SlidingSampler, TrainingSampler
from vlp.data.text.tokenizer import TextProcessor
from vlp.io import sha256_of

__all__ = ["DataError", "PretrainData"]


class PretrainData(OrderedData):
    """The batches of one pretraining run, the same for any number of ranks and workers.

    Args:
        config: sources, order and preparation.
        inputs: sizes of text and image, and which masks are drawn.
        batch: slots of a global batch (all ranks).
        seed: of the run.
        text: tokenizer; None is the one that the configuration names.
    """

    def __init__(
        self,
        config: DataConfig,
        inputs: Inputs,
        batch: int,
        seed: int,
        text: TextProcessor | None = None,
    ) -> None:
        self.config, self.seed = config, seed
        self.text = text or TextProcessor.load(config.vocabulary, inputs.max_tokens)
        _require_fit(config, inputs, self.text)
        self.preprocessing = Preprocessing(inputs.image_size, *inputs.statistics)
        self.cache = None
        if config.cache is not None:
            self.cache = ShardCache(config.cache.folder, config.cache.limit)
        self.sources: list[ShardIndex] = []
        self.listed: list[ListedShards] = []
        sampler: TrainingSampler | EndlessSampler
        if config.epoch_samples is not None:
            self.listed = [ListedShards(one.path, config.outages) for one in config.sources]
            sampler = EndlessSampler(config.epoch_samples, batch)
        else:
            self.sources = [
                ShardIndex.open(source.path, self.cache, config.outages)
                for source in config.sources
            ]
            order = SlidingSampler if config.shuffle == "sliding" else TrainingSampler
            sampler = order(
                [_pool(config, *both) for both in zip(config.sources, self.sources)],
                config.canonical_streams,
                config.shuffle_window,
                seed,
            )
        self.features = features = None
        if config.features is not None:
            self.features = StoredFeatures(config.features)
            augment = None if config.augment.keeps_images else config.augment
            features = self.features.require(self.preprocessing, self.sources, augment)
        self.captioned = CaptionedSamples(
            self.sources or cast("Sequence[ShardIndex]", self.listed),
            config.captions == "all",
            self.text,
            TrainTransform(config.augment, self.preprocessing),
            inputs,
            seed,
            config.texts,
            features,
        )
        remote = any(index.is_remote for index in self.sources)
        super().__init__(
            sampler,
            self.captioned,
            self.captioned.collate,
            batch,
            config.workers,
            prefetch=partial(_prefetch, self.sources) if remote else None,
        )
        parts = {f"source {n}": shards_sha256(one.shards) for n, one in enumerate(self.sources)}
        parts |= {f"source {n}": one.sha256() for n, one in enumerate(self.listed)}
        parts["vocabulary"] = self.text.sha256()
        if self.features is not None:
            parts["features"] = sha256_of(self.features.folder / HEADER_NAME)
        self.fingerprint = parts

    def _loader(
        self, consumed: int, rank: int, world_size: int, stop_after: int | None
    ) -> DataLoader[Any]:
        if self.config.epoch_samples is None:
            self._require_room(consumed, rank, world_size)
            return super()._loader(consumed, rank, world_size, stop_after)
        config = self.config
        samples = ResampledSamples(
            self.listed,
            [source.weight for source in config.sources],
            self.captioned,
            config.shuffle_window,
            (self.seed, consumed, rank, world_size),
        )
        return DataLoader(samples, batch_size=self.batch // world_size, **self._settings())

    def _require_room(self, consumed: int, rank: int, world_size: int) -> None:
        """Complain now if the cache cannot hold what one rank reads at a time."""
        if self.cache is None:
            return
        assert isinstance(self.sampler, TrainingSampler)
        needed = 0
        for source, shard in read_at_once(self.sampler, self.batch, consumed, rank, world_size):
            index = self.sources[source]
            needed += int(index.shards.bytes[shard]) if index.is_remote else 0
        if needed > self.cache.limit:
            raise ConfigError(
                f"data.cache.limit {self.cache.limit:,} bytes is too small: one rank alone reads "
                f"from {needed:,} bytes of shards at a time (two windows of each of its streams); "
                "raise it, or lower data.shuffle_window or data.canonical_streams"
            )


def _pool(config: DataConfig, source: SourceConfig, index: ShardIndex) -> Pool:
    if not len(index):
        raise ConfigError(f"{source.path}: its shards hold no samples")
    if config.captions == "one":
        return Pool(index.shards.samples, source.weight)
    index.require_captions()
    return Pool(index.shards.pairs, source.weight)


def _prefetch(sources: Sequence[ShardIndex], source: int, shard: int) -> None:
    sources[source].prefetch(shard)


def _require_fit(config: DataConfig, inputs: Inputs, text: TextProcessor) -> None:
    if text.vocab_size > inputs.vocab_size:
        raise ConfigError(
            f"the vocabulary {config.vocabulary} has {text.vocab_size} tokens, but "
            f"model.text.vocab_size is {inputs.vocab_size}"
        )
