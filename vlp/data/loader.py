"""Pretraining batches from shards."""

from __future__ import annotations

from collections.abc import Iterator

from vlp.data.batch import Batch
from vlp.data.config import DataConfig
from vlp.data.text import TextProcessor
from vlp.data.transforms import Preprocessing
from vlp.models.config import ModelConfig
from vlp.objectives.config import ObjectivesConfig


class PretrainData:
    """Batches of one run."""

    text: TextProcessor
    preprocessing: Preprocessing

    def __init__(
        self,
        config: DataConfig,
        model: ModelConfig,
        objectives: ObjectivesConfig,
        batch: int,
        seed: int,
    ) -> None: ...

    def samples_in_epoch(self, epoch: int) -> int:
        """Samples of all ranks."""
        raise NotImplementedError

    def batches(
        self,
        samples_consumed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        stop_after: int | None = None,
    ) -> Iterator[tuple[Batch, int]]:
        """Endless; yields (batch, samples consumed after it)."""
        raise NotImplementedError
