"""Options that many data tools share; a dataclass parameter stands for an option per field."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from data_tools.executor import Executor, RayExecutor
from vlp.config import ConfigError

N, File = partial(Option, metavar="N"), partial(Option, metavar="FILE")
Folders = Annotated[list[Path], Argument(metavar="FOLDER", help="folder of shards")]
Out = Annotated[Path, Option(metavar="DIR", help="folder to write into")]
Images = Annotated[
    list[Path],
    Option(metavar="PLACE", help="folders (two levels deep), tars (also compressed) or zips"),
]
Splits = Annotated[list[str] | None, Option(metavar="SPLIT", help="only these (default: all)")]
MaxWords = Annotated[int, N(help="drop captions of more words")]
# CC12M's own limit.
MAX_WORDS = 256


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Where the work is done, and by how many processes."""

    processes: Annotated[
        int, Option(metavar="N", help="shards that are worked on at the same time")
    ] = os.cpu_count() or 1
    executor: Annotated[
        str, Option(metavar="WHERE", envvar="VLP_EXECUTOR", help="local, ray or ray://HOST:PORT")
    ] = "local"

    def workers(self) -> Executor:
        """Return the executor that the command line asks for."""
        local = Executor(self.processes)
        if self.executor == "ray" or self.executor.startswith("ray://"):
            return RayExecutor(None if self.executor == "ray" else self.executor)
        if self.executor != "local":
            raise ConfigError(f"--executor {self.executor}: local, ray or ray://HOST:PORT")
        return local


@dataclass(frozen=True, kw_only=True)
class BuildOptions(WorkerOptions):
    """How shards are built, the same for all converters."""

    samples_per_shard: Annotated[
        int, N(help="at most so many samples whose images are there in one tar")
    ] = 1000
    max_side: Annotated[
        int | None,
        Option(metavar="PIXELS", help="reduce larger images to this longest side, and their boxes"),
    ] = None
    quality: Annotated[
        int, Option(help="of JPEG that must be written anew: turned, reduced or of another kind")
    ] = 90
    licence: Annotated[
        str | None,
        Option("--licence", "--license", help="in manifest.json (default: the data set's own)"),
    ] = None
    take_down: Annotated[
        Path | None,
        File(
            help="leave these samples out: one key, image id or URL a line; a longer list writes "
            "only the shards that held one anew"
        ),
    ] = None
    retry: Annotated[
        bool, Option("--retry", help="try images again that failed in an earlier run")
    ] = False
    replace: Annotated[
        bool,
        Option(
            "--replace",
            help="build anew in a folder that holds other shards (default: they are an error); "
            "those are deleted when the new ones are whole",
        ),
    ] = False

    def __post_init__(self) -> None:
        at_least_1(
            samples_per_shard=self.samples_per_shard, quality=self.quality, max_side=self.max_side
        )
        if self.quality > 100:
            raise ConfigError(f"--quality is {self.quality}, at most 100")


def at_least_1(**numbers: int | None) -> None:
    """Refuse options below 1, given by name."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {number}, at least 1")


def command_of(function: Callable[..., int]) -> Callable[..., int]:
    """Return a function for typer with the fields of dataclass parameters as options."""
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind = parameter.annotation
        if is_dataclass(kind) and isinstance(kind, type):
            groups[name] = kind
            parameters = inspect.signature(kind, eval_str=True).parameters.values()
        else:
            parameters = (parameter,)  # type: ignore[assignment]
        options += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in parameters]

    def command(**values: Any) -> int:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return function(**values)

    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return command
