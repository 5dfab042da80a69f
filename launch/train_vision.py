"""Train a vision-only model with any position encoding of vlp.positions.

`task.kind`: classification, detection, pixels (generation), grids (ARC), widgets (captions).

    deepspeed launch/train_vision.py --config configs/vision/cifar10_vit_small.yaml
    python launch/train_vision.py --config FILE training.steps=100            (one process)

The run's folder is the key `output`, with log and checkpoints as in pretraining. `--resume`
continues from its newest good checkpoint, on any number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vlp.training.command import run_training
from vlp.training.config import VisionConfig


def build(config: VisionConfig) -> tuple[Any, Any]:
    """Create the configured task, and its data."""
    from vlp.tasks.vision_only import build_task

    training = config.training
    # Every rank, and every start of the same configuration, begins with the same weights.
    torch.manual_seed(training.seed)
    return build_task(config.task, training.batch, training.seed, training.precision)


def run_vision(path: Path, overrides: Sequence[str] = (), resume: bool = False) -> int:
    """Run one rank of a vision training; returns the exit code (see `vlp.training.command`)."""
    return run_training(path, VisionConfig, overrides, resume, build)


if __name__ == "__main__":
    from launch.cli.main import run_script

    sys.exit(run_script("train"))
