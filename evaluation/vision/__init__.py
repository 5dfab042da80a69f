"""Vision-only models on the test data of their task: `evaluate_folder`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError, single_line_errors
from vlp.data.shards.sample_files import BadSample
from vlp.precision import NotFiniteError
from vlp.tasks.caption.metrics import CaptionToolError
from vlp.tasks.vision_only import load_task


def evaluate_folder(folder: str | Path, options: EvalOptions = EvalOptions()) -> dict[str, float]:
    """Evaluate a model folder of `train_vision.py`: figures by name, shares in percent.

    `options.limit` samples are spaced evenly over the test data. The default precision is float32
    for grids and pixels, where one token or a third decimal decides, and the training's for
    widgets.
    """
    with single_line_errors():
        task = load_task(folder)
    evaluate = import_module(f"evaluation.vision.{task.config.kind}").evaluate
    try:
        figures: dict[str, float] = evaluate(task, options)
    except (BadSample, CaptionToolError, ImportError, NotFiniteError) as error:
        raise EvaluationError(str(error)) from error
    return figures
