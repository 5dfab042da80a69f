"""Commands that convert models and checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from vlp.process.command_line import Command, Overrides, new_app

NewFolder = Annotated[Path, Option(metavar="DIR", help="a new folder")]

app = new_app()


@app.command(cls=Command)
def convert_albef(
    checkpoint: Annotated[Path, Option(metavar="FILE", help="the .pth")],
    vocabulary: Annotated[str, Option(metavar="NAME", help="folder or hub name of its BERT")],
    out: NewFolder,
    image_size: Annotated[
        int | None, Option(metavar="PX", help="side of images (default: the checkpoint's)")
    ] = None,
    overrides: Overrides = None,
) -> int:
    """Make a model folder of a public ALBEF checkpoint, with ACE-RPE.

    Sizes are read from the checkpoint. The tables of ACE-RPE start at zero: the folder's model
    scores as the checkpoint does, and fine-tuning starts from there. Overrides change the model's
    configuration (`cross.anchor.groups=16`, `cross.position=[]`).

    \b
      vlp convert-albef --checkpoint ALBEF.pth --vocabulary bert-base-uncased \\
          --out models/albef --image-size 384 cross.anchor.mode=bias
    """
    from launch.from_albef import convert

    return _run(lambda: convert(checkpoint, vocabulary, out, image_size, overrides or ()))


@app.command(cls=Command)
def convert_checkpoint(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="sharded checkpoint, `step_N`")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="folder to write; must not exist")],
) -> int:
    """Write a sharded checkpoint in full, as safetensors that do not depend on ranks or engine.

    The new folder is a checkpoint too: as `checkpoints/step_N` of a run it is resumed by every
    engine. A full checkpoint needs no conversion: a run with training.checkpoint_format=sharded
    resumes it and writes its next one in shards.

    \b
      vlp convert-checkpoint runs/base/checkpoints/step_9000 runs/moved/checkpoints/step_9000
    """
    from vlp.training.checkpoints.full_form import convert

    return _run(lambda: convert(old, new))


def _run(work: Callable[[], None]) -> int:
    from yaml import YAMLError

    from vlp.config import ConfigError

    try:
        work()
    except (ConfigError, ValueError, OSError, YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
