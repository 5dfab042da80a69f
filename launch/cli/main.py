"""The commands of `vlp`; this module declares those that train, convert and export models.

A command imports its dependencies when it runs, so that `--help` needs no PyTorch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option
from typer.core import TyperGroup
from yaml import YAMLError

from data_tools.__main__ import data_commands
from evaluation.commands import ablations, measure, positions, predictions, reports
from evaluation.commands.options import EvaluationCommand
from launch.cli import plan as plans
from launch.cli.info import config_app, info
from vlp.command_line import (
    MODELS,
    START_HERE,
    Command,
    ImageTower,
    Overrides,
    TextTower,
    nearest,
    new_app,
    positive,
    reader_has_ended,
    require_output,
    run_app,
    tower_overrides,
)
from vlp.config import ConfigError, load_config, load_plugins, read_values
from vlp.signals import STOP_SIGNALS
from vlp.tasks.downstream.registry import task_kinds

ConfigFile = Annotated[Path, Option(metavar="FILE", help="a configuration of configs/")]
Ranks = Annotated[
    int | None,
    Option(
        parser=positive,
        metavar="N",
        help="processes on this machine (default: one for each GPU, or one)",
    ),
]
Resume = Annotated[bool, Option("--resume", help="continue from the newest checkpoint")]
# DeepSpeed's launcher passes --local_rank to every script; ranks read LOCAL_RANK instead.
LocalRank = Annotated[int | None, Option("--local_rank", "--local-rank", hidden=True)]
NewFolder = Annotated[Path, Option(metavar="DIR", help="a new folder")]


def demo(
    fresh: Annotated[bool, Option("--fresh", help="delete an earlier demo's runs/demo")] = False,
) -> int:
    """Build data, pretrain and evaluate a small model, in minutes."""
    from launch.demo import run_demo

    return run_demo(fresh)


def train(
    config: ConfigFile,
    ranks: Ranks = None,
    resume: Resume = False,
    image_tower: ImageTower = None,
    text_tower: TextTower = None,
    overrides: Overrides = None,
    local_rank: LocalRank = None,
) -> int:
    """Pretrain an image-text model, or train a vision model.

    A configuration with the key `task` trains a vision model. The run's folder is the key
    `output`. For several machines start launch/pretrain.py with deepspeed. Exit code 75: stopped
    by a signal or with its launcher; --resume continues, on any number of ranks.

    \b
      vlp train --config configs/pretrain/base.yaml training.batch=256
    """
    values = _read_config(config)
    task = values.get("task")
    if isinstance(task, dict) and task.get("kind") in task_kinds():
        kind = task["kind"]
        raise typer.BadParameter(f"{config} fine-tunes: vlp finetune {kind} --config {config}")
    changes = [*tower_overrides(image_tower, text_tower), *(overrides or ())]
    if (count := _rank_count(ranks)) > 1:
        if task is None:
            from vlp.training.config import PretrainConfig

            # Before the ranks start, so that an error is printed once.
            load_config(config, PretrainConfig, changes).require_world_size(count)
        flags = ["--resume"] if resume else []
        return launch_ranks(count, ["train", "--config", str(config), *changes, *flags])
    if "task" in values:
        from launch.train_vision import run_vision as run
    else:
        from launch.pretrain import run_pretraining as run
    return run(config, changes, resume)


def _read_config(config: Path) -> dict[str, Any]:
    """Return a file's values and import its plugins; {} for an invalid file."""
    try:
        values, _ = read_values(config)
    except ConfigError:  # the training reports it, once on each node
        return {}
    plugins = values.get("plugins")
    try:
        load_plugins(map(str, plugins) if isinstance(plugins, list) else ())
    except ConfigError:
        if "WORLD_SIZE" not in os.environ:  # in a rank the training reports it
            raise
    return values


class FinetuneCommand(Command):
    """`vlp finetune`; its help lists the tasks of plugins, too."""

    def get_help(self, ctx: Any) -> str:
        """Return the help; plugins are imported by now."""
        self.params[0].help = f"one of {', '.join(task_kinds())}"  # type: ignore[attr-defined]
        return super().get_help(ctx)


def finetune(
    task: Annotated[str, typer.Argument(metavar="TASK")],
    config: ConfigFile,
    init_from: Annotated[
        str | None, Option("--from", metavar="DIR", help="model folder, same as init_from=DIR")
    ] = None,
    ranks: Ranks = None,
    resume: Resume = False,
    overrides: Overrides = None,
    local_rank: LocalRank = None,
) -> int:
    """Fine-tune a model on a downstream task.

    The run's folder is the key `output`: `best/` is the best checkpoint on the validation data,
    `model/` the last one. For several machines start launch/finetune.py TASK with accelerate.

    \b
      vlp finetune vqa --config configs/finetune/vqa_v2.yaml --from runs/base/model
    """
    _read_config(config)
    if not any(f"{kind}_".startswith(f"{task}_") for kind in task_kinds()):
        read_values(config)  # it may name the task's plugin: raises if it cannot be read
        raise typer.BadParameter(f"unknown task {task!r}; {nearest(task, task_kinds())}")
    changes = [*([f"init_from={init_from}"] if init_from else []), *(overrides or ())]
    if (count := _rank_count(ranks)) > 1:
        flags = ["--resume"] if resume else []
        return launch_ranks(count, ["finetune", task, "--config", str(config), *changes, *flags])
    from launch.finetune import run_finetuning

    return run_finetuning(config, task, changes, resume)


def align(
    config: ConfigFile,
    out: Annotated[Path, Option(metavar="DIR", help="model folder to write")],
    epochs: Annotated[int, Option(parser=positive, metavar="N", help="passes over the pairs")] = 1,
    shrinkage: Annotated[
        float | None,
        Option(
            metavar="X",
            help="of covariances, as a share of the mean variance; else held-out images choose",
        ),
    ] = None,
    image_tower: ImageTower = None,
    text_tower: TextTower = None,
    overrides: Overrides = None,
) -> int:
    """Align two pretrained towers without training.

    The contrastive projections are solved in closed form, by canonical correlation over the pairs
    of a pretraining configuration; pretrain from the folder with init_from=DIR.

    \b
      vlp align --config configs/pretrain/from_towers.yaml --out runs/aligned
    """
    from launch.align import run_align

    changes = [*tower_overrides(image_tower, text_tower), *(overrides or ())]
    return run_align(config, out, epochs, shrinkage, changes)


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
          --out models/albef --image-size 384 cross.options.anchor.mode=bias
    """
    from launch.from_albef import convert

    with _config_errors():
        convert(checkpoint, vocabulary, out, image_size, overrides or ())
    return 0


def export(
    model: Annotated[str, Option(metavar="DIR", help="model folder or hub name")],
    out: Annotated[Path, Option(metavar="DIR", help="folder of the exported files")],
    format: Annotated[
        Literal["onnx", "torch"], Option(help="torch: programs that torch.export.load reads")
    ] = "onnx",
    revision: Annotated[
        str | None, Option(metavar="NAME", help="branch, tag or commit on the hub")
    ] = None,
) -> int:
    """Export image tower, text tower and ITM head to ONNX or torch.export.

    Batches are of any size. Tokenizer and preparation of images are written with the programs.

    \b
      vlp export --model runs/demo/run/model --out exported
    """
    import vlp
    from vlp.serving.export import export_model
    from vlp.tasks.downstream.task import has_task

    require_output(out, is_folder=True)
    with _config_errors():
        loaded = vlp.load(model, revision=revision)
        if loaded.folder is not None and has_task(loaded.folder):
            print(
                f"{model} was fine-tuned for a task: its head is not exported; `match` uses the "
                "ITM head of the pretraining",
                file=sys.stderr,
            )
        for file in export_model(loaded, out, format):
            print(f"{file}  {file.stat().st_size / 2**20:.1f} MiB")
    return 0


def launch_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run a command of `vlp` on several ranks of this machine; return the first failure's code."""
    # torchrun itself turns every failure into 1. A signal is forwarded and ends with `REQUEUE`.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from vlp.training.stop_requests import REQUEUE

    signal_names = ",".join(number.name for number in (*STOP_SIGNALS, signal.SIGQUIT))
    options = ["--standalone", "--nproc_per_node", str(ranks), "--signals_to_handle", signal_names]
    options += ["-m", "launch"]
    try:
        run.run(run.parse_args([*options, *arguments]))
    except SignalException:
        return REQUEUE
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code not in (REQUEUE, 2):
            print(f"error: {error}", file=sys.stderr)
        return code if code > 0 else 128 - code  # as shells name a process that a signal ended
    return 0


def _rank_count(ranks: int | None) -> int:
    """Return the number of processes to start; 1 in a rank that a launcher has started."""
    if "WORLD_SIZE" in os.environ:
        return 1
    if ranks is None:
        import torch

        return torch.cuda.device_count()
    return ranks


@contextmanager
def _config_errors() -> Iterator[None]:
    """Raise ConfigError, which is printed as one line, for input that cannot be used."""
    try:
        yield
    except (ValueError, OSError, YAMLError) as error:
        if reader_has_ended(error):
            raise
        raise ConfigError(str(error)) from error


app = new_app("Vision-language pretraining with the position embedding ACE-RPE.", completion=True)


def _version(value: bool) -> None:
    if value:
        import vlp

        print(f"vlp {vlp.__version__}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="print it and exit")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        Option(
            metavar="MODULE",
            help="Python file or module that registers encodings or tasks of your own; repeat the "
            "option for more",
        ),
    ] = None,
) -> None:
    """Vision-language pretraining with the position embedding ACE-RPE."""
    load_plugins(plugin or ())  # also those of VLP_PLUGINS


def _add(group: str, *functions: Callable[..., int]) -> None:
    for function in functions:
        app.command(cls=Command, rich_help_panel=group)(function)


_add(START_HERE, demo, train)
app.command(cls=FinetuneCommand, rich_help_panel=START_HERE)(finetune)
app.add_typer(measure.app, name="evaluate", rich_help_panel=START_HERE)
# Other packages have `embed` at the top level; `vlp evaluate` lists it.
app.command(cls=EvaluationCommand, hidden=True)(predictions.embed)
app.add_typer(reports.app)
_add(MODELS, align, convert_albef, export, info)
app.add_typer(plans.app)
app.add_typer(config_app, name="config")
app.add_typer(positions.app)
app.add_typer(ablations.app)


def commands() -> TyperGroup:
    """Return all commands; `vlp data` loads its commands when they run."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    group.add_command(data_commands)
    return group


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: wrong input, 130: interrupted)."""
    return run_app(commands(), "vlp", arguments)


def run_script(command: str, arguments: Sequence[str] | None = None) -> int:
    """Run `vlp train` or `vlp finetune` as one rank, by a script's arguments (None: sys.argv)."""
    return main([command, *(sys.argv[1:] if arguments is None else arguments), "--ranks", "1"])
