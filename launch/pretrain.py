"""Pretrain an image-text model.

    vlp train --config configs/pretrain/base.yaml                         (all GPUs of a machine)
    deepspeed launch/pretrain.py --config configs/pretrain/base.yaml      (the same)
    deepspeed --hostfile hosts launch/pretrain.py --config FILE           (several machines)
    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 launch/pretrain.py --config FILE
    python launch/pretrain.py --config FILE training.steps=100            (one process)

The run's folder is the key `output`. `--resume` continues from its newest intact checkpoint, on any
number of ranks. Exit code 75: stopped by a signal, or because its launcher ended; `--resume`
continues.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from evaluation.options import EvalOptions
from evaluation.retrieval.retrieval import DIRECTIONS, evaluate_retrieval
from evaluation.samples import EvaluationError, workers_for
from evaluation.work_sharding import evaluating
from vlp import distributed
from vlp.config import ConfigError
from vlp.data.config import AugmentConfig, SourceConfig
from vlp.data.features.store import StoredFeatures
from vlp.data.pretrain import PretrainData
from vlp.data.shards.shard_reader import ShardIndex
from vlp.metrics import RECALL_AT
from vlp.models.folder import Loaded, require_frozen_tower
from vlp.models.towers import require_padding
from vlp.tasks.pretraining import Pretraining
from vlp.tasks.task import strip_prefix
from vlp.training.checkpoints import BestCheckpoint, Parameters
from vlp.training.command import run_training
from vlp.training.config import PretrainConfig, ValidationConfig
from vlp.training.engines.deepspeed import shards_parameters


def build(config: PretrainConfig) -> tuple[Any, Any]:
    """Build the pretraining task and its data."""
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
    require_padding(task.model.text_encoder.tower, data.tokenizer.pad_id)
    for weights in filter(None, (config.model.text.weights, config.init_from)):
        data.tokenizer.require_same_ids(weights)
    if distributed.rank() == 0:
        for report in task.weight_reports:
            print(report, flush=True)
    return task, data


def run_pretraining(path: Path, overrides: Sequence[str] = (), resume: bool = False) -> int:
    """Run one rank of a pretraining; returns the exit code (see `vlp.training.command`)."""
    return run_training(path, PretrainConfig, overrides, resume, build, build_validation)


# Samples of the validation's trial before the training.
_TRIAL_SAMPLES = 16
# A validation computes recalls on the first samples, as many as Flickr30k's and COCO 1K's test sets
# have, and losses on the first global batches.
_RECALL_SAMPLES, _LOSS_BATCHES = 1000, 4


def build_validation(
    config: PretrainConfig, task: Pretraining, data: PretrainData
) -> BestCheckpoint | None:
    """Return the validation of a pretraining; None without validation data.

    Its metrics are `mean` (of all recalls, after re-ranking if enabled), each recall, and
    `loss/total` with its parts. A trial on a few samples raises its errors before the training.
    """
    validation, training = config.validation, config.training
    if validation is None:
        return None
    with distributed.raise_on_all_ranks(ConfigError):
        losses = ValidationLosses(config, validation, task)
        samples = sum(ShardIndex.open(folder).shards.total for folder in validation.shards)
        if validation.features is not None:
            StoredFeatures(validation.features)
    if samples == 1 and distributed.rank() == 0:
        message = "warning: validation.shards hold one image: its recall is always 100 %"
        print(message, file=sys.stderr)
    task.to(distributed.default_device())
    # With ZeRO-3 a rank holds a part of the parameters: validate a copy with all of them.
    full_model = copy.deepcopy(task.model) if shards_parameters(training) else None
    loaded = Loaded(full_model or task.model, data.tokenizer, data.preprocessing)

    def validate(
        parameters: Parameters, limit: int = _RECALL_SAMPLES, batches: int = _LOSS_BATCHES
    ) -> Metrics:
        if full_model is not None:
            full_model.load_state_dict(strip_prefix(task.state_dict() | parameters(), "model."))
        return recalls(loaded, validation, limit, config) | losses(batches)

    every = training.evaluate_every or training.count_steps(data.batches_in_epoch(0))
    best = BestCheckpoint(validate, "mean", every, validation_data=validation.model_dump_json())
    try:
        best.require_metric(validate(task.state_dict, _TRIAL_SAMPLES, 1))
    except EvaluationError as error:
        raise ConfigError(f"validation: {error}") from error
    return best


Metrics = dict[str, float]


def validation_workers(config: PretrainConfig) -> int:
    """Return a rank's number of loader processes for a validation, at most that of training."""
    return min(config.data.workers, workers_for(distributed.default_device(), None))


def recalls(
    loaded: Loaded, validation: ValidationConfig, limit: int, config: PretrainConfig
) -> Metrics:
    """Compute each recall, after re-ranking if enabled, and their mean, on `limit` samples."""
    result = evaluate_retrieval(
        loaded,
        validation.shards,
        EvalOptions(
            limit=limit,
            device=next(loaded.model.parameters()).device,
            precision=config.training.precision,
            workers=validation_workers(config),
            resamples=1,
        ),
        match_batch=64,  # small, as training leaves little memory
        rerank=validation.rerank,
        features=validation.features or (),
    )
    stage = result.stages[-1]
    metrics = {"mean": result.mean(stage).value}
    for direction in DIRECTIONS:
        for k in RECALL_AT:
            metrics[f"{direction} R@{k}"] = result.recall(stage, direction, k).value
    return metrics


class ValidationLosses:
    """Losses of the first global batches of held-out shards, averaged over pairs.

    Images are not augmented; hard negatives and masks are drawn as in the first epoch. With a
    momentum teacher, the losses use its keys of these batches, but not its queue or soft targets.
    """

    def __init__(
        self, config: PretrainConfig, validation: ValidationConfig, task: Pretraining
    ) -> None:
        self._task, training = task, config.training
        data_config = config.data.model_copy(
            update={
                "sources": tuple(SourceConfig(path=path) for path in validation.shards),
                "features": validation.features,
                "epoch_samples": None,
                "workers": validation_workers(config),
                "augment": AugmentConfig(randaugment=False, crop_scale=(1.0, 1.0), hflip=False),
            }
        )
        self._data = PretrainData(data_config, config.inputs, training.batch, training.seed)

    @torch.no_grad()
    def __call__(self, batches: int) -> Metrics:
        """Compute `loss/total` and `loss/NAME` of the first batches; collective."""
        count = min(batches, self._data.batches_in_epoch(0))
        if not count:
            return {}
        names, losses, pairs = list[str](), [], []
        stream = self._data.batches(0, distributed.rank(), distributed.world_size(), count)
        train_device = next(self._task.parameters()).device
        with closing(stream), evaluating(self._task, train_device) as device:
            for batch, _ in stream:
                batch = batch.to(device)
                output = self._task(batch, 0)
                names = ["total", *output.losses]
                losses.append(torch.stack([output.loss, *output.losses.values()]))
                pairs.append(distributed.global_sum(batch.valid.sum()))
        values = torch.stack(losses).float().cpu()  # (batches, names)
        weights = torch.stack(pairs).float().cpu()  # (batches,)
        means = distributed.mean_over_ranks(weights @ values / weights.sum().clamp(min=1))
        return {f"loss/{name}": value for name, value in zip(names, means.tolist())}


if __name__ == "__main__":
    from launch.cli.main import run_script

    sys.exit(run_script("train"))
