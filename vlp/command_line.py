"""Typer command lines: options of several values, one-line errors, the nearest command.

Commands import lazily, so that help and errors need no PyTorch.
"""

from __future__ import annotations

import difflib
import io
import os
import select
import sys
import warnings
from collections.abc import Container, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from vlp.config import ConfigError
from vlp.io import as_url, redact

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="changes to the configuration")
]

ImageTower = Annotated[
    str | None,
    typer.Option(
        "--image-tower", metavar="DIR", help="weights, a folder or hub name: model.image.weights"
    ),
]
TextTower = Annotated[
    str | None,
    typer.Option(
        "--text-tower",
        metavar="DIR",
        help="weights and tokenizer: model.text.weights, model.cross.weights, data.vocabulary",
    ),
]


def tower_overrides(image: str | None, text: str | None) -> list[str]:
    """Return the configuration overrides for `--image-tower` and `--text-tower`."""
    # The cross-modal encoder starts from layers of the text tower.
    text_keys = ("model.text.weights", "data.vocabulary", "model.cross.weights")
    overrides = [f"{key}={text}" for key in text_keys if text is not None]
    return overrides if image is None else [f"model.image.weights={image}", *overrides]


# Headings in the list of commands; a command without a heading is listed under `More`.
START_HERE, MODELS = "Start here", "Use, show and convert models"

# First words of the metavars of options that take a path.
_PATH_METAVARS = ("DIR", "FILE", "FOLDER", "PLACE", "RUN")


def new_app(
    help: str | None = None, group: type[TyperGroup] | None = None, completion: bool = False
) -> typer.Typer:
    """Return an empty Typer application in plain text; its groups suggest the nearest command."""
    return typer.Typer(
        cls=group or Group, help=help, add_completion=completion, rich_markup_mode=None
    )


def positive(text: str) -> int:
    """Parse an integer of at least 1; typer.BadParameter for other texts."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise typer.BadParameter(f"{text!r} is not an integer of at least 1")
    return number


def nearest(name: str, names: Sequence[str]) -> str:
    """Return a hint for a mistyped name: the most similar of `names`, or all of them."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {matches[0]}?" if matches else f"there are {', '.join(names)}"


def run_app(
    app: typer.Typer | TyperGroup, program: str, arguments: Sequence[str] | None = None
) -> int:
    """Run one command of `app`; return its exit code (2: wrong input, 130: Ctrl-C).

    Wrong options of a command (2) and its --help (0) raise SystemExit.
    """
    _open_standard_streams()
    if not sys.warnoptions:  # libraries warn of calls that the user did not make
        warnings.simplefilter("ignore", FutureWarning)
    warnings.showwarning = lambda message, *_, **__: _print_warning(str(message))
    group = typer.main.get_command(app) if isinstance(app, typer.Typer) else app
    try:
        code = group.main(
            sys.argv[1:] if arguments is None else list(arguments), program, standalone_mode=False
        )
    except (ConfigError, typer.TyperException) as error:
        print(f"error: {_message(error)}", file=sys.stderr)
        return 2
    return int(code or 0)


def reader_has_ended(error: Exception) -> bool:
    """Return whether an error is of `| head`, which Typer ends without a message."""
    if not isinstance(error, BrokenPipeError):
        return False
    # It may be of another pipe, as to Java.
    poller = select.poll()
    poller.register(1, 0)
    return bool(poller.poll(0))  # POLLERR or POLLHUP


@cache
def _print_warning(text: str) -> None:
    """Print a warning as one line, without its location, and each text only once."""
    print(f"warning: {text}", file=sys.stderr)


def _open_standard_streams() -> None:
    """Open closed standard streams on the null device; let stdout escape what it cannot encode."""
    # Some daemons start commands without any stream.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # else the next file would get the number, and messages as its content
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)  # dup2 does nothing to the number itself
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    stdout = sys.stdout
    # A terminal without UTF-8 cannot show all captions. Python's UTF-8 mode needs no escapes, and
    # writes file names of any bytes unchanged.
    utf8_mode = ("utf-8", "surrogateescape")
    if isinstance(stdout, io.TextIOWrapper) and (stdout.encoding, stdout.errors) != utf8_mode:
        stdout.reconfigure(errors="backslashreplace")


class Command(TyperCommand):
    """A command with list options that take all following values: `--shards A B`."""

    implied_values: Mapping[str, str] = {}  # value of an option that is given without any

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
        """Run the command; a URL in place of a path is an error."""
        path_options = {p.name for p in self.params if str(p.metavar).startswith(_PATH_METAVARS)}
        _require_paths(ctx.params, path_options)
        return super().invoke(ctx)

    def _repeat_list_options(self, args: Sequence[str]) -> list[str]:
        """Repeat a list option before each of its values, as typer reads it; add implied values."""
        list_params = [param for param in self.params if getattr(param, "multiple", False)]
        list_options = {name for param in list_params for name in param.opts}
        result: list[str] = []
        option: str | None = None
        # "-": after the last argument as before an option.
        for value, following in zip(args, [*args[1:], "-"]):
            if value.startswith("-"):
                option = value if value in list_options else None
            elif option is not None and result[-1] != option:
                result.append(option)
            result.append(value)
            if value in self.implied_values and following.startswith("-"):
                result.append(self.implied_values[value])
        return result


def require_output(path: Path, is_folder: bool) -> None:
    """Raise typer.BadParameter if a file, or a folder of files, cannot be written at `path`."""
    if os.path.exists(path) and os.path.isdir(path) != is_folder:
        kind, other = ("file", "folder") if is_folder else ("folder", "file")
        raise typer.BadParameter(f"{path} is a {kind}; name a {other} to write")
    folders = (path, *path.parents) if is_folder else path.absolute().parents
    nearest_path = next((parent for parent in folders if os.path.exists(parent)), Path())
    if not os.path.isdir(nearest_path) or not os.access(nearest_path, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: {nearest_path} is no writable folder")


def _require_paths(values: Mapping[str, Any], path_options: Container[str | None]) -> None:
    """Raise typer.BadParameter for a URL as a `Path`, or as a text option of `path_options`."""
    for name, value in values.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if (name in path_options or isinstance(item, Path)) and (url := as_url(item)):
                raise typer.BadParameter(f"{url} is a URL; name a file or folder on a disk")


class Group(TyperGroup):
    """Commands by name; prints their list if no command is named, suggests one for a typo."""

    remedy = ""  # further advice in the error of an unknown command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Typer does, but print the commands if there is no argument."""
        if not args and not ctx.resilient_parsing:  # shell completion parses resiliently
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
        help_width = formatter.width - 6 - widest  # 6: indentation and space between columns
        for title in sorted(groups, key=(START_HERE, MODELS, "More").index):
            with formatter.section(title if len(groups) > 1 else "Commands"):
                formatter.write_dl(
                    [
                        (f"{name:{widest}}", command.get_short_help_str(help_width))
                        for name, command in groups[title]
                    ]
                )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return Typer's (name, command, arguments); suggest a command for an unknown name."""
        name = args[0]
        if name not in self.commands and not ctx.resilient_parsing:
            suggestions = [
                f"{ctx.command_path} {path} {name}"
                for path, group in self.commands.items()
                if isinstance(group, TyperGroup) and name in group.commands
            ]
            names = [other for other, command in self.commands.items() if not command.hidden]
            hint = f"did you mean {suggestions[0]}?" if suggestions else nearest(name, names)
            raise typer.BadParameter(f"unknown command {name!r}; {hint}{self.remedy}")
        return super().resolve_command(ctx, args)


def _message(error: Exception) -> str:
    if isinstance(error, typer.BadParameter) and error.message:
        options = "" if error.param is None else f"{'/'.join(error.param.opts)}: "
        return redact(f"{options}{error.message}")
    return redact(error.format_message() if isinstance(error, typer.TyperException) else str(error))
