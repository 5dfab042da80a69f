"""`vlp plan`: ranks, parameters, memory of the training state, steps and time of a pretraining."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from vlp.command_line import Command, Overrides, new_app, positive
from vlp.config import ConfigError, load_config
from vlp.io import as_url, write_json

if TYPE_CHECKING:
    from torch import nn

    from vlp.config import Precision
    from vlp.tasks.pretraining import Pretraining
    from vlp.training.config import PretrainConfig


app = new_app()

# Bytes of a parameter, a gradient and each of AdamW's two moments, at every precision.
FLOAT = 4
# Numbers of ranks that are printed; the JSON file has all.
MAX_SIZES = 12

# Pairs/s of configs/pretrain/base.yaml on one H200 (docs/results/gpu.md), by pairs a step and
# `training.compile`.
MEASURED = {(32, "none"): 130, (64, "none"): 225, (128, "none"): 394, (64, "blocks"): 241}


class StageMemory(NamedTuple):
    """Bytes of training state on one GPU; `teacher` includes the queue."""

    weights: float
    gradients: float
    optimiser: float
    teacher: float


@app.command(cls=Command)
def plan(
    config: Annotated[Path, Option(metavar="FILE", help="a pretraining of configs/pretrain")],
    gpus: Annotated[int, Option(parser=positive, metavar="N", help="GPUs of the run")],
    pairs: Annotated[
        int | None,
        Option(parser=positive, metavar="N", help="of an epoch (default: from local shards)"),
    ] = None,
    pairs_per_second: Annotated[
        float | None, Option(min=1e-9, metavar="RATE", help="speed of all GPUs together")
    ] = None,
    json: Annotated[Path | None, Option(metavar="FILE", help="write all figures as JSON")] = None,
    overrides: Overrides = None,
) -> int:
    """Compute ranks, memory of the training state, steps and time of a pretraining.

    No GPU and no data are needed. The exit code is 2 where these GPUs cannot train the
    configuration; then the output names numbers of GPUs that can.

    \b
      vlp plan --config configs/pretrain/base_256.yaml --gpus 256 --pairs-per-second 90000
    """
    from evaluation.results import align
    from vlp.training.config import PretrainConfig
    from vlp.training.engines.deepspeed import deepspeed_config

    settings = load_config(config, PretrainConfig, overrides or ())
    training, sizes = settings.training, settings.world_sizes()
    print(f"{config} on {gpus:,} GPU{'s' * (gpus > 1)}\n")
    print(f"ranks that can train it: {_format_sizes(sizes)}")
    figures: dict[str, Any] = {"gpus": gpus, "world_sizes": sizes, "can_start": True}
    try:
        settings.require_world_size(gpus)
    except ConfigError as error:
        print(f"{gpus:,} GPUs cannot train it: {error}")
        if json is not None:
            write_json(json, figures | {"can_start": False, "problem": str(error)})
        return 2
    task = meta_task(settings)
    counts = {
        "model and heads": _numel(task.parameters()),
        "trained": _numel(p for p in task.parameters() if p.requires_grad),
        "teacher": sum(_numel(teacher.parameters()) for teacher in task.teachers()),
    }
    stages = {stage: stage_memory(task, stage, gpus, training.precision) for stage in range(4)}
    steps, measurement = _steps(settings, pairs), measured_rate(settings, gpus)
    source = ""
    if pairs_per_second is None and measurement is not None:
        measured_batch, pairs_per_second = measurement
        source = f", measured on one H200 with {measured_batch} pairs"
    step_pairs = training.batch * training.gradient_accumulation_steps
    seconds = None
    if steps is not None and pairs_per_second is not None:
        seconds = steps * step_pairs / pairs_per_second
    print(f"batch: {training.batch:,} pairs, {training.batch // gpus:,} a GPU")
    print(f"parameters: {', '.join(f'{name} {n:,}' for name, n in counts.items())}\n")
    header = ["memory of a GPU, GB", *(f.replace("_", " ") for f in StageMemory._fields), "sum"]
    configured_stage = 0
    if training.deepspeed is not None:
        configured_stage = int(deepspeed_config(training, gpus)["zero_optimization"]["stage"])
    rows = []
    for stage, memory in stages.items():
        title = "DDP, ZeRO 0" if stage == 0 else f"ZeRO {stage}"
        title += " (configured)" if stage == configured_stage else ""
        rows.append([title, *(f"{part / 1e9:.2f}" for part in (*memory, sum(memory)))])
    print("\n".join(align([header, *rows])))
    print("Activations, batches, buckets of gradients and gathered weights come on top.\n")
    print(f"steps: {'unknown, give --pairs' if steps is None else f'{steps:,}'}")
    if pairs_per_second is None:
        print("time: unknown, give --pairs-per-second")
    else:
        hours = "unknown without steps" if seconds is None else f"{seconds / 3600:,.1f} h"
        print(f"time: {hours} at {pairs_per_second:,.0f} pairs/s{source}")
    if json is not None:
        memory_bytes = {str(stage): memory._asdict() for stage, memory in stages.items()}
        figures |= {"pairs_of_a_gpu": training.batch // gpus, "parameters": counts}
        figures |= {"memory_bytes": memory_bytes, "steps": steps, "seconds": seconds}
        write_json(json, figures | {"pairs_per_second": pairs_per_second})
    return 0


def meta_task(config: PretrainConfig) -> Pretraining:
    """Build the task of a configuration on the meta device, without public weights."""
    import torch

    from vlp.models.config import ModelConfig
    from vlp.tasks.pretraining import Pretraining

    values = config.model.model_dump()
    values["text"]["weights"] = values["image"]["weights"] = None
    model = ModelConfig.model_validate(values)
    with torch.device("meta"):
        return Pretraining(model, config.objectives, "", config.training.precision)


def stage_memory(task: Pretraining, stage: int, ranks: int, precision: Precision) -> StageMemory:
    """Compute the training state of a rank at a ZeRO stage; stage 0 is also DDP."""
    # Stage 1 shards optimiser state, 2 also gradients, 3 also weights. From stage 1 on AdamW
    # updates a flat copy of the rank's shard of weights, unless there is one rank alone.
    size = FLOAT * _numel(task.parameters())
    trained = FLOAT * _numel(p for p in task.parameters() if p.requires_grad)
    shard = trained / ranks
    is_replicated = stage == 0 or ranks == 1
    weights = (size / ranks if stage == 3 else size) + (0 if is_replicated else shard)
    gradients = shard if stage >= 2 else trained
    moments = 2 * (shard if stage >= 1 else trained)
    teacher = float(sum(_teacher_bytes(teacher, precision) for teacher in task.teachers()))
    if task.teacher:
        teacher += sum(tensor.nbytes for tensor in task.teacher.queue.state_dict().values())
    return StageMemory(weights, gradients, moments, teacher)


def _teacher_bytes(teacher: nn.Module, precision: Precision) -> int:
    """Return the bytes of float32 weights and of the half-precision copies for autocast."""
    from vlp.tasks.task import AUTOCAST
    from vlp.tasks.teacher import half_weights

    half_copies = half_weights(teacher).values() if precision in AUTOCAST else ()
    return FLOAT * _numel(teacher.parameters()) + FLOAT // 2 * _numel(half_copies)


def measured_rate(config: PretrainConfig, gpus: int) -> tuple[int, int] | None:
    """Return (pairs of a step, pairs/s) of the closest run in `MEASURED`, None for other work."""
    from vlp.training.config import PretrainConfig

    path = Path(str(resources.files("configs"))) / "pretrain" / "base.yaml"
    if gpus != 1 or _workload(config) != _workload(load_config(path, PretrainConfig)):
        return None
    batch, compile_mode = config.training.batch, config.training.compile
    rates = [
        (n, rate) for (n, mode), rate in MEASURED.items() if mode == compile_mode and n <= batch
    ]
    return max(rates, default=None)


def _workload(config: PretrainConfig) -> dict[str, Any]:
    """Return the settings that determine the computation per pair."""
    model = config.model.model_dump()
    for tower in ("text", "image"):
        del model[tower]["weights"]
    keys = {"precision", "activation_checkpointing", "grad_cache"}
    training = config.training.model_dump(include=keys)
    return {"model": model, "objectives": config.objectives.model_dump(), **training}


def _numel(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _format_sizes(sizes: Sequence[int]) -> str:
    texts = [f"{size:,}" for size in sizes]
    if len(texts) > MAX_SIZES:
        half = MAX_SIZES // 2
        return f"{' '.join([*texts[:half], '...', *texts[-half:]])} ({len(sizes)} numbers)"
    return " ".join(texts) or "none"


def _steps(config: PretrainConfig, pairs: int | None) -> int | None:
    """Return the optimiser steps of the run; None if the number of pairs is unknown."""
    training = config.training
    if training.steps is not None:
        return training.steps
    pairs = pairs or config.data.epoch_samples or _count_pairs(config)
    if pairs is None or training.epochs is None:
        return None
    batches = -(-pairs // training.batch)  # the last batch of an epoch may have empty rows
    return training.count_steps(training.epochs * batches)


def _count_pairs(config: PretrainConfig) -> int | None:
    """Count the pairs of an epoch of local shards; None if a source is not local."""
    from vlp.data.shards.shard_reader import ShardIndex

    total = 0.0
    for source in config.data.sources:
        if as_url(source.path):
            return None
        try:
            shards = ShardIndex.open(source.path).shards
        except ConfigError:
            return None
        counts = shards.samples if config.data.captions == "one" else shards.pairs
        total += source.weight * float(counts.sum())
    return int(total)
