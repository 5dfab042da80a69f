"""Fine-tune on a downstream task, validated by the same benchmark's evaluation.

    vlp finetune vqa --config configs/finetune/vqa_v2.yaml --from runs/base/model
    accelerate launch launch/finetune.py vqa --config FILE --from DIR KEY.SUB=VALUE

`deepspeed` and `torchrun` start the script as well; one process needs no launcher.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evaluation.downstream.task_evaluation import evaluate_task
from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError, workers_for
from vlp import distributed
from vlp.config import ConfigError
from vlp.precision import NotFiniteError
from vlp.tasks.caption.metrics import CaptionToolError
from vlp.tasks.downstream.registry import get_task
from vlp.tasks.downstream.task import Downstream, has_task, start_parts
from vlp.tasks.retrieval.task import PairsTask
from vlp.tasks.teacher import Distilled
from vlp.training.checkpoints import BestCheckpoint, Parameters
from vlp.training.command import run_training
from vlp.training.config import FinetuneConfig
from vlp.training.engines.deepspeed import shards_parameters

# Samples of the validation's trial before the training.
_TRIAL_SAMPLES = 16


def run_finetuning(
    path: Path, task: str, overrides: Sequence[str] = (), resume: bool = False
) -> int:
    """Run one rank of a fine-tuning; returns the exit code (see `vlp.training.command`).

    `task` is the configuration's `task.kind` or its start: "nlvr2" includes nlvr2_assignment.
    """

    def build(settings: FinetuneConfig) -> tuple[Any, Any]:
        if not f"{settings.task.kind}_".startswith(f"{task}_"):
            raise ConfigError(
                f"task.kind {settings.task.kind} is not what this command trains ({task})"
            )
        return build_task(settings)

    return run_training(path, FinetuneConfig, overrides, resume, build, build_validation)


def build_task(config: FinetuneConfig) -> tuple[Downstream | PairsTask, Any]:
    """Build the task of a configuration and its training data."""
    training = config.training
    # Every rank, and every start of the same configuration, begins with the same weights.
    torch.manual_seed(training.seed)
    parts, report = start_parts(config.init_from, config.model)
    if distributed.rank() == 0:
        print(report, flush=True)
    task, data = get_task(config.task.kind).build(
        config.task, parts, training.batch, training.seed, training.precision
    )
    if isinstance(task, Downstream):
        try:
            has_head = task.load_head(parts)
        except ValueError as error:
            raise ConfigError(f"init_from: {error}") from error
        if parts.folder and has_task(parts.folder) and distributed.rank() == 0:
            message = "is loaded" if has_head else "does not fit this task: a new head is used"
            print(f"{config.init_from}: its head {message}", flush=True)
    if isinstance(task, Distilled):
        task.start_teacher(training.count_steps(data.batches_in_epoch(0)))
    if isinstance(task, PairsTask):
        task.log_every = training.log_every
    return task, data


def build_validation(
    config: FinetuneConfig, task: Downstream | PairsTask, data: Any
) -> BestCheckpoint | None:
    """Return the validation of a fine-tuning; None without validation data.

    A trial on a few samples raises its errors before the training.
    """
    folders, full_limit = config.task.data.validation, config.task.data.validation_limit
    training = config.training
    if not folders:
        for key in ("patience", "evaluate_every", "metric"):
            if getattr(training, key) is not None:
                raise ConfigError(f"training.{key} needs task.data.validation")
        return None

    metric = training.metric or task.metric
    # With ZeRO-3 a rank holds a part of the parameters: validate a copy with all of them.
    full_task = _copy(task) if shards_parameters(training) else None

    def validate(
        parameters: Parameters = task.state_dict, limit: int | None = full_limit
    ) -> Mapping[str, float]:
        if full_task is not None:
            full_task.load_state_dict(task.state_dict() | parameters())
        device = next((full_task or task).parameters()).device
        options = EvalOptions(
            limit=limit,
            device=device,
            precision=training.precision,
            workers=min(config.task.data.workers, workers_for(device, None)),
            resamples=1,
        )
        try:
            return evaluate_task(full_task or task, folders, options).metrics
        except EvaluationError as error:
            if not isinstance(error.__cause__, NotFiniteError):
                raise
            # The training goes on, as after a loss that is not finite; NaN is never the best.
            return {metric: math.nan}

    every = training.evaluate_every or training.count_steps(data.batches_in_epoch(0))
    validation_data = json.dumps([list(map(str, folders)), full_limit])
    best = BestCheckpoint(validate, metric, every, training.patience, validation_data)
    trial_limit = _TRIAL_SAMPLES if full_limit is None else min(full_limit, _TRIAL_SAMPLES)
    try:
        try:
            best.require_metric(validate(limit=trial_limit))
        except (ConfigError, EvaluationError):
            best.require_metric(validate())  # the first samples may lack annotations
    except (EvaluationError, CaptionToolError) as error:
        raise ConfigError(f"task.data.validation: {error}") from error
    return best


def _copy(task: Downstream | PairsTask) -> Downstream | PairsTask:
    """Return a copy on this rank's device, without the teacher."""
    duplicate = copy.deepcopy(task).to(distributed.default_device())
    if isinstance(duplicate, Distilled | PairsTask):
        duplicate.teacher = None
    return duplicate


if __name__ == "__main__":
    from launch.cli.main import run_script

    sys.exit(run_script("finetune"))
