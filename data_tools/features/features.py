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
from typing import TYPE_CHECKING

from vlp.config import ConfigError, load_config
from vlp.data.limits import put_in_force

if TYPE_CHECKING:
    from data_tools.features.write_features import FeatureWriter, Written


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
        "--batch",
        type=int,
        default=64,
        metavar="N",
        help="views held at once, one of each image to a pass of the tower (default: 64)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")


def run(arguments: argparse.Namespace) -> int:
    """Write the features that are missing, and say how many there are."""
    # Here, so that help does not wait for PyTorch.
    from data_tools.features.frozen_tower import feature_writer
    from vlp import distributed
    from vlp.training.config import PretrainConfig
    from vlp.training.engines.environment import advise

    for name in ("views", "batch"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: at least 1 is needed")
    config = load_config(arguments.config, PretrainConfig, arguments.overrides)
    put_in_force(config.limits)
    if config.data.sampler != "indexed":
        raise ConfigError("data.sampler: features are stored by index; it must be indexed")
    with distributed.process_group():
        advise("--precision", arguments.precision)
        settings = arguments.views, arguments.dtype, arguments.precision
        writer = feature_writer(config, arguments.out, *settings)
        written = writer.write(arguments.batch, config.data.workers)
        if distributed.rank() == 0:
            print(_summary(writer, written))
    return 0


def _summary(writer: FeatureWriter, written: Written) -> str:
    header = writer.header
    size = 2 * written.samples * header.views * header.tokens * header.width
    return (
        f"{writer.folder}: {written.samples} images x {header.views} views of {header.tokens} x "
        f"{header.width} written, {size / 2**30:.2f} GiB; {written.bad} images cannot be read"
    )
