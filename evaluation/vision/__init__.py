"""Vision-only models on the test data of their task: `evaluate_folder`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from evaluation.samples import EvaluationError
from vlp.config import Precision
from vlp.data.shards.sample_files import BadSample
from vlp.tasks.caption.metrics import CaptionToolError
from vlp.tasks.vision_only import load_task


def evaluate_folder(
    folder: str | Path,
    limit: int | None = None,
    device: str | None = None,
    precision: Precision | None = None,
    workers: int | None = None,
) -> dict[str, float]:
    """Figures by name, percent where they are shares, of a model folder of `train_vision.py`.

    Args:
        folder: the run's `model`.
        limit: only so many test samples.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the model; None: bf16 on a GPU for `classification` and `detection`, as it was
            trained for `widgets`, else float32.
        workers: processes that read; None: this rank's cores up to 8 on a GPU, none on a CPU.

    Raises:
        ConfigError: the test data that the folder's configuration names cannot be used.
        EvaluationError: a test sample cannot be read, what computes the scores is not installed, or
            a limit below 1.
        FileNotFoundError: a file of the folder is missing.
        ValueError: it is another kind of folder, or damaged.
    """
    task = load_task(folder)
    evaluate = import_module(f"evaluation.vision.{task.config.kind}").evaluate
    try:
        figures: dict[str, float] = evaluate(task, limit, device, precision, workers)
    except (BadSample, CaptionToolError, ImportError) as error:
        raise EvaluationError(str(error)) from error
    return figures
