"""`report.json`: how a run went."""

from __future__ import annotations

import logging
import platform
import resource
from typing import Any

import torch

from vlp.io import write_json
from vlp.training.engines.base import Engine
from vlp.training.logging.log import flatten
from vlp.training.logging.progress import Progress
from vlp.training.run_folder import RunFolder

logger = logging.getLogger(__name__)


def write_report(
    folder: RunFolder | None,
    ended: str,
    progress: Progress,
    record: dict[str, Any],
    engine: Engine,
    total: int,
) -> dict[str, Any]:
    """Summarise a run that ended as `finished`, `stopped` (by a signal), `paused` or `failed`.

    Args:
        folder: where to write; None on ranks other than 0, and nothing is written.
        ended: how the run ended.
        progress: its counters, of all starts together.
        record: the last log line.
        engine: for the number of ranks and the device.
        total: steps of the whole run.
    """
    report: dict[str, Any] = {
        "ended": ended,
        "step": progress.step,
        "total_steps": total,
        "samples": progress.samples,
        "trained_samples": progress.trained_samples,
        "seconds": progress.seconds,
        "samples_per_second": (
            progress.trained_samples / progress.seconds if progress.seconds else None
        ),
        "resumed_at_steps": progress.resumed,
        "non_finite_steps": progress.non_finite,
        "skipped_samples": progress.skipped,
        "skipped_examples": progress.examples,
        "best": None
        if progress.best_step is None
        else {"step": progress.best_step, **progress.best_figures},
        "last_log": flatten(record),
        "ranks": engine.world_size,
        "device": device_name(engine.device),
        "peak_memory_bytes": _peak_memory(engine.device),
    }
    if folder is not None and folder.path.is_dir():
        try:
            write_json(folder.report, report, indent=1)
        except OSError as error:  # a full disk, say; the run itself is to end as it was ending
            logger.warning("cannot write %s: %s", folder.report, error)
    return report


def device_name(device: torch.device) -> str:
    """Return what a rank computes on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads a rank"


def _peak_memory(device: torch.device) -> int:
    """Return peak bytes: of tensors on a GPU, else of this rank's process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
