"""Vision-only models on the test data of their task: `evaluate_folder`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from vlp.tasks.vision import load_task


def evaluate_folder(
    folder: str | Path, limit: int | None = None, device: str | None = None
) -> dict[str, float]:
    """Figures by name, percent where they are shares, of a model folder of `train_vision.py`.

    Args:
        folder: the run's `model`.
        limit: only so many test samples.
        device: where to compute; None is this rank's GPU, or the CPU.

    Raises:
        ConfigError: the test data that the folder's configuration names cannot be used.
        FileNotFoundError: a file of the folder is missing.
        ValueError: it is another kind of folder, or damaged.
    """
    task = load_task(folder)
    evaluate = import_module(f"evaluation.vision.{task.config.kind}").evaluate
    figures: dict[str, float] = evaluate(task, limit, device)
    return figures
