"""`python -m benchmarks COMMAND ...`: all benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from benchmarks import albef, encodings, flops, gpu, loader, rerank, scale, step
from vlp.config import ConfigError

app = typer.Typer(
    help="Time this project beside its peers; each command prints a table and lines of JSON.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)
for module in (step, albef, loader, rerank, encodings, flops, scale, gpu):
    for command in module.COMMANDS:
        app.command(command.__name__.replace("_", "-"), help=command.__doc__)(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code (2: wrong input)."""
    try:
        app(arguments, "python -m benchmarks")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
