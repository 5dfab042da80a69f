"""Typer command lines: options of several values, one-line errors, the nearest command.

Commands import lazily, so that help and errors need no PyTorch.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from vlp.io import as_url, redact

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="changes to the configuration")
]

ImageTower = Annotated[
    str | None,
    typer.Option(
        "--image-tower", metavar="DIR", help="weights: a folder or hub name; sets their key"
    ),
]
TextTower = Annotated[
    str | None,
    typer.Option(
        "--text-tower", metavar="DIR", help="weights and tokenizer: sets their three keys"
    ),
]


def tower_overrides(image: str | None, text: str | None) -> list[str]:
    """Return the overrides that `--image-tower` and `--text-tower` stand for."""
    # Layers of the cross-modal encoder start from the text tower's.
    of_text = ("model.text.weights", "data.vocabulary", "model.cross.weights")
    changes = [f"{key}={text}" for key in of_text if text is not None]
    return changes if image is None else [f"model.image.weights={image}", *changes]


# a command without a heading is listed under `More`
START_HERE, MODELS = "Start here", "Use, show and convert models"

# How the help calls an argument that names a place.
_PLACES = ("DIR", "FILE", "FOLDER", "PLACE", "RUN")


def new_app(
    help: str | None = None, group: type[TyperGroup] | None = None, completion: bool = False
) -> typer.Typer:
    """Return an empty Typer application in plain text; its groups suggest the nearest command."""
    kind = group or Group
    return typer.Typer(cls=kind, help=help, add_completion=completion, rich_markup_mode=None)


def positive(text: str) -> int:
    """Parse a whole number from 1 up, or raise typer.BadParameter."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise typer.BadParameter(f"{text!r} is no whole number of at least 1")
    return number


def nearest(name: str, names: Sequence[str]) -> str:
    """Return a hint: the most similar known name, or all names."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {matches[0]}?" if matches else f"there are {', '.join(names)}"


def run_app(
    app: typer.Typer | TyperGroup, program: str, arguments: Sequence[str] | None = None
) -> int:
    """Run one command of `app`; return its exit code (2: wrong input, 130: interrupted).

    SystemExit from a command's own options (2) and its --help (0); typer returns 130 for Ctrl-C.
    """
    group = typer.main.get_command(app) if isinstance(app, typer.Typer) else app
    try:
        code = group.main(
            sys.argv[1:] if arguments is None else list(arguments), program, standalone_mode=False
        )
    except typer.TyperException as error:
        print(f"error: {_message(error)}", file=sys.stderr)
        return 2
    return int(code or 0)


class Command(TyperCommand):
    """A command with list options that take all following values: `--shards A B`."""

    implied_values: Mapping[str, str] = {}  # options without a value, and the value they mean

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as argparse does: wrong options and `--help` end the process."""
        try:
            return super().parse_args(ctx, self._repeat_list_options(args))
        except typer.Exit as end:
            raise SystemExit(end.exit_code) from None
        except typer.TyperException as error:
            print(f"{ctx.get_usage()}\nerror: {_message(error)}", file=sys.stderr)
            raise SystemExit(2) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless it names a URL."""
        _require_paths(ctx.params, {p.name for p in self.params if _is_path_option(p.metavar)})
        return super().invoke(ctx)

    def _repeat_list_options(self, args: Sequence[str]) -> list[str]:
        """Repeat a list option before each of its values, as typer reads it."""
        lists = {name for param in self.params if _is_list(param) for name in param.opts}
        spread: list[str] = []
        option: str | None = None
        for position, value in enumerate(args):
            if value.startswith("-"):
                option = value if value in lists else None
            elif option is not None and spread[-1] != option:
                spread.append(option)
            spread.append(value)
            following = args[position + 1] if position + 1 < len(args) else "-"
            if value in self.implied_values and following.startswith("-"):
                spread.append(self.implied_values[value])
        return spread


def _is_path_option(metavar: object) -> bool:
    return isinstance(metavar, str) and metavar.startswith(_PLACES)


def _require_paths(values: Mapping[str, Any], path_options: Container[str | None]) -> None:
    """Raise typer.BadParameter for a URL as a path; `path_options` are texts."""
    for name, value in values.items():
        for item in _as_sequence(value):
            if (name in path_options or isinstance(item, Path)) and (url := as_url(item)):
                raise typer.BadParameter(f"{url} is a URL; name a file or folder on a disk")


def _as_sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _is_list(param: Any) -> bool:
    return bool(getattr(param, "multiple", False))


class Group(TyperGroup):
    """Commands by name; without one their list is printed, and a typo gets the nearest name."""

    remedy = ""  # more advice on an unknown command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Typer does, but print the commands if there is no argument."""
        if not args and not ctx.resilient_parsing:  # as shells' completion parses
            print(ctx.get_help())
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands under their headings."""
        groups: dict[str, list[tuple[str, Any]]] = {}
        for name, command in self.commands.items():
            if not command.hidden:
                title = getattr(command, "rich_help_panel", None)
                groups.setdefault(title or "More", []).append((name, command))
        widest = max(len(name) for name in self.commands)
        room = formatter.width - 6 - widest
        for title in sorted(groups, key=(START_HERE, MODELS, "More").index):
            with formatter.section(title if len(groups) > 1 else "Commands"):
                formatter.write_dl(
                    [
                        (f"{name:{widest}}", command.get_short_help_str(room))
                        for name, command in groups[title]
                    ]
                )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command by its name."""
        name = args[0]
        if name not in self.commands and not ctx.resilient_parsing:
            groups = [
                f"{ctx.command_path} {path} {name}"
                for path, group in self.commands.items()
                if isinstance(group, TyperGroup) and name in group.commands
            ]
            names = [other for other, command in self.commands.items() if not command.hidden]
            hint = f"did you mean {groups[0]}?" if groups else nearest(name, names)
            raise typer.BadParameter(f"unknown command {name!r}; {hint}{self.remedy}")
        return super().resolve_command(ctx, args)


def _message(error: typer.TyperException) -> str:
    if isinstance(error, typer.BadParameter) and error.message:
        param = error.param
        message = error.message if param is None else f"{'/'.join(param.opts)}: {error.message}"
        return redact(message)
    return redact(error.format_message())
