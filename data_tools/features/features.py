"""Store the features of a frozen image tower, so that training decodes and encodes no image.

    vlp data features --config configs/pretrain/FILE.yaml --out features/train --views 4
    torchrun --nproc_per_node 2 -m data_tools features --config FILE --out FOLDER

Reads the shards, the tower and the augmentation that a pretraining configuration names. View 0 is
prepared as evaluation does, the others are augmented. Train with data.features=FOLDER. A command
that was interrupted goes on with the shards that are missing; the ranks of torchrun share them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from data_tools.features.write_features import FeatureWriter, Written
from vlp import distributed
from vlp.config import ConfigError, load_config
from vlp.data.features.header import FeatureHeader, FeatureSource, shards_sha256
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.shards.cache import ShardCache
from vlp.data.shards.sample_files import KINDS
from vlp.data.shards.shard_index import ShardIndex
from vlp.models.folder import start_from
from vlp.models.pretrained.load import load_public_weights
from vlp.models.tower_key import tower_key
from vlp.models.vlp import VLPModel
from vlp.training.config import PretrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="pretraining's")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--views", type=int, default=1, metavar="K", help="of each image; the first is plain"
    )
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument(
        "--precision", choices=("float32", "bf16"), default="float32", help="of the tower's pass"
    )
    parser.add_argument(
        "--batch", type=int, default=64, metavar="N", help="views of one pass (default: 64)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")


def run(arguments: argparse.Namespace) -> int:
    """Write the features that are missing, and say how many there are."""
    for name in ("views", "batch"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: at least 1 is needed")
    config = load_config(arguments.config, PretrainConfig, arguments.overrides)
    if config.data.sampler != "indexed":
        raise ConfigError("data.sampler: features are stored by index; it must be indexed")
    with distributed.process_group():
        writer = _writer(config, arguments)
        written = writer.write(arguments.batch, config.data.workers)
        if distributed.rank() == 0:
            print(_summary(writer, written))
    return 0


def _writer(config: PretrainConfig, arguments: argparse.Namespace) -> FeatureWriter:
    settings = config.data.cache
    cache = None if settings is None else ShardCache(settings.folder, settings.limit)
    sources = [ShardIndex.open(source.path, cache) for source in config.data.sources]
    device = distributed.default_device()
    model = _model(config).to(device)
    encoder = model.image_encoder
    preprocessing = Preprocessing(config.model.image.image_size, *config.model.image.statistics)
    side = preprocessing.image_size

    def tower(pixels: Tensor) -> Tensor:
        return encoder.pooled(encoder.tower(pixels))

    with torch.no_grad():
        tokens, width = tower(torch.zeros(1, 3, side, side, device=device)).shape[1:]
    key = tower_key(model)
    header = FeatureHeader(
        tower=key.settings,
        weights=key.weights,
        image_size=side,
        mean=preprocessing.mean,
        std=preprocessing.std,
        augment=config.data.augment if arguments.views > 1 else None,
        views=arguments.views,
        seed=config.training.seed,
        precision=arguments.precision,
        dtype=arguments.dtype,
        tokens=tokens,
        width=width,
        kinds=KINDS,
        sources=tuple(
            FeatureSource(
                name=Path(source.path).name,
                shards=len(index.shards),
                samples=index.shards.total,
                index=shards_sha256(index.shards),
            )
            for source, index in zip(config.data.sources, sources)
        ),
    )
    transform = TrainTransform(config.data.augment, preprocessing)
    return FeatureWriter(arguments.out, header, tower, device, sources, transform)


def _model(config: PretrainConfig) -> VLPModel:
    """Return the model as pretraining starts it."""
    torch.manual_seed(config.training.seed)
    try:
        model = VLPModel(config.model)
        load_public_weights(model)
        if config.init_from is not None:
            start_from(model, config.init_from)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return model.eval()


def _summary(writer: FeatureWriter, written: Written) -> str:
    header = writer.header
    size = 2 * written.samples * header.views * header.tokens * header.width
    return (
        f"{writer.folder}: {written.samples} images x {header.views} views of {header.tokens} x "
        f"{header.width} written, {size / 2**30:.2f} GiB; {written.bad} images cannot be read"
    )
