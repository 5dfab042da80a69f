"""Set-up of a process before it joins the other ranks, and the start of DeepSpeed."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from vlp import distributed
from vlp.config import ConfigError
from vlp.training.config import TrainingConfig
from vlp.training.engines.compile import resolve_compile

# Options of glibc.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST, _NEVER = 2**31 - 1, -1


def prepare_environment() -> None:
    """Set the rank's variables that are missing, so that a plain `python` is rank 0 of 1.

    Without a GPU, also use the rank's share of the cores, and keep freed memory. Raises ConfigError
    if the variables do not describe a rank.
    """
    _require_rank(_read_slurm_ranks())
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", "0")
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    if not torch.cuda.is_available():
        keep_freed_memory()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(cores_of_rank())


def check_accelerate_flags(training: TrainingConfig) -> None:
    """Require that flags of `accelerate launch` agree with the configuration."""
    compiles = resolve_compile(training.compile, distributed.default_device()) != "none"
    micro_steps = str(training.gradient_accumulation_steps)
    # Flag -> key that a training reads instead, and accepted values: default, value of the key.
    flags = {
        "mixed_precision": ("precision", "no", training.precision),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", "1", micro_steps),
        "dynamo_backend": ("compile", "no", "inductor" if compiles else "no"),
        "use_deepspeed": ("engine", "false", "true" if training.deepspeed else "false"),
        "use_fsdp": ("engine", "false", "false"),
    }
    for flag, (key, *accepted_values) in flags.items():
        value = os.environ.get(f"ACCELERATE_{flag.upper()}", accepted_values[0]).lower()
        if value not in accepted_values:
            raise ConfigError(f"accelerate's --{flag} {value} is ignored; set training.{key}")


def allow_open_files() -> int:
    """Raise this process's limit of open files as far as the system permits; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2**20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def _read_slurm_ranks() -> tuple[str, ...]:
    """Set a launcher's variables from Slurm's, for `srun -n N python launch/pretrain.py`.

    Returns the names of the variables that the user may have set wrongly.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in os.environ or tasks in ("", "1") or "SLURM_PROCID" not in os.environ:
        return ()
    local = re.split("[(,]", os.environ.get("SLURM_STEP_TASKS_PER_NODE", tasks))[0]  # "8(x2),4"
    os.environ |= {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": os.environ.get("SLURM_LOCALID", ""),
        "LOCAL_SIZE": local,
    }
    # On several nodes MASTER_ADDR must be set, as pretrain.slurm does.
    if os.environ.get("SLURM_STEP_NUM_NODES", "1") == "1":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # One port for all ranks, which differs between jobs.
    port = 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000
    os.environ.setdefault("MASTER_PORT", str(port))
    return "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "MASTER_PORT"


def _require_rank(slurm_names: Sequence[str]) -> None:
    """Require valid variables of a rank, and RANK if there is more than one."""
    # Without RANK every process would be rank 0, and wait for others. LOCAL_RANK may be missing, as
    # Kubernetes' PyTorchJob starts one process on each node.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    values = {name: os.environ[name] for name in names if name in os.environ}
    rank, world_size = values.get("RANK", "0"), values.get("WORLD_SIZE", "1")
    is_complete = "RANK" in values or world_size == "1"
    if is_complete and all(map(str.isdecimal, values.values())) and int(rank) < int(world_size):
        return
    variables = {name: os.environ.get(name, "") for name in slurm_names} or values
    listed = " ".join(f"{name}={value}" for name, value in variables.items())
    raise ConfigError(
        f"the environment has {listed}: not the numbers of a rank; unset these variables to train "
        "in one process, or start the ranks by a launcher"
    )


def cores_of_rank() -> int:
    """Return this rank's share of the CPU cores that the process may use, at least 1."""
    local = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // local)


def keep_freed_memory() -> None:
    """Let the process reuse freed memory for its next tensors, where the C library is glibc."""
    # By default glibc returns large blocks to the system, and every step maps and clears new pages.
    # With these options the process stays at its peak size.
    # One arena for all threads: those of further threads, as autograd's, hold no large blocks.
    options = {_TRIM_THRESHOLD: _NEVER, _MMAP_THRESHOLD: _LARGEST, _ARENA_MAX: 1}
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        for option, value in options.items():
            library.mallopt(option, value)


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_emulated(device: torch.device, precision: str) -> bool:
    """Return whether a device is a CPU that has no instructions for the precision."""
    is_half = precision in ("bf16", "fp16")
    if device.type != "cpu" or not is_half or not torch.backends.mkldnn.is_available():
        return False
    return not getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported")()


def warn_if_emulated(setting: str, precision: str) -> None:
    """Warn on rank 0 if this CPU only emulates the precision; `setting` names the option."""
    if distributed.rank() == 0 and is_emulated(distributed.default_device(), precision):
        print(
            f"{setting}: this CPU has no instructions for {precision}; float32 is several times as "
            "fast here",
            file=sys.stderr,
        )


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Make `torch.compile` return functions unchanged within this context."""
    compile_ = torch.compile
    torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


def start_deepspeed(timeout: timedelta) -> None:
    """Join the other ranks through DeepSpeed."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed decorates its Muon optimiser, unused here, with `torch.compile`, which would import
    # PyTorch's compiler for a second or two.
    with _without_compiler(), suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    # Before any tensor is on a device: the default is the first device on every rank.
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On a CPU DeepSpeed would compile a shared-memory operation, which only inference calls; the
    # machine may have no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
