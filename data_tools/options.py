"""Options that data tools share: types of parameters, and dataclasses with an option per field."""

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
MAX_WORDS = 256  # as CC12M's own filter


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Executor of a tool's jobs."""

    # Not `N`: modules of derived classes, where annotations are evaluated, may not import it.
    processes: Annotated[int, Option(metavar="N", help="of --executor local")] = os.cpu_count() or 1
    executor: Annotated[
        str, Option(metavar="WHERE", envvar="VLP_EXECUTOR", help="local, ray or ray://HOST:PORT")
    ] = "local"

    def workers(self) -> Executor:
        """Return the executor of these options."""
        local = Executor(self.processes)
        if self.executor == "ray" or self.executor.startswith("ray://"):
            return RayExecutor(None if self.executor == "ray" else self.executor)
        if self.executor != "local":
            raise ConfigError(f"--executor {self.executor}: use local, ray or ray://HOST:PORT")
        return local


@dataclass(frozen=True, kw_only=True)
class BuildOptions(WorkerOptions):
    """Options of all converters: how shards are built."""

    samples_per_shard: Annotated[int, N(help="samples in a tar, without missing images")] = 1000
    max_side: Annotated[
        int | None,
        Option(metavar="PIXELS", help="reduce larger images to this longest side, and their boxes"),
    ] = None
    quality: Annotated[int, Option(help="of JPEGs, where an image must be re-encoded")] = 90
    licence: Annotated[
        str | None,
        Option("--licence", "--license", help="in manifest.json (default: the data set's own)"),
    ] = None
    take_down: Annotated[
        Path | None,
        File(
            help="leave these samples out: one key, image id or URL a line; if the list changes, "
            "only shards with such samples are written again"
        ),
    ] = None
    retry: Annotated[bool, Option("--retry", help="try failed images again")] = False
    replace: Annotated[
        bool,
        Option(
            "--replace",
            help="build in a folder that holds other shards (default: an error), and delete those "
            "when the new ones are finished",
        ),
    ] = False

    def __post_init__(self) -> None:
        require_positive(
            samples_per_shard=self.samples_per_shard, quality=self.quality, max_side=self.max_side
        )
        if self.quality > 100:
            raise ConfigError(f"--quality {self.quality}: give at most 100")


def require_positive(**numbers: int | None) -> None:
    """Refuse numbers below 1, given by the name of their option."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {number}: give at least 1")


def command_of(function: Callable[..., int]) -> Callable[..., int]:
    """Return a function for typer, with the fields of dataclass parameters as parameters."""
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        group = parameter.annotation
        if is_dataclass(group) and isinstance(group, type):
            groups[name] = group
            parameters = [*inspect.signature(group, eval_str=True).parameters.values()]
        else:
            parameters = [parameter]
        options += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in parameters]

    def command(**values: Any) -> int:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return function(**values)

    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return command
