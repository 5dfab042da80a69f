"""`vlp data features`: features of a frozen image tower, so that training encodes no image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from data_tools.options import File, N, Out, require_positive
from vlp.command_line import ImageTower, Overrides, TextTower, tower_overrides
from vlp.config import ConfigError, load_config
from vlp.data.limits import set_limits


def features(
    config: Annotated[Path, File(help="pretraining's")],
    out: Out,
    views: Annotated[int, Option(metavar="K", help="per image; all but one are augmented")] = 1,
    dtype: Annotated[Literal["float16", "bfloat16"], Option(help="of the features")] = "float16",
    precision: Annotated[
        Literal["float32", "bf16"], Option(help="of the tower's pass")
    ] = "float32",
    batch: Annotated[int, N(help="views in memory; the tower encodes one per image at once")] = 64,
    image_tower: ImageTower = None,
    text_tower: TextTower = None,
    overrides: Overrides = None,
) -> int:
    """Store the features of a frozen image tower, so that training decodes and encodes no image.

        vlp data features --config configs/pretrain/FILE.yaml --out features/train --views 4
        torchrun --nproc_per_node 2 -m data_tools features --config FILE --out FOLDER

    Reads the shards, the tower and the augmentation of a pretraining configuration. View 0 is
    prepared as in evaluation, the others are augmented. Train with data.features=FOLDER. After an
    interruption the same command writes the missing shards. Ranks of torchrun share the work.
    """
    # Imported here, so that --help does not wait for PyTorch.
    from data_tools.feature_writer import feature_writer
    from vlp import distributed
    from vlp.training.config import PretrainConfig
    from vlp.training.engines.environment import warn_if_emulated

    require_positive(views=views, batch=batch)
    changes = [*tower_overrides(image_tower, text_tower), *(overrides or ())]
    settings = load_config(config, PretrainConfig, changes)
    set_limits(settings.limits)
    if settings.data.epoch_samples is not None:
        raise ConfigError("data.epoch_samples: features are stored by index; it must be null")
    with distributed.process_group():
        warn_if_emulated("--precision", precision)
        writer = feature_writer(settings, out, views, dtype, precision)
        samples, bad = writer.write(batch, settings.data.workers)
        if distributed.rank() == 0:
            header = writer.header
            size = 2 * samples * header.views * header.tokens * header.width
            print(
                f"{out}: {samples} images x {header.views} views of {header.tokens} x "
                f"{header.width} written, {size / 2**30:.2f} GiB; {bad} images cannot be read"
            )
    return 0
