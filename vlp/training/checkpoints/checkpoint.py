"""Checkpoints: whole or absent, checked when read, and tied to what they were trained as.

Training waits for a copy of the state; what follows is done in a thread beside it. `step_N/` is
written as `step_N.tmp/`, synced and renamed, so a folder with the final name is complete. It holds
rank-free weights and optimiser state and the task's extra state (teacher, queue), or the shards of
all ranks; `state.json`, and `SHA256SUMS`, which `sha256sum -c` reads too.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from vlp import distributed
from vlp.config import ConfigError
from vlp.distributed import broadcast_tensors
from vlp.io import sha256_of, sync, sync_path, write_tensors
from vlp.tasks.task import Task
from vlp.training.checkpoints.places import (
    CORRUPT,
    EXTRA,
    METADATA,
    PARTIAL,
    STATE,
    SUMS,
    LocalPlace,
    place_of,
    problem_of,
    read_sums,
    step_of,
    verify,
    write_sums,
)
from vlp.training.checkpoints.state import CheckpointError, States
from vlp.training.config import RunConfig
from vlp.training.engines.base import Engine, ShardedEngine, saved_buffers
from vlp.training.logging.progress import Progress
from vlp.training.logging.run_record import this_host, versions

if TYPE_CHECKING:
    from vlp.training.checkpoints.shards import Shards

__all__ = ["SUMS", "CheckpointError", "Checkpoints", "verify"]

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

PATIENCE = 65.0
"""Seconds for which a shared file system (NFS) may not show what another node has made."""


class Checkpoints:
    """The `checkpoints/` folder of a run; its methods are collective, but for `close`.

    Full checkpoints are touched by rank 0 alone, sharded ones by all ranks.

    Args:
        folder: of the run's checkpoints, unless `training.checkpoint_folder` names another place.
        config: of the run.
        fingerprint: hashes of the data's parts by name.

    Raises:
        ConfigError: see `RemotePlace`; or ranks of sharded checkpoints have folders of their own.
    """

    def __init__(
        self, folder: Path, config: RunConfig, fingerprint: Mapping[str, str] | None = None
    ) -> None:
        training = config.training
        self._place = place_of(training.checkpoint_folder or folder, folder)
        self._keep_last, self._keep_every = training.keep_last, training.keep_every
        self._sharded = training.checkpoint_format == "sharded"
        self._timeout = timedelta(seconds=training.timeout)
        self._states = States(config, fingerprint or {})
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._newest: str | None = None  # the last that was loaded or written
        self._writing: str | None = None
        self._work: Future[None] | None = None
        if self._sharded:
            self._shards  # noqa: B018 (ranks meet for it now, not within a save)
            self._require_shared()

    def __str__(self) -> str:
        return self._place / ""

    @cached_property
    def _shards(self) -> Shards:
        # Imported here: torch.distributed.checkpoint takes its time, and few runs need it.
        from vlp.training.checkpoints.shards import Shards

        return Shards(self._timeout)

    def _require_shared(self) -> None:
        """Require now, not after the first steps to be saved, that ranks write into one folder."""
        if not isinstance(self._place, LocalPlace) or distributed.world_size() == 1:
            return
        folder = self._place.folder

        def mark() -> str:
            folder.mkdir(parents=True, exist_ok=True)
            return Path(mkdtemp(prefix=".shared-", dir=folder)).name

        name = self._on_rank_0(mark)
        try:
            with distributed.agreed(ConfigError):
                late = time.monotonic() + PATIENCE
                while not (folder / name).is_dir():
                    if time.monotonic() > late:
                        raise ConfigError(self._unseen(folder))
                    time.sleep(0.1)
        finally:
            if distributed.rank() == 0:
                (folder / name).rmdir()
                with suppress(OSError):  # it holds checkpoints
                    folder.rmdir()

    def _unseen(self, place: object) -> str:
        return (
            f"rank {distributed.rank()} does not see {place} of rank 0: sharded checkpoints need a "
            "folder that all nodes share, or a URL"
        )

    def save(self, engine: Engine, task: Task, progress: Progress, wait: bool = True) -> None:
        """Write `step_N/`, then remove what `training.keep_last` and `keep_every` do not keep.

        An earlier one that is still being written is waited for.

        Args:
            engine, task, progress: what is saved, as it is now.
            wait: until it is written; else until it is copied.

        Raises:
            CheckpointError: see `wait`.
        """
        self.wait()
        name = self._place.new_name(progress.step, self._newest)
        state = self._states.of(progress)
        if self._sharded:
            assert isinstance(engine, ShardedEngine)  # the configuration sees to it
            files = engine.held() | {EXTRA: task.extra_state()}
            copies = self._shards.copy(files, saved_buffers(engine.module))
            self._work = self._thread.submit(self._write_shards, name, copies, state)
        else:
            files = engine.snapshot() | {EXTRA: distributed.on_rank_0(task.extra_state())}
            if engine.rank == 0:
                self._work = self._thread.submit(self._write, name, files, state)
        self._writing = name
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that was saved last is written.

        Raises:
            CheckpointError: on every rank when it cannot be written (a full disk, say). The
                partial folder is gone and earlier checkpoints are as they were.
        """
        if self._writing is None:
            return
        name, self._writing = self._writing, None
        error = self._work.exception() if self._work else None
        self._work = None
        if error is not None and not isinstance(error, OSError | ConfigError):
            raise error
        failures = distributed.gather_to_all(None if error is None else str(error))
        failure = next((found for found in failures if found is not None), None)
        if failure is not None:
            raise CheckpointError(
                f"cannot write the checkpoint {self._place / name}: {failure}\n"
                f"Earlier checkpoints are untouched; make room and start again with --resume."
            )
        self._newest = name

    def close(self) -> None:
        """Let this rank's thread write what it is writing; a failure is a warning."""
        self._thread.shutdown()
        if self._work and (error := self._work.exception()) is not None:
            logger.warning("cannot write the checkpoint %s%s: %s", self, self._writing, error)

    def _write(
        self, name: str, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> None:
        """Write a full checkpoint; in the thread, on rank 0."""
        folder = self._place.scratch / f"{name}{PARTIAL}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            for file, tensors in files.items():
                write_tensors(folder / file, tensors)
            self._commit(folder, name, {f: sha256_of(folder / f) for f in files}, state)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _write_shards(self, name: str, copies: dict[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a sharded checkpoint; in the thread of every rank."""
        main = distributed.rank() == 0
        folder = self._place.scratch / f"{name}{PARTIAL}"
        if main:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            sums: dict[str, str] = {}
            failure: OSError | ConfigError | None = None
            own = self._shards.write(copies, folder)
            try:
                sums = {file: sha256_of(folder / file) for file in own}
                self._place.send(folder, name, own)
            except (OSError, ConfigError) as error:  # the others wait for word
                failure = error
            said = self._shards.gather((sums, None if failure is None else str(failure)))
            if problem := next((text for _, text in said if text is not None), None):
                raise failure or OSError(problem)
            if main:
                all_sums = {file: digest for theirs, _ in said for file, digest in theirs.items()}
                self._commit(folder, name, all_sums, state)
        except BaseException:
            if main:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _commit(
        self, folder: Path, name: str, sums: Mapping[str, str], state: Mapping[str, Any]
    ) -> None:
        """Add what rank 0 has to say, make the checkpoint complete, and remove older ones."""
        _write_text(folder / STATE, json.dumps({**state, "versions": versions()}, indent=1))
        added = [path for path in folder.iterdir() if path.name not in sums]
        sums = {**sums, **{path.name: sha256_of(path) for path in added}}
        write_sums(folder, sums)
        sync_path(folder)
        # The same step, after a fall-back or a validation, replaces what is there.
        self._place.publish(folder, name, [*sums, SUMS])
        names = self._place.names()
        steps = sorted({step_of(each) for each in names}, reverse=True)
        kept = set(steps[: self._keep_last])
        if self._keep_every is not None:
            kept |= {step for step in steps if step % self._keep_every == 0}
        for each in names:
            if step_of(each) not in kept or (step_of(each) == step_of(name) and each != name):
                self._place.remove(each)

    def require_none(self) -> None:
        """Require that a run that is not resumed finds no checkpoints in its place.

        Raises:
            CheckpointError: on every rank, there are some.
        """
        if self._on_rank_0(self._place.names):
            raise CheckpointError(
                f"training.checkpoint_folder: {self} holds checkpoints; continue their "
                "run with --resume, or choose another folder"
            )

    def load(self, engine: Engine, task: Task) -> Progress | None:
        """Take up the newest good checkpoint; None when there is none at all.

        One whose content is wrong is set aside as `step_N.corrupt` with a warning, and the one
        before it is used. One that cannot be read now stays, and ends the run.

        Raises:
            CheckpointError: on every rank when no checkpoint is whole, the newest cannot be read,
                another node's own disk has a newer one, or the newest good one was written with
                another configuration or on other data (what differs is named).
        """
        found = self._on_rank_0(self._cleaned)
        self._require_newest(found)
        for name in found:
            sums, problem = self._on_rank_0(partial(self._sums, name))
            sharded = METADATA in (file for _, file in sums)
            if problem is None:
                problem = self._problem(name, sums, sharded)
            if problem is None:
                return self._take_up(engine, task, name, sharded)
            self._on_rank_0(partial(self._set_aside, name, problem))
        if found or self._on_rank_0(self._place.damaged):
            raise CheckpointError(
                f"no checkpoint in {self} is whole; to begin anew, choose another `output`"
            )
        return None

    def _require_newest(self, found: Sequence[str]) -> None:
        """Require that no other rank sees a newer checkpoint: rank 0 may have changed nodes."""
        newest = max(map(step_of, found), default=-1)
        own: list[str] = []
        if isinstance(self._place, LocalPlace):
            with suppress(OSError):  # what a rank cannot read is of no use to it
                own = self._place.names()
        newer = next((name for name in own if step_of(name) > newest), None)
        place = f"rank {distributed.rank()} ({this_host()}) has {self._place / (newer or '')}"
        for elsewhere in filter(None, distributed.gather_to_all(newer and place)):
            raise CheckpointError(
                f"rank 0 finds {found[0] if found else 'no checkpoint'}, but {elsewhere}: start "
                "with rank 0 on that node, copy the checkpoint to rank 0's disk, or remove it if "
                "it is of an older run"
            )

    def _cleaned(self) -> list[str]:
        self._place.clean()
        return self._place.names()

    def _sums(self, name: str) -> tuple[list[tuple[str, str]], str | None]:
        try:
            return read_sums(self._place, name), None
        except (FileNotFoundError, ValueError) as error:
            if isinstance(error, ConfigError):  # a store that does not answer has lost nothing
                raise
            return [], str(error)
        except OSError as error:
            raise CheckpointError(self._unread(name, error)) from error

    def _problem(self, name: str, sums: list[tuple[str, str]], sharded: bool) -> str | None:
        """Return on every rank what is wrong with the files; ranks share those of a sharded one."""
        rank = distributed.rank()
        own: str | None = None
        failure: str | None = None
        with distributed.agreed(ConfigError):
            if sharded and not self._place.has(name):
                raise ConfigError(self._unseen(self._place / name))
            share = sums[rank :: distributed.world_size()] if sharded else sums
            try:
                own = problem_of(self._place, name, share) if sharded or rank == 0 else None
            except OSError as error:
                failure = self._unread(name, error)
        said = distributed.gather_to_all((own, failure))
        if failures := [text for _, text in said if text is not None]:
            raise CheckpointError(failures[0])
        return next((text for text, _ in said if text is not None), None)

    def _unread(self, name: str, error: OSError) -> str:
        return (
            f"{self._place / name} cannot be read now ({error}) and is left as it is; start again "
            "with --resume when the disk answers, or move it away, and the one before it is used"
        )

    def _set_aside(self, name: str, problem: str) -> None:
        logger.warning(
            "%s is damaged (%s); set aside as %s, trying an older one",
            self._place / name,
            problem,
            f"{name}{CORRUPT}",
        )
        self._place.set_aside(name)

    def _take_up(self, engine: Engine, task: Task, name: str, sharded: bool) -> Progress:
        progress = self._on_rank_0(partial(self._states.read, self._place, name))
        place = self._place / name
        if sharded and not isinstance(engine, ShardedEngine):
            raise CheckpointError(
                f"{place} is sharded, and only the engines ddp and fsdp read it; for this one, "
                f"write it anew in full by `vlp convert-checkpoint {place} NEW`"
            )
        try:
            with ExitStack() as held:
                if isinstance(engine, ShardedEngine) and sharded:
                    extra = self._shards.read(engine, self._place, name)
                else:
                    path = self._on_rank_0(lambda: held.enter_context(self._place.fetched(name)))
                    folder = path if distributed.rank() == 0 else None
                    engine.load(folder)
                    extra = dict(broadcast_tensors(folder and folder / EXTRA))
                task.load_extra_state(extra)
        except (ConfigError, CheckpointError):
            raise
        except OSError as error:
            raise CheckpointError(self._unread(name, error)) from error
        except (KeyError, ValueError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{place} does not fit this model: {reason}") from error
        self._newest = name
        return progress

    def _on_rank_0(self, work: Callable[[], Value]) -> Value:
        """Return what rank 0 finds, on every rank.

        Raises:
            CheckpointError: on every rank, rank 0 cannot find it.
        """
        found: tuple[Any, str | None] = (None, None)
        if distributed.rank() == 0:
            try:
                found = (work(), None)
            except (CheckpointError, ConfigError, OSError) as error:
                found = (None, str(error))
        value, failure = distributed.from_rank_0(found)
        if failure is not None:
            raise CheckpointError(failure)
        return value


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        sync(file)
