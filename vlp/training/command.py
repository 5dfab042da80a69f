"""A training command: from a configuration file to an exit code, on every rank.

Exit codes: 0 finished; 75 (`REQUEUE`) stopped by a signal, its launcher's end or a silent store,
resumable with --resume; 2 unusable configuration or run folder; 1 any other error.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from vlp import distributed
from vlp.config import ConfigError, load_config
from vlp.data.limits import set_limits
from vlp.data.shards.sample_files import DataError, PausedDataError, UnreadableDataError
from vlp.io import redact
from vlp.lock import FolderLock
from vlp.models.towers import require_whole_batches
from vlp.training.checkpoints import BestCheckpoint, CheckpointError
from vlp.training.config import RunConfig, TrainingConfig
from vlp.training.engines.compile import checkpoint_activations, compile_task
from vlp.training.engines.engine import Engine
from vlp.training.engines.environment import (
    allow_open_files,
    check_accelerate_flags,
    prepare_environment,
    start_deepspeed,
    warn_if_emulated,
)
from vlp.training.log import require_access
from vlp.training.loop import NonFiniteError, train
from vlp.training.run_folder import RunFolder, require_same_on_all_ranks
from vlp.training.stop_requests import REQUEUE, StopSignals, leave

_DATA_REMEDIES: dict[type[DataError], str] = {
    PausedDataError: "; paused: continue with --resume when the store is back",
    UnreadableDataError: "; continue with --resume when it is readable; a pretraining can skip its "
    "samples: data.outages.policy=skip",
}
# Part of PyTorch's message when loader processes lack memory -> remedy.
_ENLARGE_SHM = "enlarge /dev/shm (docker run --shm-size), or lower the workers of the data"
_LOADER_REMEDIES = {
    "allocate shared memory": _ENLARGE_SHM,
    "killed by signal: Bus error": _ENLARGE_SHM,
    "killed by signal: Killed": "where memory ran out, lower the workers of the data or the batch",
}

# Most open files are sockets, pipes of loader processes and tensors that they send.
_MIN_OPEN_FILES = 256

AnyRun = TypeVar("AnyRun", bound=RunConfig)
# Returns the task (an `nn.Module`) and its data; ConfigError if they do not fit.
Build = Callable[[AnyRun], tuple[Any, Any]]
# Returns the validation, from configuration, task and data; None without validation data.
BuildValidation = Callable[[AnyRun, Any, Any], BestCheckpoint | None]


def run_training(
    path: str | Path,
    schema: type[AnyRun],
    overrides: Sequence[str],
    resume: bool,
    build: Build[AnyRun],
    build_validation: BuildValidation[AnyRun] | None = None,
) -> int:
    """Run one rank of a training; return its exit code.

    Args:
        path: the configuration file.
        overrides: `key.sub=value` of the command line.
        resume: continue from the newest good checkpoint in `output`, or start without one. If
            `path` is the config.yaml of a run, `output` is its folder.
    """
    try:
        prepare_environment()
        config = load_config(
            path, schema, [*overrides, *(_output_override(path, overrides) if resume else ())]
        )
    except ConfigError as error:
        return _refuse(str(error))
    if "MASTER_ADDR" not in os.environ:
        return _refuse("MASTER_ADDR is not set: set it to the name of the first node")
    if (files := allow_open_files()) < _MIN_OPEN_FILES:
        return _refuse(
            f"only {files} open files are allowed; raise `ulimit -n` to {_MIN_OPEN_FILES} or more"
        )
    set_limits(config.limits)
    try:
        with StopSignals() as signals:
            timeout = timedelta(seconds=config.training.timeout)
            start_group = None if config.training.deepspeed is None else start_deepspeed
            distributed.start(timeout, start_group)
            code = _run(config, resume, build, build_validation, signals)
            if code == REQUEUE:
                # Launchers repeat SIGTERM, which would kill the process without these handlers.
                leave(code)
            distributed.end()
        return code
    except BaseException as error:
        with suppress(BrokenPipeError):  # a pipe's reader may have ended
            _explain(error)
        # The other ranks wait for this one in a collective call. Exit without waiting for them, so
        # that the launcher sees the failure and ends them.
        if isinstance(error, PausedDataError):
            leave(REQUEUE)
        leave(2 if isinstance(error, ConfigError) else 1)


def _output_override(path: str | Path, overrides: Sequence[str]) -> list[str]:
    """Return the override `output=FOLDER` if `path` is a run's config.yaml, else no override."""
    # The folder may have moved since config.yaml was written.
    folder = RunFolder(Path(path).parent, resume=True)
    is_run_config = Path(path).name == folder.config.name and folder.starts.is_file()
    if not is_run_config or any(override.startswith("output=") for override in overrides):
        return []
    return [f"output={json.dumps(str(folder.path))}"]


def _run(
    config: AnyRun,
    resume: bool,
    build: Build[AnyRun],
    build_validation: BuildValidation[AnyRun] | None,
    signals: StopSignals,
) -> int:
    """Build task, data and engine, and train, in a running process group; return the exit code."""
    best: BestCheckpoint | None = None
    with ExitStack() as stack:
        try:
            with distributed.raise_on_all_ranks(ConfigError):
                check_accelerate_flags(config.training)
                if distributed.rank() == 0:
                    require_access(config.training.trackers)
                    stack.enter_context(FolderLock(Path(config.output)))
                # For other ranks the folder may be in use already: by rank 0.
                folder = RunFolder(config.output, resume or distributed.rank() > 0)
                if resume and distributed.rank() == 0:
                    folder.require_run()
                make_engine = _engine_class(config.training)
                task, data = build(config)
                require_whole_batches(
                    task, distributed.world_size(), _recompute_key(config.training)
                )
            require_same_on_all_ranks(config, data.fingerprint)
            if build_validation is not None:
                best = build_validation(config, task, data)
            checkpoint_activations(task, config.training.activation_checkpointing)
            compile_task(task, config.training.compile, distributed.default_device())
            engine = make_engine(task, config.training)
        except ConfigError as error:
            return _refuse(str(error))
        warn_if_emulated("training.precision", config.training.precision)
        report = train(config, task, data, engine, folder, resume, best, signals)
    # A launcher kills all ranks when the first one ends: wait until the report is written.
    distributed.barrier()
    return REQUEUE if report["ended"] == "stopped" else 0


def _recompute_key(training: TrainingConfig) -> str | None:
    """Return the key of a setting that runs the forward pass in chunks or twice; else None."""
    if getattr(training, "grad_cache", None):
        return "training.grad_cache"
    is_recomputed = training.activation_checkpointing != "none"
    return "training.activation_checkpointing" if is_recomputed else None


def _engine_class(training: TrainingConfig) -> Callable[[Any, TrainingConfig], Engine]:
    """Return the class of `training.engine`; ConfigError if it cannot run on these ranks."""
    if training.deepspeed is None:
        from vlp.training.engines.ddp import DdpEngine

        training.require_equal_shares(distributed.world_size())
        return DdpEngine
    from vlp.training.engines.deepspeed import DeepSpeedEngine, deepspeed_config

    deepspeed_config(training, distributed.world_size())
    return DeepSpeedEngine


def _refuse(message: str) -> int:
    """Print an error once on each node; return the exit code."""
    # When a rank exits, the launcher ends the node's other ranks: let the printing rank exit first.
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if local_rank == "0" or not local_rank.isdecimal():
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)
    return 2


def _explain(error: BaseException) -> None:
    """Print the error that ended this rank; with a traceback if its cause is unknown."""
    rank = os.environ.get("RANK", "0")
    message = str(error.__cause__ or error)
    loader_remedy = next((text for part, text in _LOADER_REMEDIES.items() if part in message), None)
    if isinstance(error, CheckpointError | NonFiniteError | ConfigError):  # raised on all ranks
        if rank == "0":
            print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, DataError):
        remedy = _DATA_REMEDIES.get(type(error), "")
        print(f"error on rank {rank}: {error.plain_message}{remedy}", file=sys.stderr)
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        print(
            f"error on rank {rank}: {error}; free disk space, or raise `ulimit -f`, then --resume",
            file=sys.stderr,
        )
    elif loader_remedy:
        reason = message.strip(". \n").splitlines()[-1]
        print(f"error on rank {rank}: {reason}; {loader_remedy}, then --resume", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print(f"rank {rank} was interrupted", file=sys.stderr)
    elif distributed.is_lost_peer(error):
        print(f"rank {rank} lost another rank; see the other rank's message", file=sys.stderr)
    elif distributed.is_late_peer(error):
        print(
            f"rank {rank} waited for another rank longer than training.timeout: that rank hangs or "
            "never started, or the network is cut; --resume continues from the newest checkpoint",
            file=sys.stderr,
        )
    else:
        print(f"error on rank {rank}:", file=sys.stderr)
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr)
