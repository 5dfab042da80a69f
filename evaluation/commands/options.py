"""Options and reports that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from vlp.command_line import Command, positive
from vlp.config import Precision

if TYPE_CHECKING:
    from evaluation.results import Result
    from vlp.models.folder import Loaded


def usable_device(name: str) -> str:
    """Return a device's name, once a tensor was made on it."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"{name!r} is no device; cpu or cuda is one") from error
    try:
        torch.empty(1, device=device)
    # A build without CUDA says so by an AssertionError.
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise typer.BadParameter(f"{name!r} cannot be used here: {why}") from error
    return name


Model = Annotated[str, Option(metavar="DIR", help="model folder or hub name")]
Device = Annotated[
    str | None,
    Option(parser=usable_device, metavar="NAME", help="default: this rank's GPU, or the CPU"),
]
Shards = Annotated[list[str] | None, Option(metavar="DIR...", help="shard folders")]
Limit = Annotated[int | None, Option(parser=positive, metavar="N", help="only the first N samples")]
Batch = Annotated[int, Option(parser=positive, metavar="N", help="items of one encoder call")]
InferencePrecision = Annotated[
    Precision | None, Option(help="default: bf16 on a GPU, float32 elsewhere")
]
Workers = Annotated[
    int | None,
    Option(
        min=0,
        metavar="N",
        help="processes that read and prepare images; default: on a GPU the cores of this rank up "
        "to 8, on a CPU none",
    ),
]
View = Annotated[
    Literal["image", "shuffled", "blank"],
    Option(help="the images, their patches in random order, or blank images"),
]
Images = Annotated[list[str] | None, Option("--image", metavar="FILE...", help="image files")]


class EvaluationCommand(Command):
    """A command whose work the ranks of torchrun share; wrong input ends with one line."""

    left_out = {"--match": "5"}  # noqa: RUF012

    def invoke(self, ctx: Any) -> int:
        """Run the command; returns the exit code (2: wrong input, 1: a disk or a rank failed)."""
        import logging
        import os
        import sys

        from evaluation.samples import EvaluationError
        from vlp import distributed
        from vlp.config import ConfigError
        from vlp.io import redacted

        logging.basicConfig(level=logging.WARNING)
        rank = os.environ.get("RANK", "0")
        try:
            with distributed.process_group():
                return super().invoke(ctx) or 0
        except (ConfigError, EvaluationError, FileNotFoundError, typer.BadParameter) as error:
            if rank == "0":
                print(f"error: {redacted(str(error))}", file=sys.stderr)
            return 2
        except (OSError, RuntimeError) as error:
            said = redacted(str(error))
            if distributed.lost_peer(error):
                said = "lost another rank; that one's message says why"
            elif isinstance(error, RuntimeError):
                raise
            print(f"error on rank {rank}: {said}", file=sys.stderr)
            return 1


_SHARED = ("limit", "batch", "device", "precision", "workers")


def measurement(items: str = "samples") -> Callable[[Callable[..., Result]], Any]:
    """Make a command of a measurement over shards: it prints the table and saves the result.

    The decorated function takes `model`, its own options and `**measured`: `shards`, and the shared
    ones as `options`.

    Args:
        items: plural of what --limit and --batch count.
    """

    def declare(measure: Callable[..., Result]) -> Callable[..., None]:
        def command(model: str, out: Path | None, **options: Any) -> None:
            from evaluation.options import EvalOptions

            given = EvalOptions(progress=True, **{name: options.pop(name) for name in _SHARED})
            report(measure(model, options=given, **options), model, out)

        shared: dict[str, tuple[Any, Any]] = {
            "model": (Model, ...),
            "shards": (Annotated[list[str], Option(metavar="DIR...", help="shard folders")], ...),
            "limit": (_count(int | None, f"only the first N {items}"), None),
            "batch": (_count(int, f"{items} of one encoder call"), 64),
            "precision": (InferencePrecision, None),
            "workers": (Workers, None),
            "device": (Device, None),
            "out": (
                Annotated[
                    Path | None,
                    Option(
                        metavar="DIR",
                        help="for JSON and Markdown; default MODEL/evaluation, of a run's model "
                        "RUN/evaluation/model, of a hub name evaluation/OWNER--NAME",
                    ),
                ],
                None,
            ),
        }
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=annotation,
                default=inspect.Parameter.empty if default is ... else default,
            )
            for name, (annotation, default) in shared.items()
        ]
        for own in inspect.signature(measure, eval_str=True).parameters.values():
            if own.name != "model" and own.kind is not own.VAR_KEYWORD:
                parameters.append(own.replace(kind=own.KEYWORD_ONLY))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {}
        command.__name__, command.__doc__ = measure.__name__, measure.__doc__
        return command

    return declare


def _count(kind: Any, help: str) -> Any:
    return Annotated[kind, Option(parser=positive, metavar="N", help=help)]


def load_model(model: str) -> Loaded:
    """Load a model folder."""
    import vlp

    return checked(lambda: vlp.load(model))


def checked(work: Callable[[], Any]) -> Any:
    """Call a function; a ValueError becomes one line for the person at the terminal."""
    from evaluation.samples import said_in_one_line

    with said_in_one_line():
        return work()


def first_rank() -> bool:
    """Tell whether this process prints and writes."""
    from vlp import distributed

    return distributed.rank() == 0


def one_process(what: str) -> None:
    """Refuse to run under torchrun."""
    from vlp import distributed

    if distributed.world_size() > 1:
        raise typer.BadParameter(what)


def report(result: Result, model: str, out: Path | None) -> None:
    """Print and save a result, on the first rank."""
    from vlp.models.pretrained.local_copy import results_folder

    if first_rank():
        print(result.table().text())
        print(f"\nwritten to {result.save(out or results_folder(model))}")
