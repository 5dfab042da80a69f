"""Options and reports that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from vlp.command_line import Command, positive
from vlp.config import Precision

if TYPE_CHECKING:
    from vlp.models.folder import Loaded


def usable_device(name: str) -> str:
    """Return the name of a device that works here."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"{name!r} is no device; cpu or cuda is one") from error
    # A name may be valid while its driver or card is missing: only a tensor shows it.
    try:
        torch.empty(1, device=device)
    # A build without CUDA says so by an AssertionError.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"{name!r} cannot be used here: {reason}") from error
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
Images = Annotated[list[str] | None, Option("--image", metavar="FILE...", help="image files")]


class EvaluationCommand(Command):
    """A command that the ranks of torchrun share; wrong input ends with one line."""

    implied_values = {"--match": "5"}  # noqa: RUF012

    def invoke(self, ctx: Any) -> int:
        """Run the command; returns the exit code (2: wrong input, 1: a disk or a rank failed)."""
        import logging
        import os
        import sys

        from evaluation.samples import EvaluationError
        from vlp import distributed
        from vlp.config import ConfigError
        from vlp.io import redact

        logging.basicConfig(level=logging.WARNING)
        # The environment's rank, as errors may come before the process group.
        rank = os.environ.get("RANK", "0")
        try:
            with distributed.process_group():
                return super().invoke(ctx) or 0
        except (ConfigError, EvaluationError, FileNotFoundError, typer.BadParameter) as error:
            if rank == "0":
                print(f"error: {redact(str(error))}", file=sys.stderr)
            return 2
        except (OSError, RuntimeError) as error:
            message = redact(str(error))
            if distributed.is_lost_peer(error):
                message = "lost another rank; that one's message says why"
            # Any other RuntimeError is a defect, whose traceback is needed.
            elif isinstance(error, RuntimeError):
                raise
            print(f"error on rank {rank}: {message}", file=sys.stderr)
            return 1


def load_model(model: str) -> Loaded:
    """Load a model folder."""
    import vlp

    return checked(lambda: vlp.load(model))


def checked(work: Callable[[], Any]) -> Any:
    """Call a function; a ValueError becomes one line for the person at the terminal."""
    from evaluation.samples import single_line_errors

    with single_line_errors():
        return work()


def first_rank() -> bool:
    """Return True on the rank that prints and writes."""
    from vlp import distributed

    return distributed.rank() == 0


def require_single_process(message: str) -> None:
    """Refuse to run under torchrun."""
    from vlp import distributed

    if distributed.world_size() > 1:
        raise typer.BadParameter(message)
