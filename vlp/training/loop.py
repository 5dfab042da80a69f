"""The training loop.

An optimiser step has `training.gradient_accumulation_steps` micro-steps. Each takes one global
batch: `training.batch` samples, shared by all ranks.
"""

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
from vlp.data.stream.batch import RankBatch
from vlp.data.stream.loader import CopyStream
from vlp.data.stream.rng import stable_hash
from vlp.io import atomic_folder, link_missing, restore_folder
from vlp.tasks.pretraining.statistics import CollapseMonitor
from vlp.tasks.task import StepOutput, Task
from vlp.training.checkpoints import BestCheckpoint, CheckpointError, Checkpoints
from vlp.training.config import RunConfig
from vlp.training.engines.engine import Engine
from vlp.training.log import RunLog, open_trackers
from vlp.training.progress import Meter, Outcome, Progress, copy_to_cpu
from vlp.training.run_folder import RunFolder, device_name, record_start, write_report
from vlp.training.stop_requests import StopConsensus, StopSignals
from vlp.training.watchdog import Watchdog


class StreamedData(Protocol):
    """Interface of the data that the loop needs (`vlp.data.pretrain.PretrainData`).

    fingerprint: hashes of the data's parts by name; a run resumes with the same ones only.
    """

    fingerprint: dict[str, str]

    def batches_left(self, samples_consumed: int, epochs: int) -> int:
        """Count the global batches that remain of `epochs` epochs after `samples_consumed`."""

    def samples_in_epoch(self, epoch: int) -> int:
        """Count the samples of one epoch."""

    def batches(
        self, samples_consumed: int = 0, rank: int = 0, world_size: int = 1
    ) -> Generator[tuple[RankBatch, int], None, None]:
        """Yield a rank's batches without end, each with the samples of all ranks until its end."""


# Skipped steps in a row that a run survives: fp16 skips a few to find its loss scale.
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

    Args:
        resume: continue from the newest good checkpoint in `folder`, or start without one.
        best: validation, which saves the best model in `best/` and ends the run when its patience
            is exhausted.
        signals: stop signals that are handled already; None: handle them within this call.

    Raises:
        CheckpointError: a checkpoint or model cannot be written, or not resumed with this data.
        NonFiniteError: the run diverges.
    """
    is_main = engine.rank == 0
    checkpoints = Checkpoints(folder.checkpoints, config, data.fingerprint)
    restored = checkpoints.load(engine, task) if resume else None
    with distributed.raise_on_all_ranks(ConfigError):
        if resume and is_main and not restored:
            folder.require_same_run(config)
            folder.require_no_progress()
    finished_step = distributed.broadcast_object(folder.finished_step())
    progress = restored or Progress()
    start_step, validated_step = progress.step, progress.validated_step
    total_steps = count_steps(config, data, progress)
    if restored:
        progress.resume_steps.append(start_step)
    devices = distributed.all_gather_object((socket.gethostname(), device_name(engine.device)))
    if is_main:
        folder.path.mkdir(parents=True, exist_ok=True)
        # First of all files: without `run.json` a folder is not recognised as a run's.
        record_start(
            folder, start_step, total_steps, config.training.seed, devices, data.fingerprint
        )
        for model in (folder.best, folder.model):
            restore_folder(model)
        save_config(config, folder.config)
    log_folder, trackers = (folder, config.training.trackers) if is_main else (None, ())
    trainer: _Trainer | None = None
    ending = "failed"
    try:
        with (
            nullcontext(signals) if signals else StopSignals() as stop_signals,
            RunLog(
                log_folder,
                start_step,
                total_steps,
                open_trackers(trackers, folder, start_step, validated_step),
                validated_step,
            ) as log,
            Watchdog(WATCHDOG_SECONDS, log.info, folder.hang) as watchdog,
            closing(checkpoints),
            closing(data.batches(progress.samples, engine.rank, engine.world_size)) as batches,
        ):
            if resume and not restored:
                log.info(f"{checkpoints} holds no checkpoint; starting from the beginning")
            _log_schedule(config, log, start_step, total_steps)
            trainer = _Trainer(
                config=config,
                task=task,
                data=data,
                engine=engine,
                folder=folder,
                best=best,
                checkpoints=checkpoints,
                progress=progress,
                total_steps=total_steps,
                stop_signals=stop_signals,
                log=log,
                watchdog=watchdog,
                checkpoint_steps=(start_step, validated_step) if restored else None,
            )
            if not trainer.run(batches):
                ending = "stopped"
                reason = stop_signals.reason or "a stop request on another rank"
                log.info(f"stopped by {reason} after step {progress.step}; continue with --resume")
            else:
                # A finished run that is resumed again trains nothing.
                if restored and finished_step == start_step == progress.step:
                    log.info(f"{folder.model} is already from this step; left unchanged")
                else:
                    _save_model(task, engine, folder.model)
                ending = "finished"
                log.info(f"finished after {progress.step} steps: {folder.model}")
                if progress.best_step is not None:
                    log.info(f"best on validation data, step {progress.best_step}: {folder.best}")
    except PausedDataError:
        ending = "paused"
        raise
    finally:
        record = trainer.record if trainer else {}
        report = write_report(log_folder, ending, progress, record, engine, total_steps)
    return report


@dataclass
class _Trainer:
    """A running training: its parts, and what its steps update.

    checkpoint_steps: `step` and `validated_step` of the newest checkpoint; None without one.
    """

    config: RunConfig
    task: Task
    data: StreamedData
    engine: Engine
    folder: RunFolder
    best: BestCheckpoint | None
    checkpoints: Checkpoints
    progress: Progress
    total_steps: int
    stop_signals: StopSignals
    log: RunLog
    watchdog: Watchdog
    checkpoint_steps: tuple[int, int] | None

    def __post_init__(self) -> None:
        self.meter, self.collapse_monitor = Meter(self.progress), CollapseMonitor()
        self.copy_stream = CopyStream(self.engine.device)
        self.record = self.log.last_record
        # Outcomes that a GPU still computes are read with the next log line or checkpoint, so that
        # these steps never wait for it.
        self.pending: list[Outcome] = []

    def run(self, batches: Iterator[tuple[RankBatch, int]]) -> bool:
        """Train and save a checkpoint; return False if the run was stopped before its end."""
        training, progress = self.config.training, self.progress
        consensus = StopConsensus(self.stop_signals, self.engine.device)
        self.validate_if_due()  # an earlier start may have ended before its last validation
        # A signal to any rank ends the run on all, a few seconds later, with a checkpoint.
        while not self.is_done() and not consensus.should_stop():
            learning_rate = training.optimiser.learning_rate_at(progress.step, self.total_steps)
            # A forward pass changes buffers (batch norms), which a skipped step restores.
            buffers = {name: b.clone() for name, b in self.engine.module.named_buffers()}
            micro_steps = range(training.gradient_accumulation_steps)
            outputs = [self.micro_step(batches, index) for index in micro_steps]
            self.take_step(outputs, learning_rate, buffers)
            is_last = progress.step == self.total_steps
            if is_last or progress.step % training.log_every == 0:
                self.write_log(learning_rate)
            if is_last or progress.step % training.checkpoint_every == 0:
                self.save_checkpoint()
            # After the checkpoint, so that a failing validation loses no training.
            self.validate_if_due()
        self.stop_signals.disable_deadline()
        self.watchdog.enter("save")
        if self.checkpoint_steps != (progress.step, progress.validated_step):
            self.save_checkpoint()
        self.checkpoints.wait()
        return self.is_done()

    def is_done(self) -> bool:
        """Return whether all steps are done or the patience of `best` is exhausted."""
        is_exhausted = self.best is not None and self.best.is_exhausted(self.progress)
        return self.progress.step >= self.total_steps or is_exhausted

    def micro_step(self, batches: Iterator[tuple[RankBatch, int]], index: int) -> StepOutput:
        """Run the forward and backward pass of the next batch; return detached outputs."""
        progress = self.progress
        self.watchdog.enter("data")
        start = time.perf_counter()
        batch, progress.samples = next(batches)
        self.meter.add_batch(batch, time.perf_counter() - start)
        self.watchdog.enter("forward")
        # Makes dropout reproducible on resume and different on each rank.
        seed_parts = self.config.training.seed, progress.step, index, self.engine.rank
        torch.manual_seed(stable_hash("dropout", *seed_parts))
        output = self.engine.forward(self.copy_stream.move(batch), progress.step)
        self.watchdog.enter("backward")
        self.engine.backward(nan_if_non_finite(output.loss))
        return StepOutput(
            output.loss.detach(),
            {name: value.detach() for name, value in output.losses.items()},
            {name: value.detach() for name, value in output.statistics.items()},
        )

    def take_step(
        self, outputs: list[StepOutput], learning_rate: float, buffers: dict[str, Tensor]
    ) -> None:
        """Take the optimiser step; `outputs` has an entry for each micro-step.

        A step that is not finite on some rank is skipped on all ranks: weights, optimiser state and
        `buffers` keep their values, and the next step has the next batch.
        """
        self.watchdog.enter("update")
        update = self.engine.step(learning_rate)
        self.progress.step += 1
        self.watchdog.step = self.progress.step
        self.pending.append(Outcome(self.progress.step, outputs, update))
        # Where only the GPU knows it, `applied` is a 0-d tensor, which is not read here.
        if isinstance(update.applied, Tensor):
            _restore_buffers(self.engine.module, buffers, update.applied)
            self.task.after_step(self.engine.parameters, update.applied)
        elif update.applied:
            self.task.after_step(self.engine.parameters)
            self.flush_pending()
        else:
            _restore_buffers(self.engine.module, buffers)
            self.task.after_skip()
            self.flush_pending()
        self.log.advance()
        self.watchdog.enter("log")

    def flush_pending(self) -> None:
        """Count the outcomes of pending steps; NonFiniteError if too many were skipped."""
        for outcome in copy_to_cpu(self.pending):
            if outcome.update.applied:
                self.progress.non_finite_in_a_row = 0
                self.meter.add_step(outcome.outputs, outcome.update)
            else:
                _count_non_finite(self.progress, outcome, self.log)
        self.pending.clear()

    def write_log(self, learning_rate: float) -> None:
        """Log the means since the last log line."""
        self.flush_pending()
        self.record = _log_record(self.meter, self.progress, learning_rate, self.data)
        self.log.write(self.record)
        if self.engine.rank == 0:
            self.collapse_monitor.check(self.progress.step, _monitored_statistics(self.record))

    def save_checkpoint(self) -> None:
        """Save a checkpoint, which a thread writes."""
        self.watchdog.enter("save")
        self.flush_pending()
        self.meter.reduce_counts()
        with self.stop_signals.suspend_deadline():
            self.checkpoints.save(self.engine, self.task, self.progress, wait=False)
        self.checkpoint_steps = self.progress.step, self.progress.validated_step

    def validate_if_due(self) -> None:
        """Validate the model at the interval of `best`; save it if it is the best so far."""
        if self.best is None or not self.best.is_due(self.progress, self.total_steps):
            return
        start = time.perf_counter()
        self.watchdog.enter("validate")
        with self.stop_signals.suspend_deadline():
            metrics, is_best = self.best.validate(self.progress, self.engine.parameters)
            self.log.write_validation(self.progress.step, metrics)
            if is_best:
                self.checkpoints.wait()
                _save_model(self.task, self.engine, self.folder.best)
        self.meter.exclude(time.perf_counter() - start)


def count_steps(config: RunConfig, data: StreamedData, progress: Progress) -> int:
    """Count the optimiser steps of the whole run; batches after the last full step are dropped."""
    training = config.training
    if training.steps is not None:
        return training.steps
    assert training.epochs is not None  # RunConfig validates this
    # From consumed samples, as the batch may have changed since an earlier start.
    batches_left = data.batches_left(progress.samples, training.epochs)
    return training.count_steps(batches_left, progress.step)


def _log_schedule(config: RunConfig, log: RunLog, step: int, total_steps: int) -> None:
    """Log the warm-up, warnings if the run ends within a warm-up, and a resumed learning rate."""
    optimiser = config.training.optimiser
    if optimiser.warmup_steps is None:
        log.info(f"warm-up: {optimiser.resolve_warmup(total_steps)} of {total_steps} steps")
    if warning := optimiser.warmup_warning(total_steps):
        log.info(warning)
    # Pretraining has its teacher in `objectives`, other tasks in `task`.
    parts = (getattr(config, key, None) for key in ("objectives", "task"))
    teachers = (getattr(part, "teacher", None) for part in parts)
    if any(teacher and total_steps <= (teacher.warmup_steps or 0) for teacher in teachers):
        log.info(
            "warning: teacher.warmup_steps is not over when the run ends, after "
            f"{total_steps} steps: its soft targets never reach full weight"
        )
    if step:
        # A finished run has no next step: it shows its last learning rate.
        current = optimiser.learning_rate_at(min(step, total_steps - 1), total_steps)
        message = f"resumed at step {step} of {total_steps} with learning rate {current:.4g}"
        if (previous := log.last_record.get("learning_rate")) is not None:
            message += f"; it was {previous:.4g} at step {log.last_record['step']}"
        log.info(message)


def nan_if_non_finite(loss: Tensor) -> Tensor:
    """Return the scalar loss; its gradients are NaN if its value is not finite."""
    # A non-finite loss may have finite gradients, and be finite on other ranks. NaN gradients make
    # the engine skip the step on all ranks, without waiting for the device.
    factor = torch.ones_like(loss)
    return loss * torch.where(torch.isfinite(loss.detach()), factor, factor * float("nan"))


def _restore_buffers(
    module: nn.Module, copies: dict[str, Tensor], applied: Tensor | None = None
) -> None:
    """Set buffers to their `copies`; with a 0-d bool `applied` on a device, only if it is False."""
    for name, buffer in module.named_buffers():
        previous = copies[name]
        buffer.copy_(previous if applied is None else torch.where(applied, buffer, previous))


def _count_non_finite(progress: Progress, outcome: Outcome, log: RunLog) -> None:
    """Count and log a skipped step; NonFiniteError if too many follow each other; collective."""
    progress.non_finite += 1
    progress.non_finite_in_a_row += 1
    step, scale = outcome.step, outcome.update.loss_scale
    local_names = {
        name
        for output in outcome.outputs
        for name, value in {"total": output.loss, **output.losses}.items()
        if not torch.isfinite(value)
    }
    names = sorted(set().union(*distributed.all_gather_object(local_names)))
    reason = f"the loss is not finite ({', '.join(names)})" if names else "a gradient is not finite"
    if scale is not None:
        reason += f", the loss scale was {scale:g}"
    log.info(f"step {step} skipped: {reason}")
    if progress.non_finite_in_a_row > MAX_NON_FINITE:
        raise NonFiniteError(
            f"{progress.non_finite_in_a_row} steps in a row were skipped, the last ({step}) "
            f"because {reason}. Go back to the last checkpoint with --resume and a lower "
            "training.optimiser.learning_rate, a longer warm-up, or training.precision=float32."
        )


def _log_record(
    meter: Meter, progress: Progress, learning_rate: float, data: StreamedData
) -> dict[str, Any]:
    """Return the record of a log line: the meter's means, the position in the data; collective."""
    means = meter.flush()
    epoch, samples_into_epoch = 0, progress.samples
    while samples_into_epoch >= data.samples_in_epoch(epoch):
        samples_into_epoch -= data.samples_in_epoch(epoch)
        epoch += 1
    return {
        "step": progress.step,
        "epoch": epoch + samples_into_epoch / data.samples_in_epoch(epoch),
        "samples": progress.samples,
        "seconds": progress.seconds,
        "learning_rate": learning_rate,
        **means,
        "skipped": {"total": sum(progress.skipped.values()), **progress.skipped},
        "non_finite_steps": progress.non_finite,
    }


def _monitored_statistics(record: dict[str, Any]) -> dict[str, float]:
    """Return the statistics that the collapse monitor checks: all but those of anchors."""
    prefix = "statistics/"
    statistics = {
        key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)
    }
    return {name: value for name, value in statistics.items() if not name.startswith("anchor")}


def _save_model(task: Task, engine: Engine, folder: Path) -> None:
    """Replace the model's files in a folder and keep others, such as a model card; collective."""
    state = engine.state_dict()
    failure: str | None = None
    if engine.rank == 0:
        try:
            with atomic_folder(folder) as partial:
                task.save_model(partial, state)
                link_missing(folder, partial)
        except OSError as error:
            failure = str(error)
    failure = distributed.broadcast_object(failure)
    if failure is not None:
        raise CheckpointError(
            f"cannot write the model {folder}: {failure}; checkpoints are intact: free disk space "
            "or permit writing, then start again with --resume"
        )
