"""Configuration of the data sources, their order, and the conversion of a sample to tensors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, model_validator

from vlp.config import Config, LocalPath
from vlp.data.schema import TextKind
from vlp.data.shards.remote import OutageConfig


class SourceConfig(Config):
    """A folder of shards and the weight of its samples; a plain path has weight 1."""

    path: str = Field(
        description="a folder or a URL (https://, s3://, gs://, ...); with epoch_samples also "
        "shards themselves, as in https://host/cc/{00000..00331}.tar",
        json_schema_extra={"resume": "path"},
    )
    weight: float = Field(
        1.0,
        ge=1e-6,
        allow_inf_nan=False,
        description="share of its samples read in an epoch, 2: each twice; with epoch_samples, "
        "how often its shards are drawn",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


class CacheConfig(Config):
    """Location and size of each node's cache for shards behind URLs."""

    folder: LocalPath = Field(description="on a local disk; shared by all processes of the node")
    limit: ByteSize = Field(description='bytes, as in "200GB"; evicts the least recently used')


Share = Annotated[float, Field(gt=0, le=1)]
_Mean = Annotated[float, Field(ge=0, le=1)]
_Deviation = Annotated[float, Field(gt=0)]
ChannelMeans = tuple[_Mean, _Mean, _Mean]  # pixel values in [0, 1], RGB
ChannelDeviations = tuple[_Deviation, _Deviation, _Deviation]


class NormalisationConfig(Config):
    """Statistics of pixels, by default ImageNet's: (pixel - mean) / std, for levels in [0, 1]."""

    mean: ChannelMeans = Field(
        (0.485, 0.456, 0.406),
        description="per channel (R, G, B), of levels in [0, 1]; it is subtracted",
    )
    std: ChannelDeviations = Field(
        (0.229, 0.224, 0.225),
        description="per channel (R, G, B), of levels in [0, 1]; the rest is divided by it",
    )


def _require_ordered(scale: tuple[float, float]) -> tuple[float, float]:
    low, high = scale
    if low > high:
        raise ValueError(f"[{low}, {high}] is not 0 < low <= high <= 1")
    return scale


# smallest and largest share of the area
CropScale = Annotated[tuple[Share, Share], AfterValidator(_require_ordered)]


class AugmentConfig(Config):
    """RandAugment(2, 7), a random crop and a horizontal flip."""

    randaugment: bool = Field(
        True, description="apply RandAugment, without operations that change hue"
    )
    crop_scale: CropScale = Field(
        (0.5, 1.0),
        description="smallest and largest share of the area that a random crop keeps; [1, 1]: no "
        "crop",
    )
    hflip: bool = Field(
        True,
        description="flip an image left to right with probability 1/2, unless its caption says "
        "left or right",
    )
    quick_decode: bool = Field(
        False,
        description="decode JPEGs by faster transforms, and at half their size or less where the "
        "crop still has image_size pixels; pixels differ by a few levels of 255",
    )

    @property
    def keeps_images(self) -> bool:
        """Whether nothing is augmented: training images are prepared as in evaluation."""
        return not (self.randaugment or self.hflip) and self.crop_scale == (1.0, 1.0)


class DataConfig(Config):
    """Streaming order, text and image preparation of pretraining."""

    sources: Annotated[tuple[SourceConfig, ...], BeforeValidator(_as_list)] = Field(
        min_length=1, description="folders of shards, and their weights where these are not 1"
    )
    vocabulary: str = Field(
        "bert-base-uncased",
        description="folder with tokenizer.json, or a name on the hub",
        json_schema_extra={"resume": "path"},
    )
    captions: Literal["one", "all"] = Field(
        "one",
        description="one: a random caption at each visit of a sample; all: a pair per caption",
    )
    texts: TextKind = Field(
        "captions", description="expressions: referring expressions take the place of captions"
    )
    epoch_samples: int | None = Field(
        None,
        ge=1,
        description="samples of an epoch from shards without an index, drawn with replacement; "
        "null: an epoch reads every sample of the shards' index",
    )
    canonical_streams: int = Field(
        64,
        ge=1,
        description="streams that an epoch is cut into; a divisor of training.batch and a "
        "multiple of the number of ranks",
    )
    shuffle: Literal["windows", "sliding"] = Field(
        "windows",
        description="windows: each epoch assigns shards to streams anew and shuffles streams "
        "window by window; sliding: shards are assigned once per run, so that nodes find them in "
        "their cache, and the samples of each are spread evenly over a window",
    )
    shuffle_window: int = Field(
        4096, ge=1, description="samples of a stream that are shuffled together"
    )
    workers: int = Field(
        1, ge=0, description="loader processes of each rank", json_schema_extra={"resume": "free"}
    )
    cache: CacheConfig | None = Field(
        None,
        description="local cache of shards that are read from URLs; shards with an index "
        "on a URL need it",
        json_schema_extra={"resume": "free"},
    )
    outages: OutageConfig = Field(
        OutageConfig(),
        description="retries and policy where a store behind a URL fails",
        json_schema_extra={"resume": "free"},
    )
    augment: AugmentConfig = Field(AugmentConfig(), description="augmentation of training images")
    features: str | None = Field(
        None,
        description="folder of `vlp data features`; batches then hold the frozen image tower's "
        "stored features, and no image is decoded",
        json_schema_extra={"resume": "path"},
    )

    @model_validator(mode="after")
    def _require_consistent(self) -> DataConfig:
        if self.texts == "expressions" and self.captions == "all":
            raise ValueError("texts: expressions needs captions: one")
        if self.epoch_samples is not None and self.captions == "all":
            raise ValueError("epoch_samples needs captions: one")
        if self.epoch_samples is not None and self.features is not None:
            raise ValueError("features need shards with an index: set epoch_samples to null")
        return self
