"""Options and reports that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Protocol

import torch

import vlp
from evaluation.core.results import Table
from evaluation.core.samples import EvaluationError
from evaluation.core.work_sharding import Ranks
from vlp.models.folder import RESULTS, Loaded, is_local


class CommandResult(Protocol):
    """What a measurement gives."""

    def table(self) -> Table:
        """For the person."""

    def save(self, folder: str | Path) -> Path:
        """For files."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Options of everything that needs a model."""
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder or hub name")
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where to compute."""
    parser.add_argument("--device", type=_device, help="default: this rank's GPU, or the CPU")


def _device(name: str) -> str:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{name!r} is no device; cpu or cuda is one") from error
    try:
        torch.empty(1, device=device)
    # A build without CUDA says so by an AssertionError.
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{name!r} cannot be used here: {why}") from error
    return name


def positive(text: str) -> int:
    """A whole number from 1 up, as a type of argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number


def load_model(options: argparse.Namespace) -> Loaded:
    """The model folder; one that is damaged or does not fit together is the user's to mend."""
    try:
        return vlp.load(options.model)
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error


def add_measured(parser: argparse.ArgumentParser, items: str = "samples") -> None:
    """Options of what is measured over whole shards and reported as a table; --limit counts items.

    Args:
        parser: of the command.
        items: what is judged, in words.
    """
    parser.add_argument("--shards", required=True, nargs="+", metavar="DIR")
    parser.add_argument("--limit", type=positive, metavar="N", help=f"only the first N {items}")
    parser.add_argument("--batch", type=positive, default=64, help=f"{items} of one encoder call")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="for JSON and Markdown; default MODEL/evaluation, of a hub name OWNER/NAME "
        "evaluation/OWNER--NAME",
    )


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_measured` as arguments of an evaluation."""
    names = ("shards", "limit", "batch", "device", "precision")
    return {"progress": True, **{name: getattr(options, name) for name in names}}


def report(result: CommandResult, options: argparse.Namespace) -> None:
    """Print and write a result, on the first rank."""
    if not Ranks.current().first:
        return
    print(result.table().text())
    print(f"\nwritten to {result.save(options.out or results_folder(options.model))}")


def results_folder(model: str) -> Path:
    """Where results of a model lie: in its folder; of a hub name below the working directory."""
    return Path(model) / RESULTS if is_local(model) else Path(RESULTS) / model.replace("/", "--")


def add_compared(parser: argparse.ArgumentParser) -> None:
    """Options of what trains variants itself."""
    parser.add_argument("--config", required=True, type=Path, metavar="FILE")
    parser.add_argument(
        "--report", action="store_true", help="only the tables of what is there; train nothing"
    )
    parser.add_argument(
        "--only",
        type=lambda names: names.split(","),
        default=(),
        metavar="NAME,…",
        help="train these variants now; the tables show all that are there",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")


def one_process(what: str) -> None:
    """Refuse to run under torchrun.

    Raises:
        EvaluationError: there are several ranks.
    """
    if Ranks.current().world_size > 1:
        raise EvaluationError(what)
