"""`vlp export`: a model folder for programs that have no `vlp`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Option


class ExportFormat(StrEnum):
    """Forms that a model is exported in."""

    onnx = "onnx"
    torch = "torch"


def export(
    model: Annotated[str, Option(metavar="DIR", help="model folder or hub name")],
    out: Annotated[Path, Option(metavar="DIR", help="folder of the exported files")],
    format: Annotated[
        ExportFormat, Option(help="onnx, or torch: programs that torch.export.load reads")
    ] = ExportFormat.onnx,
    revision: Annotated[
        str | None, Option(metavar="NAME", help="branch, tag or commit on the hub")
    ] = None,
) -> int:
    """Export image tower, text tower and ITM head to ONNX or torch.export.

    Batches are of any size. Tokenizer and preparation of images are written beside the programs.

    \b
      vlp export --model runs/demo/run/model --out exported
    """
    import vlp
    from vlp.config import ConfigError
    from vlp.serving.export import export_model
    from vlp.tasks.downstream.task import has_task

    try:
        loaded = vlp.load(model, revision=revision)
        if loaded.folder is not None and has_task(loaded.folder):
            print(
                f"{model} was fine-tuned for a task, whose head is not exported; `match` is what "
                "it was before",
                file=sys.stderr,
            )
        files = export_model(loaded, out, format.value)
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for file in files:
        print(f"{file}  {file.stat().st_size / 2**20:.1f} MiB")
    return 0
