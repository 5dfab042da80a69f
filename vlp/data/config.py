"""What is streamed, in which order, and how a sample becomes tensors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vlp.config import Config


class SourceConfig(Config):
    """One folder of shards; `weight` is how often its samples come in one epoch."""

    path: str
    weight: float = Field(1.0, gt=0)


class AugmentConfig(Config):
    """RandAugment(2, 7) over the design's operations, a random crop and a mirror."""

    randaugment: bool = True
    operations: int = 2
    magnitude: int = 7
    crop_scale: tuple[float, float] = (0.5, 1.0)
    mirror: bool = True


class DataConfig(Config):
    """Streaming order, text and picture preparation of pretraining."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    vocabulary: str = Field(
        "bert-base-uncased", description="folder with tokenizer.json, or a name on the hub"
    )
    captions: Literal["one", "all"] = "one"
    canonical_streams: int = Field(64, ge=1)
    shuffle_window: int = Field(4096, ge=1, description="samples")
    workers: int = Field(1, ge=0, description="loader processes of each rank")
    augment: AugmentConfig = AugmentConfig()
    max_skipped_share: float = Field(
        0.5, gt=0, le=1, description="more bad samples than this share of an epoch end the run"
    )
