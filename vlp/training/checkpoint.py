"""Checkpoints: whole or absent, checked when read, and tied to what they were trained as.

`step_N/` is written as `step_N.tmp/`, synced and renamed, so a folder with the final name is
complete. It holds the engine's rank-free weights and optimiser state, the task's extra state
(teacher, queue), `state.json`, and `SHA256SUMS`, which `sha256sum -c` reads too.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from vlp import distributed
from vlp.distributed import broadcast_tensors
from vlp.io import (
    parse_json,
    replace_folder,
    restore_folder,
    sha256_of,
    sync,
    sync_folder,
    write_tensors,
)
from vlp.tasks.task import Task
from vlp.training.config import RunConfig
from vlp.training.engines.base import Engine
from vlp.training.logging.progress import Progress
from vlp.training.logging.run_record import versions
from vlp.training.resume_check import compare

logger = logging.getLogger(__name__)

VERSION = 1
_PROGRESS = TypeAdapter(Progress)
STATE = "state.json"
SUMS = "SHA256SUMS"
EXTRA = "extra.safetensors"
_STEP = re.compile(r"step_\d+")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the message is meant for the person."""


class Checkpoints:
    """The `checkpoints/` folder of a run; its methods are collective, rank 0 alone touches it.

    Args:
        folder: where they lie.
        config: of the run.
        fingerprint: hashes of the data's parts by name.
    """

    def __init__(
        self, folder: Path, config: RunConfig, fingerprint: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._fingerprint = dict(fingerprint or {})
        self._keep_last, self._keep_every = config.training.keep_last, config.training.keep_every
        self._config = config
        self._values = config.model_dump(mode="json")

    def save(self, engine: Engine, task: Task, progress: Progress) -> None:
        """Write `step_N/`, then remove what `training.keep_last` and `keep_every` do not keep.

        Raises:
            CheckpointError: on every rank when the folder cannot be written (a full disk, say).
                The partial folder is gone and earlier checkpoints are as they were.
        """
        final = self.folder / f"step_{progress.step}"
        partial = final.with_suffix(".tmp")
        failure: str | None = None
        target: Path | None = None
        try:
            if engine.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                target = partial
        except OSError as error:
            failure = str(error)
        try:
            engine.save(target)  # collective, so also after a failure
            extra = distributed.on_rank_0(task.extra_state())
            if target is not None:
                write_tensors(target / EXTRA, extra)
                self._write_state(target, engine, progress)
                sync_folder(partial)
                replace_folder(partial, final)  # the same step, after a fall-back or a validation
        except OSError as error:
            failure = str(error)
        if engine.rank == 0 and failure is not None:
            shutil.rmtree(partial, ignore_errors=True)
        failure = distributed.from_rank_0(failure)
        if failure is not None:
            raise CheckpointError(
                f"cannot write the checkpoint {final}: {failure}\n"
                f"Earlier checkpoints are untouched; make room and start again with --resume."
            )
        if engine.rank == 0:
            for path in self._steps()[self._keep_last :]:
                if self._keep_every is None or _step(path) % self._keep_every:
                    shutil.rmtree(path, ignore_errors=True)

    def load(self, engine: Engine, task: Task) -> Progress | None:
        """Take up the newest good checkpoint; None when there is none at all.

        A damaged one is set aside as `step_N.corrupt` with a warning, and the one before it is
        used.

        Raises:
            CheckpointError: on every rank when no checkpoint is whole, or the newest good one was
                written with another configuration or on other data (what differs is named).
        """
        found: tuple[str | None, dict[str, Any], str | None] = (None, {}, None)
        path: Path | None = None
        if engine.rank == 0:
            try:
                path, state = self._newest()
                found = (None if path is None else str(path), state, None)
            except (CheckpointError, OSError) as error:
                found = (None, {}, str(error))
        name, state, failure = distributed.from_rank_0(found)
        if failure is not None:
            raise CheckpointError(failure)
        if name is None:
            return None
        try:
            engine.load(path)
            task.load_extra_state(dict(broadcast_tensors(path and path / EXTRA)))
        except (KeyError, ValueError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{name} does not fit this model: {reason}") from error
        return _PROGRESS.validate_python(state["progress"])

    def _newest(self) -> tuple[Path | None, dict[str, Any]]:
        for aside in self.folder.glob(".step_*.replaced"):
            restore_folder(self.folder / aside.name[1:].removesuffix(".replaced"))
        for leftover in self.folder.glob("step_*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        steps = self._steps()
        for path in steps:
            problem = verify(path)
            if problem is None:
                return path, self._read_state(path)
            aside = path.with_suffix(".corrupt")
            logger.warning(
                "%s is damaged (%s); set aside as %s, trying an older one",
                path,
                problem,
                aside.name,
            )
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        if steps:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole; to begin anew, choose another `output`"
            )
        return None, {}

    def _read_state(self, path: Path) -> dict[str, Any]:
        try:
            state: dict[str, Any] = parse_json((path / STATE).read_text(encoding="utf-8"))
            version, saved = state["version"], state["config"]
            _PROGRESS.validate_python(state["progress"])
            differences = compare(saved, self._values, self._config)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise CheckpointError(
                f"{path / STATE}: not the state of a run ({reason}); move {path.name} away, and "
                "the checkpoint before it is used"
            ) from error
        if version != VERSION:
            raise CheckpointError(
                f"{path} has format version {version!r}; this code reads {VERSION}"
            )
        if differences.fatal:
            listed = "\n".join(f"  {line}" for line in differences.fatal)
            raise CheckpointError(
                f"{path} was trained with another configuration:\n{listed}\n"
                "Restore these keys, or choose another `output`."
            )
        for line in differences.tolerated:
            logger.warning("resuming with a changed setting: %s", line)
        self._require_data(path, state.get("data", self._fingerprint))
        return state

    def _require_data(self, path: Path, saved: Mapping[str, str]) -> None:
        parts = sorted(dict(saved.items() ^ self._fingerprint.items()))
        if not parts:
            return
        changed = f"{path} was trained on other data: {', '.join(parts)} changed since"
        if not self._config.training.accept_changed_data:
            raise CheckpointError(
                f"{changed}; restore what changed, choose another `output`, or go on with "
                "training.accept_changed_data=true"
            )
        logger.warning("%s, which training.accept_changed_data accepts", changed)

    def _write_state(self, folder: Path, engine: Engine, progress: Progress) -> None:
        state = {
            "version": VERSION,
            "progress": asdict(progress),
            "world_size": engine.world_size,
            "config": self._values,
            "data": self._fingerprint,
            "versions": versions(),
        }
        _write_text(folder / STATE, json.dumps(state, indent=1))
        sums = [f"{sha256_of(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
        _write_text(folder / SUMS, "".join(sums))

    def _steps(self) -> list[Path]:
        """List complete folders, the newest first."""
        complete = [path for path in self.folder.glob("step_*") if _STEP.fullmatch(path.name)]
        return sorted(filter(Path.is_dir, complete), key=_step, reverse=True)


def _step(path: Path) -> int:
    """Return the step of a complete folder."""
    return int(path.name.removeprefix("step_"))


def verify(path: Path) -> str | None:
    """Return what is wrong with a checkpoint folder; None when all checksums fit."""
    try:
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
        sums = [line.split("  ", 1) for line in lines]
        if STATE not in (name for _, name in sums):
            return f"{SUMS} is incomplete"
        for expected, name in sums:
            if Path(name).name != name or not (path / name).is_file():
                return f"{SUMS} names {name!r}, which is no file of it"
            if sha256_of(path / name) != expected:
                return f"{name} does not have its checksum"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        sync(file)
