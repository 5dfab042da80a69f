"""Samples with a number each, in the training order that pretraining has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import Field
from torch.utils.data import Dataset

from vlp.config import Config, ConfigError
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.stream.batch import Slots
from vlp.data.stream.loader import OrderedData
from vlp.data.stream.rng import make_rng
from vlp.data.stream.sampler import Pool, Request, TrainingSampler

RngFactory = Callable[[str], np.random.Generator]
"""Gives a generator for a purpose ("crop"); equal for equal (seed, epoch, sample, purpose)."""


class MapDatasetConfig(Config):
    """Reading settings of a data set that fits an index; base of the data of every vision task."""

    canonical_streams: int = Field(8, ge=1, description="the number of ranks divides it")
    workers: int = Field(
        0,
        ge=0,
        description="loader processes of each rank",
        json_schema_extra={"resume": "free"},
    )
    max_skipped_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="more skipped samples than this share of an epoch end the run",
        json_schema_extra={"resume": "free"},
    )


class IndexedSamples(Dataset[Any]):
    """Calls `read(number, rng_for)` for each slot; bad samples and empty slots are skipped ones.

    Args:
        read: makes sample `number`; every random choice comes from `rng_for`.
        seed: of the run.
    """

    def __init__(self, read: Callable[[int, RngFactory], Any], seed: int) -> None:
        self._read, self._seed = read, seed

    def __getitem__(self, request: Request) -> Any:
        """Return the sample that a slot asks for, a `SkippedSample`, or None for an empty slot."""
        if request.element is None:
            return None
        number, visit = request.element.position, request.element.visit

        def rng_for(purpose: str) -> np.random.Generator:
            return make_rng(self._seed, request.epoch, f"{number}:{visit}", purpose)

        try:
            return self._read(number, rng_for)
        except BadSample as bad:
            return SkippedSample(bad.kind, bad.where)


def indexed_data(
    count: int,
    read: Callable[[int, RngFactory], Any],
    collate: Callable[[list[Any], tuple[SkippedSample, ...]], Slots],
    config: MapDatasetConfig,
    batch: int,
    seed: int,
) -> OrderedData:
    """Return batches of `count` samples, each once an epoch, the same for any number of ranks.

    Args:
        count: samples.
        read: see `IndexedSamples`.
        collate: a batch of a rank's good samples (there may be none) and its bad ones.
        config: streams and workers.
        batch: slots of a global batch.
        seed: of the run.
    """
    if batch % config.canonical_streams:
        raise ConfigError(
            f"training.batch {batch} is not a multiple of canonical_streams "
            f"{config.canonical_streams}"
        )
    sampler = TrainingSampler([Pool([count])], config.canonical_streams, max(count, 1), seed)
    return OrderedData(
        sampler,
        IndexedSamples(read, seed),
        _Collate(collate),
        batch,
        config.workers,
        config.max_skipped_share,
    )


class _Collate:
    """Parts good from bad; a class, so that spawned workers can have it."""

    def __init__(self, collate: Callable[[list[Any], tuple[SkippedSample, ...]], Slots]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Slots:
        good = [s for s in samples if s is not None and not isinstance(s, SkippedSample)]
        return self._collate(good, tuple(s for s in samples if isinstance(s, SkippedSample)))
