"""Options and reports that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Protocol

import torch

import vlp
from evaluation.ranks import Ranks
from evaluation.report import Table
from evaluation.samples import EvaluationError
from vlp.models.folder import Loaded


class Result(Protocol):
    """What a measurement gives."""

    def table(self) -> Table:
        """For the person."""

    def save(self, folder: str | Path) -> Path:
        """For files."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Options of everything that needs a model."""
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder or hub name")
    parser.add_argument("--device", type=_device, help="default: this rank's GPU, or the CPU")


def _device(name: str) -> str:
    try:
        torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{name!r} is no device; cpu or cuda is one") from error
    return name


def load_model(options: argparse.Namespace) -> Loaded:
    """The model folder; one that is damaged or does not fit together is the user's to mend."""
    try:
        return vlp.load(options.model)
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error


def add_measured(parser: argparse.ArgumentParser) -> None:
    """Options of what is measured over whole shards and reported as a table."""
    parser.add_argument("--shards", required=True, nargs="+", metavar="DIR")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N samples")
    parser.add_argument("--batch", type=int, default=64, help="pictures of one encoder call")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for JSON and Markdown; default MODEL/evaluation"
    )


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_measured` as arguments of an evaluation."""
    names = ("shards", "limit", "batch", "device", "precision")
    return {"progress": True, **{name: getattr(options, name) for name in names}}


def report(result: Result, options: argparse.Namespace) -> None:
    """Print and write a result, on the first rank."""
    if not Ranks.current().first:
        return
    print(result.table().text())
    folder = options.out or Path(options.model) / "evaluation"
    print(f"\nwritten to {result.save(folder)}")


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
