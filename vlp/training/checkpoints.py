"""Checkpoints: written atomically, verified when read, refused for other settings or data.

`step_N/` holds rank-independent weights and optimiser state, the task's extra state (teacher,
queue), `state.json`, and `SHA256SUMS` for `sha256sum -c`. `BestCheckpoint` decides which model is
the best so far.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from vlp import distributed
from vlp.config import ConfigError
from vlp.distributed import broadcast_tensors
from vlp.io import (
    parse_json,
    remove,
    replace_folder,
    restore_folder,
    sha256_of,
    sync,
    sync_path,
    write_tensors,
)
from vlp.tasks.task import Task
from vlp.training.config import RunConfig
from vlp.training.engines.compile import force_eager
from vlp.training.engines.engine import Engine
from vlp.training.progress import Progress
from vlp.training.run_folder import compare, versions

logger = logging.getLogger(__name__)

STATE, SUMS, EXTRA = "state.json", "SHA256SUMS", "extra.safetensors"
PARTIAL, CORRUPT = ".tmp", ".corrupt"
VERSION = 1

_NAME = re.compile(r"step_(\d+)")
_PROGRESS = TypeAdapter(Progress)

Value = TypeVar("Value")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the message is meant for the user."""


class Checkpoints:
    """The `checkpoints/` folder of a run, read and written by rank 0.

    Methods are collective, except `close`. fingerprint: hashes of the data's parts by name.
    """

    # Wrong content marks a checkpoint as damaged. An OSError does not: the disk may answer later.

    def __init__(
        self, folder: Path, config: RunConfig, fingerprint: Mapping[str, str] | None = None
    ) -> None:
        self._folder, self._config = folder, config
        self._values = config.model_dump(mode="json")
        self._fingerprint = dict(fingerprint or {})
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # The checkpoint that is being written, and on rank 0 the future of the thread's result.
        self._pending_name: str | None = None
        self._write_future: Future[None] | None = None

    def __str__(self) -> str:
        return str(self._folder)

    def save(self, engine: Engine, task: Task, progress: Progress, wait: bool = True) -> None:
        """Write `step_N/` in a thread, after the previous one; keep `training.keep_last` of them.

        wait: return when the checkpoint is written, instead of when the state is copied.
        """
        self.wait()
        name = f"step_{progress.step}"
        state = {
            "version": VERSION,
            "progress": _PROGRESS.dump_python(progress, by_alias=True),
            "world_size": distributed.world_size(),
            "config": self._values,
            "data": self._fingerprint,
        }
        files = engine.snapshot() | {EXTRA: distributed.rank_0_copies(task.extra_state())}
        if engine.rank == 0:
            self._write_future = self._thread.submit(self._write, name, files, state)
        self._pending_name = name
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written; on failure CheckpointError on every rank."""
        if self._pending_name is None:
            return
        name, self._pending_name = self._pending_name, None
        error = self._write_future.exception() if self._write_future else None
        self._write_future = None
        if error is not None and not isinstance(error, OSError | ConfigError):
            raise error  # a defect; the other ranks end when rank 0 does
        failures = distributed.all_gather_object(None if error is None else str(error))
        failure = next((message for message in failures if message is not None), None)
        if failure is not None:
            raise CheckpointError(
                f"cannot write the checkpoint {self._folder / name}: {failure}\n"
                "Earlier checkpoints are intact: free disk space or permit writing, then start "
                "again with --resume."
            )

    def close(self) -> None:
        """Wait until this rank's thread ends; a failed write is a warning."""
        self._thread.shutdown()
        if self._write_future and (error := self._write_future.exception()) is not None:
            logger.warning("cannot write the checkpoint %s/%s: %s", self, self._pending_name, error)

    def _write(
        self, name: str, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint and remove older ones; runs in rank 0's thread."""
        # After a kill there is a folder with a temporary name, or the whole checkpoint.
        temporary = self._folder / f"{name}{PARTIAL}"
        remove(temporary)
        try:
            temporary.mkdir(parents=True)
            for file, tensors in files.items():
                write_tensors(temporary / file, tensors)
            _write_text(temporary / STATE, json.dumps({**state, "versions": versions()}, indent=1))
            sums = {path.name: sha256_of(path) for path in temporary.iterdir()}
            lines = (f"{digest}  {file}\n" for file, digest in sorted(sums.items()))
            _write_text(temporary / SUMS, "".join(lines))
            sync_path(temporary)
            # A checkpoint of the same step may exist, from before a resume or a validation.
            replace_folder(temporary, self._folder / name)
        except BaseException:
            remove(temporary)
            raise
        for old_name in checkpoint_names(self._folder)[self._config.training.keep_last :]:
            # Rename first, as a kill may leave a half-removed folder.
            leftover = self._folder / f"{old_name}{PARTIAL}"
            with suppress(OSError):
                (self._folder / old_name).rename(leftover)
            remove(leftover)

    def load(self, engine: Engine, task: Task) -> Progress | None:
        """Load the newest good checkpoint into engine and task; None if there is no checkpoint.

        CheckpointError on every rank if all checkpoints are damaged, the newest is unreadable now,
        another node's disk has a newer one, or configuration or data differ.
        """
        names, damaged_names = self._on_rank_0(self._clean_up)
        self._require_newest(names)
        for name in names:
            if self._on_rank_0(partial(self._is_whole, name)):
                return self._restore(engine, task, name)
        if names or damaged_names:
            raise CheckpointError(
                f"no checkpoint in {self} is whole; to begin anew, choose another `output`"
            )
        return None

    def _clean_up(self) -> tuple[list[str], list[str]]:
        """Undo interrupted writes; return names of checkpoints, and of those renamed as damaged."""
        for backup in self._folder.glob(".step_*.replaced"):
            restore_folder(self._folder / backup.name[1:].removesuffix(".replaced"))
        for leftover in self._folder.glob(f"step_*{PARTIAL}"):
            remove(leftover)
        return checkpoint_names(self._folder), checkpoint_names(self._folder, CORRUPT)

    def _require_newest(self, names: Sequence[str]) -> None:
        """Require that no rank's disk has a newer checkpoint than rank 0's `names`."""
        # A start on other nodes may put rank 0 on a node whose disk lacks the last checkpoint.
        newest = max(map(step_of, names), default=-1)
        local_names: list[str] = []
        with suppress(OSError):
            local_names = checkpoint_names(self._folder)
        newer = next((name for name in local_names if step_of(name) > newest), None)
        rank, host = distributed.rank(), socket.gethostname()
        local_problem = newer and f"rank {rank} ({host}) has {self._folder / newer}"
        for problem in filter(None, distributed.all_gather_object(local_problem)):
            raise CheckpointError(
                f"rank 0 finds {names[0] if names else 'no checkpoint'}, but {problem}: start "
                "with rank 0 on that node, copy the checkpoint to rank 0's disk, or remove it if "
                "it is of an older run"
            )

    def _is_whole(self, name: str) -> bool:
        """Return whether all files have their checksums; else rename the checkpoint."""
        folder, corrupt = self._folder / name, self._folder / f"{name}{CORRUPT}"
        with self._readable(name):
            problem = verify(folder)
        if problem is not None:
            message = "%s is damaged (%s); renamed to %s, trying an older one"
            logger.warning(message, folder, problem, corrupt.name)
            remove(corrupt)
            folder.rename(corrupt)
        return problem is None

    def _restore(self, engine: Engine, task: Task, name: str) -> Progress:
        """Load one checkpoint into engine and task; return its progress."""
        progress = self._on_rank_0(partial(self._read_state, name))
        folder = self._folder / name if distributed.rank() == 0 else None
        try:
            with self._readable(name):
                engine.load(folder)
                task.load_extra_state(dict(broadcast_tensors(folder and folder / EXTRA)))
        except (ConfigError, CheckpointError):
            raise
        except (KeyError, ValueError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{self._folder / name} does not fit this model: {reason}"
            ) from error
        return progress

    def _read_state(self, name: str) -> Progress:
        """Return the progress in a checkpoint; CheckpointError for other settings or data."""
        path = self._folder / name
        try:
            with self._readable(name):
                state: dict[str, Any] = parse_json((path / STATE).read_bytes())
            if state["version"] != VERSION:
                raise CheckpointError(
                    f"{path} has format version {state['version']!r}; this code reads {VERSION}"
                )
            saved_config, data = state["config"], state["data"]
            progress = _PROGRESS.validate_python(state["progress"])
            differences = compare(saved_config, self._values, self._config)
            # Names of parts that one side lacks or whose hashes differ.
            changed_parts = sorted({part for part, _ in data.items() ^ self._fingerprint.items()})
            if progress.step != step_of(name):  # a copied folder, which would stay the newest
                raise ValueError(f"it is of step {progress.step}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise CheckpointError(
                f"{path}/{STATE}: not the state of a run ({reason}); move {name} away to use "
                "the checkpoint before it"
            ) from error
        if differences.fatal:
            listed = "\n".join(f"  {line}" for line in differences.fatal)
            raise CheckpointError(
                f"{path} was trained with another configuration:\n{listed}\n"
                "Restore these keys, or choose another `output`."
            )
        for line in differences.tolerated:
            logger.warning("resuming with a changed setting: %s", line)
        if changed_parts:
            raise CheckpointError(
                f"{path} was trained on other data: {', '.join(changed_parts)} changed since; "
                "restore the data, or start a run in another `output` from a model of this run"
            )
        return progress

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        """Turn an OSError of this context into a CheckpointError."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._folder / name} cannot be read now ({error}): start again with --resume "
                "when the disk answers, or move it away to use the checkpoint before it"
            ) from error

    def _on_rank_0(self, function: Callable[[], Value]) -> Value:
        """Call a function on rank 0; return its result, or raise CheckpointError, on every rank."""
        value, failure = None, None
        if distributed.rank() == 0:
            try:
                value = function()
            except (CheckpointError, ConfigError, OSError) as error:
                failure = str(error)
        value, failure = distributed.broadcast_object((value, failure))
        if failure is not None:
            raise CheckpointError(failure)
        return value


def checkpoint_names(folder: Path, suffix: str = "") -> list[str]:
    """List checkpoint folders `step_N` + `suffix`, newest first."""
    # `glob` would ignore a folder without permission to read it.
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.startswith("step_")]
    except FileNotFoundError:
        return []
    folders = [
        name
        for name in names
        if name.endswith(suffix)
        and _NAME.fullmatch(name.removesuffix(suffix))
        and stat.S_ISDIR((folder / name).stat().st_mode)
    ]
    return sorted(folders, key=lambda name: step_of(name.removesuffix(suffix)), reverse=True)


def step_of(name: str) -> int:
    """Return the step of a complete checkpoint's name."""
    return int(name.removeprefix("step_"))


def verify(folder: Path) -> str | None:
    """Return the error of a damaged checkpoint, None if all checksums match.

    OSError if a file cannot be read now.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
        sums = {file: digest for digest, file in (line.split("  ", 1) for line in lines)}
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    if STATE not in sums:
        return f"{SUMS} is incomplete"
    for file, expected in sums.items():
        try:
            # Names without folders and regular files alone: reading a pipe would block.
            if Path(file).name != file or not stat.S_ISREG((folder / file).stat().st_mode):
                raise FileNotFoundError
            actual = sha256_of(folder / file)
        except (FileNotFoundError, ValueError):  # ValueError: a null byte in a damaged name
            return f"{SUMS} names {file!r}, which is not there"
        if actual != expected:
            return f"{file} does not have its checksum"
    return None


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        sync(file)


# Returns full float32 parameters by name; collective.
Parameters = Callable[[], dict[str, Tensor]]

# Returns validation metrics, equal on all ranks; collective. `loss/...` is better if lower.
Validate = Callable[[Parameters], Mapping[str, float]]


class BestCheckpoint:
    """Validation at intervals: decides which model is the best, and when the run ends early.

    Args:
        metric: name of the metric that decides.
        every: steps between validations; the last step is always validated.
        patience: validations in a row without a better result after which the run ends; None: no
            early end.
        validation_data: identity of the data; a resumed run forgets the best result on other data.
    """

    def __init__(
        self,
        validate: Validate,
        metric: str,
        every: int,
        patience: int | None = None,
        validation_data: str = "",
    ) -> None:
        self._validate, self._metric, self._every = validate, metric, every
        self._patience, self._validation_data = patience, validation_data
        self._sign = -1 if metric.startswith("loss/") else 1

    def is_due(self, progress: Progress, total_steps: int) -> bool:
        """Return whether the model is to be validated after `progress.step`."""
        step = progress.step
        return step > progress.validated_step and (step % self._every == 0 or step >= total_steps)

    def validate(
        self, progress: Progress, parameters: Parameters
    ) -> tuple[Mapping[str, float], bool]:
        """Validate the model and update `progress`.

        Return all metrics, and whether the model is the best so far.
        """
        with force_eager():
            metrics = self._validate(parameters)
        self.require_metric(metrics)
        value = metrics[self._metric]
        # A resumed run may have another metric or other data.
        if progress.best is not None and progress.metric != self._metric:
            progress.best = progress.best_metrics.get(self._metric)
            progress.validations_since_best = 0
        if progress.best is not None and progress.validation_data != self._validation_data:
            progress.best, progress.validations_since_best = None, 0
        progress.metric, progress.validation_data = self._metric, self._validation_data
        progress.validated_step = progress.step
        is_best = math.isfinite(value) and (
            progress.best is None or self._sign * value > self._sign * progress.best
        )
        if is_best:
            progress.best, progress.best_step = value, progress.step
            progress.best_metrics, progress.validations_since_best = dict(metrics), 0
        else:
            progress.validations_since_best += 1
        return metrics, is_best

    def require_metric(self, metrics: Collection[str]) -> None:
        """Require that the deciding metric is among `metrics`."""
        if self._metric not in metrics:
            raise ConfigError(
                f"training.metric: there is no metric {self._metric!r}; choose one of "
                f"{', '.join(metrics)}"
            )

    def is_exhausted(self, progress: Progress) -> bool:
        """Return whether `patience` validations in a row had no better result."""
        if self._patience is None or progress.validation_data != self._validation_data:
            return False
        return progress.validations_since_best >= self._patience
