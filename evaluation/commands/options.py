"""Options and checks that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Option

from vlp.command_line import Command, positive, reader_has_ended, require_output
from vlp.config import Precision


def usable_device(name: str) -> str:
    """Return the name if the device works on this machine; else raise typer.BadParameter."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"{name!r} is not a device; write cpu or cuda") from error
    # Only an allocation shows a missing driver or GPU, in a build without CUDA by AssertionError.
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"{name!r} cannot be used here: {reason}") from error
    return name


def valid_text(text: str) -> str:
    """Return a text; typer.BadParameter if the terminal passed bytes that are not UTF-8."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise typer.BadParameter(f"{text!r} is not UTF-8")
    return text


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
    """A command that may run under torchrun; wrong input ends it with one line."""

    implied_values = {"--match": "5"}  # noqa: RUF012
    # Options for paths that are written, which are checked before any work.
    outputs = ("out", "markdown", "latex")

    def invoke(self, ctx: Any) -> int:
        """Run the command; return the exit code (2: wrong input, 1: a disk or a rank failed)."""
        import logging
        import os
        import sys

        from evaluation.samples import EvaluationError
        from vlp import distributed
        from vlp.config import ConfigError
        from vlp.data.shards.sample_files import DataError
        from vlp.io import redact

        logging.basicConfig(level=logging.WARNING)
        # From the environment, as errors may precede the process group.
        rank = os.environ.get("RANK", "0")
        try:
            for param in self.params:
                if param.name in self.outputs and (path := ctx.params.get(param.name)) is not None:
                    require_output(path, str(param.metavar).startswith("DIR"))
            with distributed.process_group():
                return super().invoke(ctx) or 0
        except (ConfigError, EvaluationError, FileNotFoundError, typer.BadParameter) as error:
            if rank == "0":
                print(f"error: {redact(str(error))}", file=sys.stderr)
            return 2
        except (OSError, RuntimeError) as error:
            if reader_has_ended(error):
                raise
            message = redact(str(error))
            if distributed.is_lost_peer(error):
                message = "lost another rank; see the message of that rank"
            elif isinstance(error, DataError):
                message = error.plain_message
            # Any other RuntimeError is a defect: show its traceback.
            elif isinstance(error, RuntimeError):
                raise
            print(f"error on rank {rank}: {message}", file=sys.stderr)
            return 1


def first_rank() -> bool:
    """Return True on the rank that prints and writes."""
    from vlp import distributed

    return distributed.rank() == 0


def require_single_process(message: str) -> None:
    """Refuse to run under torchrun."""
    from vlp import distributed

    if distributed.world_size() > 1:
        raise typer.BadParameter(message)
