"""Commands that train or convert models, as the scripts of `launch/` do."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from vlp.command_line import Command, Overrides, nearest, new_app, positive

FOLDER = Path(__file__).resolve().parents[1]
TASKS = sorted(file.stem.removeprefix("finetune_") for file in FOLDER.glob("finetune_*.py"))

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
    import yaml

    values = yaml.safe_load(config.read_text("utf-8")) if config.is_file() else None
    vision = isinstance(values, dict) and "task" in values
    arguments = ["--config", str(config), *(overrides or ()), *(["--resume"] if resume else ())]
    return _start("train_vision" if vision else "pretrain", ranks, arguments)


@app.command(cls=Command)
def finetune(
    task: Annotated[str, typer.Argument(metavar="TASK", help=f"one of {', '.join(TASKS)}")],
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
    if task not in TASKS:
        raise typer.BadParameter(f"unknown task {task!r}; {nearest(task, TASKS)}")
    arguments = ["--config", str(config), *(overrides or ()), *(["--resume"] if resume else ())]
    if init_from is not None:
        arguments += ["--from", init_from]
    return _start(f"finetune_{task}", ranks, arguments)


def _start(script: str, ranks: int | None, arguments: list[str]) -> int:
    """Run a script of `launch/`, with torchrun where it takes several ranks."""
    if ranks is None and "WORLD_SIZE" not in os.environ:
        import torch

        ranks = torch.cuda.device_count()
    if ranks is None or ranks < 2:
        return int(importlib.import_module(f"launch.{script}").main(arguments))
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    file = str(FOLDER / f"{script}.py")
    return subprocess.call([sys.executable, "-m", *launcher, file, *arguments])
