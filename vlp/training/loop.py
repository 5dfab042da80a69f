"""The training loop; one optimiser step is `gradient_accumulation_steps` global batches."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vlp import distributed
from vlp.config import ConfigError, save_config
from vlp.data.shards.sample_files import PausedDataError
from vlp.data.stream.batch import Slots
from vlp.data.stream.loader import CopyStream
from vlp.data.stream.rng import stable_hash
from vlp.io import atomic_folder, link_missing, restore_folder
from vlp.tasks.pretraining.statistics import CollapseWatch
from vlp.tasks.task import StepOutput, Task
from vlp.training.checkpoints import BestCheckpoint, CheckpointError, Checkpoints
from vlp.training.config import RunConfig
from vlp.training.engines.engine import Engine
from vlp.training.log import RunLog, open_trackers
from vlp.training.optimiser import learning_rate
from vlp.training.progress import Meter, Outcome, Progress, copy_to_cpu
from vlp.training.run_folder import RunFolder, device_name, record_start, write_report
from vlp.training.stop_requests import StopConsensus, StopSignals
from vlp.training.watchdog import Watchdog


class StreamedData(Protocol):
    """Interface of the data that the loop needs (`vlp.data.pretrain.PretrainData`)."""

    # Hashes of the data's parts by name, which a checkpoint remembers.
    fingerprint: dict[str, str]

    def batches_left(self, samples_consumed: int, epochs: int) -> int:
        """Count global batches from a number of consumed samples to the end of `epochs` epochs."""

    def samples_in_epoch(self, epoch: int) -> int:
        """Count the samples of one epoch."""

    def batches(
        self, samples_consumed: int = 0, rank: int = 0, world_size: int = 1
    ) -> Generator[tuple[Slots, int], None, None]:
        """Yield one rank's batches without end, each with the samples all ranks consumed so far."""


# Skipped steps in a row: fp16 needs a few to find its loss scale, more mean divergence.
MAX_NON_FINITE = 10
# Seconds without progress after which a rank is reported: longer than any usual step.
WATCHDOG_SECONDS = 30.0


class NonFiniteError(RuntimeError):
    """More than `MAX_NON_FINITE` steps in a row had a loss or a gradient that is not finite."""


def train(
    config: RunConfig,
    task: Task,
    data: StreamedData,
    engine: Engine,
    folder: RunFolder,
    resume: bool = False,
    best: BestCheckpoint | None = None,
    signals: StopSignals | None = None,
) -> dict[str, Any]:
    """Train to the end, or to a stop signal; return the contents of `report.json`.

    With `best` the best model is saved in `best/`, and the run also ends when patience runs out.
    Raises CheckpointError if a checkpoint or model cannot be written or resumed with this data, and
    NonFiniteError.
    """
    is_main = engine.rank == 0
    checkpoints = Checkpoints(folder.checkpoints, config, data.fingerprint)
    checkpoint = checkpoints.load(engine, task) if resume else None
    with distributed.raise_on_all_ranks(ConfigError):
        if resume and is_main and not checkpoint:
            folder.require_same_run(config)
            folder.require_no_progress(str(checkpoints))
    finished_at = distributed.from_rank_0(folder.finished_at())
    progress = checkpoint or Progress()
    step, looked = progress.step, progress.looked
    total = total_steps(config, data, progress)
    if checkpoint:
        progress.resumed.append(step)
    devices = distributed.gather_to_all((socket.gethostname(), device_name(engine.device)))
    if is_main:
        folder.path.mkdir(parents=True, exist_ok=True)
        # First of all files: without `run.json` a folder is not recognised as a run's.
        record_start(folder, step, total, config.training.seed, devices, data.fingerprint)
        for model in (folder.best, folder.model):
            restore_folder(model)
        save_config(config, folder.config)
    main_folder, trackers = (folder, config.training.trackers) if is_main else (None, ())
    trainer: _Trainer | None = None
    ended = "failed"
    try:
        with (
            nullcontext(signals) if signals else StopSignals() as stop,
            RunLog(
                main_folder, step, total, open_trackers(trackers, folder, step, looked), looked
            ) as log,
            Watchdog(WATCHDOG_SECONDS, log.info, folder.hang) as watchdog,
            closing(checkpoints),
            closing(data.batches(progress.samples, engine.rank, engine.world_size)) as batches,
        ):
            if resume and not checkpoint:
                log.info(f"{checkpoints} holds no checkpoint; starting from the beginning")
            _log_schedule(config, log, step, total)
            saved = (step, looked) if checkpoint else None
            trainer = _Trainer(
                config,
                task,
                data,
                engine,
                folder,
                best,
                checkpoints,
                progress,
                total,
                stop,
                log,
                watchdog,
                saved,
            )
            if not trainer.run(batches):
                ended = "stopped"
                reason = stop.reason or "a stop request on another rank"
                log.info(f"stopped by {reason} after step {progress.step}; continue with --resume")
            else:
                if checkpoint and finished_at == step == progress.step:
                    log.info(f"{folder.model} is already from this step; left unchanged")
                else:
                    _save_model(task, engine, folder.model)
                ended = "finished"
                log.info(f"finished after {progress.step} steps: {folder.model}")
                if progress.best_step is not None:
                    log.info(f"best on validation data, step {progress.best_step}: {folder.best}")
    except PausedDataError:
        ended = "paused"
        raise
    finally:
        record = trainer.record if trainer else {}
        report = write_report(main_folder, ended, progress, record, engine, total)
    return report


@dataclass
class _Trainer:
    """A running training: its parts, and what its steps update.

    saved: optimiser step and last validated step of the newest checkpoint.
    """

    config: RunConfig
    task: Task
    data: StreamedData
    engine: Engine
    folder: RunFolder
    best: BestCheckpoint | None
    checkpoints: Checkpoints
    progress: Progress
    total: int
    stop: StopSignals
    log: RunLog
    watchdog: Watchdog
    saved: tuple[int, int] | None

    def __post_init__(self) -> None:
        self.meter, self.collapse_monitor = Meter(self.progress), CollapseWatch()
        self.copies = CopyStream(self.engine.device)
        self.record = self.log.last
        # A GPU's outcomes are read with the next log line or checkpoint, so that steps never wait
        # for the device.
        self.pending: list[Outcome] = []

    def run(self, batches: Iterator[tuple[Slots, int]]) -> bool:
        """Train and save a checkpoint; return False if the run was stopped before its end."""
        training, progress = self.config.training, self.progress
        consensus = StopConsensus(self.stop, self.engine.device)
        # A signal to any rank ends the run on all, a few seconds later, with a checkpoint.
        while not (is_done := self.validate_if_due()) and not consensus.should_stop():
            rate = _learning_rate(self.config, progress.step, self.total)
            # A forward pass changes buffers (batch norms), which a skipped step restores.
            buffers = {name: b.clone() for name, b in self.engine.module.named_buffers()}
            parts = range(training.gradient_accumulation_steps)
            self.update([self.micro_step(batches, part) for part in parts], rate, buffers)
            is_last = progress.step == self.total
            if is_last or progress.step % training.log_every == 0:
                self.write_log(rate)
            # Checkpoint before validating, so that a failing validation loses no training.
            if is_last or progress.step % training.checkpoint_every == 0:
                self.save()
        self.stop.disable_deadline()
        self.watchdog.enter("save")
        if self.saved != (progress.step, progress.looked):
            self.save()
        self.checkpoints.wait()
        return is_done

    def micro_step(self, batches: Iterator[tuple[Slots, int]], part: int) -> StepOutput:
        """Run the forward and backward pass of the next batch; return detached outputs."""
        progress = self.progress
        self.watchdog.enter("data")
        start = time.perf_counter()
        batch, progress.samples = next(batches)
        self.meter.add_batch(batch, time.perf_counter() - start)
        self.watchdog.enter("forward")
        # Makes dropout reproducible on resume and different on each rank.
        position = progress.step, part, self.engine.rank
        torch.manual_seed(stable_hash("dropout", self.config.training.seed, *position))
        output = self.engine.forward(self.copies.move(batch), progress.step)
        self.watchdog.enter("backward")
        self.engine.backward(nan_if_non_finite(output.loss))
        return StepOutput(
            output.loss.detach(),
            {name: value.detach() for name, value in output.losses.items()},
            {name: value.detach() for name, value in output.statistics.items()},
        )

    def update(self, outputs: list[StepOutput], rate: float, buffers: dict[str, Tensor]) -> None:
        """Make the optimiser step; `outputs` are those of its micro-steps.

        A step that is not finite on some rank is skipped on all: weights, optimiser state and
        buffers keep their values, and the next step has the next batch.
        """
        self.watchdog.enter("update")
        update = self.engine.step(rate)
        self.progress.step += 1
        self.watchdog.step = self.progress.step
        self.pending.append(Outcome(self.progress.step, outputs, update))
        # A tensor is a flag on the device, which is not read yet.
        if isinstance(update.applied, Tensor):
            _restore(self.engine.module, buffers, update.applied)
            self.task.after_step(self.engine.parameters, update.applied)
        elif update.applied:
            self.task.after_step(self.engine.parameters)
            self.flush_pending()
        else:
            _restore(self.engine.module, buffers)
            self.task.after_skip()
            self.flush_pending()
        self.log.advance()
        self.watchdog.enter("log")

    def flush_pending(self) -> None:
        """Record the outcomes of pending steps."""
        for outcome in copy_to_cpu(self.pending):
            if outcome.update.applied:
                self.progress.non_finite_row = 0
                self.meter.add_step(outcome.outputs, outcome.update)
            else:
                _count_non_finite(self.progress, outcome, self.log)
        self.pending.clear()

    def write_log(self, rate: float) -> None:
        """Log the means since the last log line."""
        self.flush_pending()
        self.record = _log_record(self.meter, self.progress, rate, self.data)
        self.log.write(self.record)
        if self.engine.rank == 0:
            self.collapse_monitor.check(self.progress.step, _feature_statistics(self.record))

    def save(self) -> None:
        """Save a checkpoint, which a thread writes."""
        self.watchdog.enter("save")
        self.flush_pending()
        self.meter.reduce_counts()
        with self.stop.suspend_deadline():
            self.checkpoints.save(self.engine, self.task, self.progress, wait=False)
        self.saved = self.progress.step, self.progress.looked

    def validate_if_due(self) -> bool:
        """Validate if due; return whether all steps are done or patience is exhausted."""
        progress, best = self.progress, self.best
        if best is None:
            return progress.step >= self.total
        if best.due(progress, self.total):
            start = time.perf_counter()
            self.watchdog.enter("validate")
            with self.stop.suspend_deadline():
                metrics, better = best.validate(progress, self.engine.parameters)
                self.log.write_validation(progress.step, metrics)
                if better:
                    self.checkpoints.wait()
                    _save_model(self.task, self.engine, self.folder.best)
            self.meter.exclude(time.perf_counter() - start)
        return progress.step >= self.total or best.exhausted(progress)


def total_steps(config: RunConfig, data: StreamedData, progress: Progress) -> int:
    """Count a run's optimiser steps, without a last incomplete accumulation of gradients."""
    training = config.training
    if training.steps is not None:
        return training.steps
    assert training.epochs is not None  # RunConfig validates this
    # From consumed samples, as the batch size may have changed since an earlier start.
    batches_left = data.batches_left(progress.samples, training.epochs)
    return max(1, progress.step + batches_left // training.gradient_accumulation_steps)


def _learning_rate(config: RunConfig, step: int, total: int) -> float:
    optimiser = config.training.optimiser
    return learning_rate(
        step, total, optimiser.learning_rate, optimiser.final_learning_rate, optimiser.warmup(total)
    )


def _log_schedule(config: RunConfig, log: RunLog, step: int, total: int) -> None:
    """Log the warm-up, warnings if the run ends within a warm-up, and a resumed learning rate."""
    optimiser = config.training.optimiser
    if optimiser.warmup_steps is None:
        log.info(f"warm-up: {optimiser.warmup(total)} of {total} steps")
    if warning := optimiser.endless_warmup(total):
        log.info(warning)
    parts = (getattr(config, key, None) for key in ("objectives", "task"))
    teachers = (getattr(part, "teacher", None) for part in parts)
    if any(teacher and total <= (teacher.warmup_steps or 0) for teacher in teachers):
        log.info(
            f"warning: teacher.warmup_steps is not over when the run ends, after {total} steps: "
            "its soft targets never reach full weight"
        )
    if step:
        rate, previous = _learning_rate(config, min(step, total - 1), total), ""
        if "learning_rate" in log.last:
            previous = f"; it was {log.last['learning_rate']:.4g} at step {log.last['step']}"
        log.info(f"resumed at step {step} of {total} with learning rate {rate:.4g}{previous}")


def nan_if_non_finite(loss: Tensor) -> Tensor:
    """Return a finite scalar loss unchanged, and a non-finite one with NaN gradients."""
    # A non-finite loss may have finite gradients, and finite values on other ranks. NaN gradients
    # make the engine skip the step on all ranks, without waiting for the device.
    factor = torch.ones_like(loss)
    return loss * torch.where(torch.isfinite(loss.detach()), factor, factor * float("nan"))


def _restore(module: nn.Module, buffers: dict[str, Tensor], applied: Tensor | None = None) -> None:
    """Restore buffers by name; with a device flag `applied`, only if it is False."""
    for name, buffer in module.named_buffers():
        previous = buffers[name]
        buffer.copy_(previous if applied is None else torch.where(applied, buffer, previous))


def _count_non_finite(progress: Progress, outcome: Outcome, log: RunLog) -> None:
    """Count and log a skipped step; NonFiniteError if too many follow each other."""
    progress.non_finite += 1
    progress.non_finite_row += 1
    step, scale = outcome.step, outcome.update.loss_scale
    local = {
        name
        for output in outcome.outputs
        for name, value in {"total": output.loss, **output.losses}.items()
        if not torch.isfinite(value)
    }
    names = sorted(set().union(*distributed.gather_to_all(local)))
    reason = f"loss {', '.join(names)} not finite" if names else "a gradient is not finite"
    if scale is not None:
        reason += f", the loss scale was {scale:g}"
    log.info(f"step {step} skipped: {reason}")
    if progress.non_finite_row > MAX_NON_FINITE:
        raise NonFiniteError(
            f"{progress.non_finite_row} steps in a row were skipped, the last ({step}) "
            f"because {reason}. Go back to the last "
            "checkpoint with --resume and a lower training.optimiser.learning_rate, a longer "
            "warm-up, or training.precision=float32."
        )


def _log_record(
    meter: Meter, progress: Progress, rate: float, data: StreamedData
) -> dict[str, Any]:
    means = meter.flush()
    epoch, within_epoch = 0, progress.samples
    while within_epoch >= (size := data.samples_in_epoch(epoch)):
        epoch, within_epoch = epoch + 1, within_epoch - size
    return {
        "step": progress.step,
        "epoch": epoch + within_epoch / size,
        "samples": progress.samples,
        "seconds": progress.seconds,
        "learning_rate": rate,
        **means,
        "skipped": {"total": sum(progress.skipped.values()), **progress.skipped},
        "non_finite_steps": progress.non_finite,
    }


def _feature_statistics(record: dict[str, Any]) -> dict[str, float]:
    """Return the statistics of features; anchors' statistics may be constant and are left out."""
    statistics = {
        key.rpartition("/")[2]: value for key, value in record.items() if "statistics/" in key
    }
    return {name: value for name, value in statistics.items() if not name.startswith("anchor")}


def _save_model(task: Task, engine: Engine, folder: Path) -> None:
    """Replace a model folder, but keep files of other origin, such as a model card."""
    state = engine.state_dict()
    failure: str | None = None
    if engine.rank == 0:
        try:
            with atomic_folder(folder) as partial:
                task.save_model(partial, state)
                link_missing(folder, partial)
        except OSError as error:
            failure = str(error)
    failure = distributed.from_rank_0(failure)
    if failure is not None:
        raise CheckpointError(
            f"cannot write the model {folder}: {failure}; checkpoints are intact: free disk "
            "space and start again with --resume"
        )
