"""Commands that train models."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from launch.cli.ranks import launch_ranks
from vlp.process.command_line import Command, Overrides, nearest, new_app, positive, run_app
from vlp.tasks.downstream.registry import task_kinds

TASKS = ", ".join(task_kinds())

Config = Annotated[Path, Option(metavar="FILE", help="a configuration of configs/")]
Ranks = Annotated[
    int | None,
    Option(
        parser=positive,
        metavar="N",
        help="processes on this machine (default: one for each GPU, or one)",
    ),
]
Resume = Annotated[bool, Option("--resume", help="go on from the newest checkpoint")]

app = new_app()


@app.command(cls=Command)
def train(
    config: Config, ranks: Ranks = None, resume: Resume = False, overrides: Overrides = None
) -> int:
    """Pretrain an image-text model, or train a vision model.

    A configuration with the key `task` trains a vision model. The run's folder is the key
    `output`. For several machines start launch/pretrain.py with deepspeed.

    \b
      vlp train --config configs/pretrain/base.yaml training.batch=256
    """
    from vlp.config import ConfigError, read_values

    try:
        values, _ = read_values(config)
    except ConfigError:
        values = {}  # the script says what is wrong with it
    script = "train_vision" if "task" in values else "pretrain"
    arguments = ["--config", str(config), *(overrides or ()), *(["--resume"] if resume else ())]
    if (several := _several(ranks)) > 1:
        return launch_ranks(several, ["train", *arguments])
    return int(importlib.import_module(f"launch.{script}").main(arguments))


@app.command(cls=Command)
def finetune(
    task: Annotated[str, typer.Argument(metavar="TASK", help=f"one of {TASKS}")],
    config: Config,
    init_from: Annotated[
        str | None, Option("--from", metavar="DIR", help="model folder, same as init_from=DIR")
    ] = None,
    ranks: Ranks = None,
    resume: Resume = False,
    overrides: Overrides = None,
) -> int:
    """Fine-tune a model on a downstream task.

    The run's folder is the key `output`: `best/` is the best checkpoint on the validation data,
    `model/` the last one. For several machines start launch/finetune_TASK.py with accelerate.

    \b
      vlp finetune vqa --config configs/finetune/vqa_v2.yaml --from runs/base/model
    """
    if not any(f"{kind}_".startswith(f"{task}_") for kind in task_kinds()):
        raise typer.BadParameter(f"unknown task {task!r}; {nearest(task, task_kinds())}")
    changes = [*([f"init_from={init_from}"] if init_from else []), *(overrides or ())]
    if (several := _several(ranks)) > 1:
        flags = ["--resume"] if resume else []
        return launch_ranks(several, ["finetune", task, "--config", str(config), *changes, *flags])
    from evaluation.downstream.finetuning import finetune as run

    return run(config, task, changes, resume)


@app.command(cls=Command)
def align(
    config: Config,
    out: Annotated[Path, Option(metavar="DIR", help="model folder to write")],
    epochs: Annotated[int, Option(parser=positive, metavar="N", help="passes over the pairs")] = 1,
    shrinkage: Annotated[
        float | None,
        Option(
            metavar="X",
            help="of covariances, as a share of the mean variance; else held-out images choose",
        ),
    ] = None,
    overrides: Overrides = None,
) -> int:
    """Align two pretrained towers without training.

    The contrastive projections are solved in closed form, by canonical correlation over the pairs
    of a pretraining configuration; pretrain from the folder with init_from=DIR.

    \b
      vlp align --config configs/pretrain/from_towers.yaml --out runs/aligned
    """
    from launch.cli.align import run_align

    return run_align(config, out, epochs, shrinkage, list(overrides or ()))


def finetune_script(task: str) -> int:
    """Run `vlp finetune TASK` in this process with the script's arguments."""
    return run_app(app, "vlp", ["finetune", task, "--ranks", "1", *sys.argv[1:]])


def _several(ranks: int | None) -> int:
    """Return the number of processes to start; 1 where a launcher has started this one."""
    if "WORLD_SIZE" in os.environ:
        return 1
    if ranks is None:
        import torch

        return torch.cuda.device_count()
    return ranks
