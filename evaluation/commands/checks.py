"""`vlp check`: does this machine do what was promised."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

from typer import Option

from vlp.process.command_line import Command, new_app

app = new_app("Check what this machine does against what was promised.")


@app.callback()
def _group() -> None:
    pass


@app.command(cls=Command)
def gpu(
    out: Annotated[Path, Option(metavar="DIR", help="folder of the results")],
    config: Annotated[
        Path | None,
        Option(metavar="FILE", help="pretraining that is timed (default: configs/pretrain/base)"),
    ] = None,
    dry: Annotated[
        bool, Option("--dry", help="go through all parts on the CPU at tiny sizes")
    ] = False,
    only: Annotated[
        str, Option(metavar="PREFIX", help="run the parts whose name starts so: A, B, C, D")
    ] = "",
) -> int:
    """Check correctness and speed on this machine's GPUs, in eight minutes.

    OUT gets check.md, a table of promised and measured figures, figures.jsonl, profiler traces,
    and a log of each part. The exit code is 1 where a part fails or a result is wrong, and 2
    without a GPU; a figure of speed below its promise is no failure.

    \b
      vlp check gpu --out runs/check_gpu
    """
    from evaluation.benchmarks.gpu.check import run_check
    from vlp.config import ConfigError

    base = Path(str(resources.files("configs"))) / "pretrain" / "base.yaml"
    try:
        return run_check(config or base, out, dry, only)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
