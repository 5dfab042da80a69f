"""Train a vision-only model with any position encoding of vlp.positions.

`task.kind`: classification, detection, pixels (generation), grids (ARC), widgets (captions).

    deepspeed launch/train_vision.py --config configs/vision/cifar10_vit_small.yaml
    python launch/train_vision.py --config FILE training.steps=100            (one process)

The run's folder is the key `output`; log and checkpoints are those of pretraining. `--resume` goes
on from its newest good checkpoint, on any number of ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from vlp.training.command import run_training
from vlp.training.vision_config import VisionConfig


def build(config: VisionConfig) -> tuple[Any, Any]:
    """The task of the configuration's kind, and its data."""
    from vlp.tasks.vision import build_task

    training = config.training
    # Every rank, and every start of the same configuration, begins with the same weights.
    torch.manual_seed(training.seed)
    return build_task(config.task, training.batch, training.seed, training.precision)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one rank; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    chosen = parser.parse_args(arguments)
    return run_training(chosen.config, VisionConfig, chosen.overrides, chosen.resume, build)


if __name__ == "__main__":
    sys.exit(main())
