"""A process group that DeepSpeed starts, without what nothing here uses of DeepSpeed."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch


@contextmanager
def _compiling_nothing() -> Iterator[None]:
    """Make `torch.compile` leave functions as they are."""
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

    # DeepSpeed decorates its Muon optimiser, which nothing here uses, with `torch.compile`; that
    # alone imports PyTorch's compiler, a second or two of every start.
    with _compiling_nothing(), suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    # Before anything is placed on a device: the first one is the default on every rank.
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed would compile a shared-memory operation at its first start on a CPU. Only its
    # inference calls it, and a machine that trains may have no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
