"""The commands of `vlp`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer import Option
from typer.core import TyperGroup

from data_tools.__main__ import data_commands
from evaluation.commands import ablations, measure, positions, reports
from launch.cli import plan as plans
from launch.cli import train as launching
from launch.cli.info import config_app, info
from vlp.command_line import MODELS, START_HERE, Command, new_app, run_app

app = new_app("Vision-language pretraining with the position embedding ACE-RPE.")


def _version(asked: bool) -> None:
    if asked:
        import vlp

        print(f"vlp {vlp.__version__}")
        raise typer.Exit


@app.callback()
def before(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="print it and exit")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        Option(
            metavar="MODULE",
            help="Python file or module of your own encodings or tasks, as a model folder or "
            "configuration of yours needs it; once for each",
        ),
    ] = None,
) -> None:
    """Vision-language pretraining with the position embedding ACE-RPE."""
    if plugin:
        from vlp.config import ConfigError, load_plugins

        try:
            load_plugins(plugin)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error


def _add(group: str, *functions: Callable[..., int]) -> None:
    for function in functions:
        app.command(cls=Command, rich_help_panel=group)(function)


_add(START_HERE, launching.demo, launching.train, launching.finetune)
app.add_typer(measure.app, name="evaluate", rich_help_panel=START_HERE)
app.add_typer(reports.app)
_add(MODELS, launching.align, launching.convert_albef)
_add(MODELS, launching.export, info)
app.add_typer(plans.app)
app.add_typer(config_app, name="config")
app.add_typer(positions.app)
app.add_typer(ablations.app)


def commands() -> TyperGroup:
    """Return all commands; those of `vlp data` stay out until they run."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    data = data_commands()
    data.rich_help_panel = START_HERE
    group.add_command(data)
    return group


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: wrong input, 130: interrupted)."""
    return run_app(commands(), "vlp", arguments)


def run_script(command: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command of `vlp` with a script's arguments; returns the exit code.

    A script is one rank: its launcher starts the others.
    """
    ranks = ["--ranks", "1"] if command in ("train", "finetune") else []
    return main([command, *(sys.argv[1:] if arguments is None else arguments), *ranks])
