"""Pretrain an image-text model.

    vlp train --config configs/pretrain/base.yaml                         (all GPUs of a machine)
    deepspeed launch/pretrain.py --config configs/pretrain/base.yaml      (the same)
    deepspeed --hostfile hosts launch/pretrain.py --config FILE           (several machines)
    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 launch/pretrain.py --config FILE
    python launch/pretrain.py --config FILE training.steps=100            (one process)

The run's folder is the key `output`. `--resume` goes on from its newest good checkpoint, on any
number of ranks. Exit code 75: stopped by a signal or with its launcher, to be resumed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vlp import distributed
from vlp.training.command import run_training
from vlp.training.config import PretrainConfig


def build(config: PretrainConfig) -> tuple[Any, Any]:
    """The pretraining task and its data."""
    from vlp.data.pretrain.loader import PretrainData
    from vlp.models.tower_key import require_frozen_tower
    from vlp.tasks.pretraining import Pretraining

    training = config.training
    config.require_world_size(distributed.world_size())
    data = PretrainData(config.data, config.inputs, training.batch, training.seed)
    # Every rank, and every start of the same configuration, begins with the same weights.
    torch.manual_seed(training.seed)
    task = Pretraining(
        config.model,
        config.objectives,
        config.data.vocabulary,
        training.precision,
        training.log_every,
        config.init_from,
        grad_cache=training.grad_cache,
    )
    require_frozen_tower(data.features, task.model)
    for start in filter(None, (config.model.text.weights, config.init_from)):
        data.text.require_words_of(start)
    if distributed.rank() == 0:
        for report in task.weight_reports:
            print(report, flush=True)
    return task, data


def run_pretraining(config: Path, overrides: Sequence[str] = (), resume: bool = False) -> int:
    """Run one rank of a pretraining; returns the exit code (see `vlp.training.command`).

    Args:
        config: the configuration file.
        overrides: `key.sub=value` of the command line.
        resume: go on from the newest good checkpoint.
    """
    from launch.validation import select

    return run_training(config, PretrainConfig, overrides, resume, build, select)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vlp train` as one rank; returns the exit code."""
    from launch.__main__ import run_script

    return run_script("train", arguments)


if __name__ == "__main__":
    sys.exit(main())
