"""Configuration of the data sources, their order, and the conversion of a sample to tensors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, model_validator

from vlp.config import Config, LocalPath
from vlp.data.schema import TextKind
from vlp.data.shards.remote import OutageConfig


class SourceConfig(Config):
    """One folder of shards, or its path alone; `weight`: how often its samples come in an epoch."""

    path: str = Field(
        description="a folder or a URL (https://, s3://, gs://, ...); with epoch_samples also "
        "shards themselves, as in https://host/cc/{00000..00331}.tar",
        json_schema_extra={"resume": "path"},
    )
    weight: float = Field(
        1.0,
        ge=1e-6,
        allow_inf_nan=False,
        description="share of its samples taken in one epoch; 2 takes each twice",
    )

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


class CacheConfig(Config):
    """Location and size of each node's cache for shards behind URLs."""

    folder: LocalPath = Field(description="on a local disk; shared by all processes of the node")
    limit: ByteSize = Field(description='bytes, as in "200GB"; the unused for longest go first')


Share = Annotated[float, Field(gt=0, le=1)]
_Mean = Annotated[float, Field(ge=0, le=1)]
_Deviation = Annotated[float, Field(gt=0)]
ChannelMeans = tuple[_Mean, _Mean, _Mean]  # pixel values in [0, 1], RGB
ChannelDeviations = tuple[_Deviation, _Deviation, _Deviation]


def _are_shares(scale: tuple[float, float]) -> tuple[float, float]:
    low, high = scale
    if low > high:
        raise ValueError(f"[{low}, {high}] is not 0 < low <= high <= 1")
    return scale


# least and largest share of the area
CropScale = Annotated[tuple[Share, Share], AfterValidator(_are_shares)]


class AugmentConfig(Config):
    """RandAugment(2, 7), a random crop and a horizontal flip."""

    randaugment: bool = Field(
        True, description="apply RandAugment, without operations that change hue"
    )
    crop_scale: CropScale = Field(
        (0.5, 1.0),
        description="least and largest share of the area that a random crop keeps; [1, 1] crops "
        "nothing",
    )
    hflip: bool = Field(
        True,
        description="flip an image left to right with probability 1/2, unless its caption says "
        "left or right",
    )
    quick_decode: bool = Field(
        False,
        description="decode a JPEG by less exact transforms, and at half its size or less where a "
        "crop keeps image_size pixels; some levels off",
    )

    @property
    def keeps_images(self) -> bool:
        """True without any augmentation."""
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
        description="one caption of a sample, drawn at each visit, or all, each a pair of its own",
    )
    texts: TextKind = Field(
        "captions", description="expressions: referring expressions take the place of captions"
    )
    epoch_samples: int | None = Field(
        None,
        ge=1,
        description="samples that count as an epoch of shards without an index, which are drawn "
        "again and again; null: shards have an index, which says how many there are",
    )
    canonical_streams: int = Field(
        64,
        ge=1,
        description="streams that an epoch is cut into; a divisor of training.batch and a "
        "multiple of the ranks",
    )
    shuffle: Literal["windows", "sliding"] = Field(
        "windows",
        description="windows: shards are dealt to streams anew each epoch, and one window of a "
        "stream after another is shuffled; sliding: shards are dealt once a run, so that a node "
        "finds them in its cache, and each is spread evenly over a window around its place",
    )
    shuffle_window: int = Field(4096, ge=1, description="samples of a stream")
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
        description="stores behind URLs that fail for a while",
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
            raise ValueError("texts: expressions gives one text a visit; captions: one, not all")
        if self.epoch_samples is not None and self.captions == "all":
            raise ValueError("epoch_samples draws one caption of a sample, not captions: all")
        if self.epoch_samples is not None and self.features is not None:
            raise ValueError("features are stored by index; set epoch_samples to null")
        return self
