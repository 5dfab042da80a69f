"""A frozen tower as a pretraining configuration describes it, ready to write its features."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from data_tools.features.write_features import FeatureWriter
from vlp import distributed
from vlp.data.features.header import FeatureHeader, FeatureSource, shards_sha256
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.shards.cache import ShardCache
from vlp.data.shards.remote import is_url
from vlp.data.shards.sample_files import KINDS
from vlp.data.shards.shard_index import ShardIndex
from vlp.models.folder import load_start
from vlp.models.tower_key import tower_key
from vlp.models.vlp import VLPModel
from vlp.training.config import PretrainConfig


def feature_writer(
    config: PretrainConfig,
    out: Path,
    views: int = 1,
    dtype: Literal["float16", "bfloat16"] = "float16",
    precision: Literal["float32", "bf16"] = "float32",
) -> FeatureWriter:
    """Return the writer of a configuration's features; the tower is on this rank's device.

    Args:
        config: names the shards, the tower and the augmentation.
        out: folder of the features.
        views: of each image; the first is plain, the others are augmented.
        dtype: that they are stored in.
        precision: of the tower's pass.

    Raises:
        ConfigError: the weights or shards cannot be read, or do not fit.
    """
    settings = config.data.cache
    cache = None if settings is None else ShardCache(settings.folder, settings.limit)
    sources = [ShardIndex.open(one.path, cache, config.data.outages) for one in config.data.sources]
    device = distributed.default_device()
    model = _model(config).to(device)
    encoder = model.image_encoder
    preprocessing = Preprocessing(config.model.image.image_size, *config.model.image.statistics)
    side = preprocessing.image_size

    averages = config.model.image.average_hflip
    plain = encoder.hflip_averaged_tower if averages else encoder.tower

    def tower(seen: Tensor) -> Tensor:
        states = [plain(seen[:, 0]), *map(encoder.tower, seen[:, 1:].unbind(1))]
        return torch.stack([encoder.pooled(each) for each in states], dim=1)

    with torch.no_grad():
        tokens, width = tower(torch.zeros(1, 1, 3, side, side, device=device)).shape[2:]
    key = tower_key(model)
    header = FeatureHeader(
        tower=key.settings,
        weights=key.weights,
        image_size=side,
        mean=preprocessing.mean,
        std=preprocessing.std,
        augment=config.data.augment if views > 1 else None,
        views=views,
        seed=config.training.seed,
        precision=precision,
        dtype=dtype,
        tokens=tokens,
        width=width,
        kinds=KINDS,
        sources=tuple(
            FeatureSource(
                name=_name(source.path),
                shards=len(index.shards),
                samples=index.shards.total,
                index=shards_sha256(index.shards),
            )
            for source, index in zip(config.data.sources, sources)
        ),
    )
    transform = TrainTransform(config.data.augment, preprocessing)
    return FeatureWriter(out, header, tower, device, sources, transform)


def _name(source: str) -> str:
    """Return the last part of a source's place, without what a URL may hold behind it."""
    return Path(urlsplit(source).path if is_url(source) else source).name


def _model(config: PretrainConfig) -> VLPModel:
    """Return the model as pretraining starts it."""
    torch.manual_seed(config.training.seed)
    model = VLPModel(config.model)
    load_start(model, config.init_from)
    return model.eval()
