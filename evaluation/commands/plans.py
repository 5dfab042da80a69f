"""`vlp plan`: what a pretraining will need, before it starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from vlp.process.command_line import Command, Overrides, new_app, positive

app = new_app()


@app.command(cls=Command)
def plan(
    config: Annotated[Path, Option(metavar="FILE", help="a pretraining of configs/pretrain")],
    gpus: Annotated[int, Option(parser=positive, metavar="N", help="GPUs of the run")],
    gpus_per_node: Annotated[int, Option(parser=positive, metavar="N", help="GPUs of a node")] = 8,
    gpu: Annotated[str, Option(metavar="NAME", help="H100, H200 or A100")] = "H100",
    pairs: Annotated[
        int | None,
        Option(
            parser=positive,
            metavar="N",
            help="pairs of an epoch (default: as the shards say, if they are here)",
        ),
    ] = None,
    json: Annotated[Path | None, Option(metavar="FILE", help="write all figures as JSON")] = None,
    overrides: Overrides = None,
) -> int:
    """Predict ranks, memory, time and communication of a pretraining.

    No GPU and no data are needed. The exit code is 0 where the run can start and surely fits, and
    2 where it cannot; then the output says what to change.

    \b
      vlp plan --config configs/pretrain/base_256.yaml --gpus 256
    """
    from evaluation.benchmarks.planning.report import run_plan
    from vlp.config import ConfigError

    try:
        return run_plan(config, gpus, gpus_per_node, gpu, list(overrides or ()), pairs, json)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
