"""Figures that a finished run is compared by: of vision models, scenes, own images, tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from evaluation.ablations.config import FineTunedConfig, MeasuredConfig
from vlp.training.run_folder import read_log


def evaluate_vision(model: Path, threads: int, limit: int | None) -> dict[str, float]:
    """Evaluate a folder of `train_vision.py` on `limit` test samples of its task."""
    import torch

    from evaluation.vision import evaluate_folder

    torch.set_num_threads(threads)
    return evaluate_folder(model, limit)


def evaluate_cross_modal(model: Path, threads: int, corpus: Path) -> dict[str, float]:
    """Evaluate swaps in three views, recall at 1, pointing and paths on held-out scenes.

    All figures are percent, but the spread of paths, which is in patches and tokens.
    """
    import torch

    import vlp
    from evaluation.probes.pointing import evaluate_pointing
    from evaluation.probes.winoground import evaluate_swaps
    from evaluation.retrieval.retrieval import evaluate_retrieval

    torch.set_num_threads(threads)
    loaded = vlp.load(model)
    figures: dict[str, float] = {}
    views: tuple[Literal["image", "shuffled", "blank"], ...] = ("image", "shuffled", "blank")
    for view in views:
        swaps = evaluate_swaps(loaded, [corpus / "swaps"], view=view, resamples=1)
        for (scorer, kind, score), figure in swaps.figures.items():
            figures[f"swaps/{view}/{scorer}/{kind}/{score}"] = 100 * figure.value
    recall = evaluate_retrieval(loaded, [corpus / "val"], rerank=8)
    for key in recall.figures:
        if key[2] == "R@1":
            figures["/".join(key)] = 100 * recall.figures[key].value
    pointing = evaluate_pointing(loaded, [corpus / "val"], resamples=1)
    for kind, words in pointing.kinds.items():
        figures[f"pointing/{kind}"] = 100 * words.pointing.value
        if words.anchors is not None:
            figures[f"anchors/{kind}"] = 100 * words.anchors.value
    if pointing.paths is not None:
        figures["paths/anchors"] = 100 * pointing.paths.anchors
        figures["paths/reachable"] = 100 * pointing.paths.reachable
        figures["paths/spread"] = pointing.paths.spread
    return figures


def evaluate_images(model: Path, threads: int, measured: MeasuredConfig) -> dict[str, float]:
    """Evaluate recall of the dual encoder and re-ranked, and foils by kind; in percent.

    Losses at the training's end are beside them, as `last_losses` has them.
    """
    import torch

    import vlp
    from evaluation.probes.foils import evaluate_foils
    from evaluation.retrieval.retrieval import evaluate_retrieval

    torch.set_num_threads(threads)
    loaded = vlp.load(model)
    recall = evaluate_retrieval(
        loaded, measured.shards, rerank=measured.rerank, rerank_by=measured.rerank_by,
        limit=measured.limit, features=measured.features or (), resamples=1,
    )  # fmt: skip
    figures = {"/".join(key): 100 * figure.value for key, figure in recall.figures.items()}
    if measured.foils:
        foils = evaluate_foils(loaded, measured.shards, limit=measured.foils, resamples=1)
        for name, figure in foils.figures.items():
            figures[f"foils/{name.replace(', ', '/')}"] = 100 * figure.value
    return figures | last_losses(read_log(model.parent / "log.jsonl")[0])


def last_losses(log: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of each loss over the last fifth of a training's steps, as `training/NAME`."""
    found: dict[str, list[float]] = {}
    for row in log:
        if row["step"] > 0.8 * log[-1]["step"]:
            for name, value in row.items():
                if name.startswith("loss/") and value is not None:  # None was not finite
                    found.setdefault(f"training/{name.removeprefix('loss/')}", []).append(value)
    return {name: mean(values) for name, values in found.items()}


def evaluate_fine_tuned(model: Path, threads: int, fine_tuned: FineTunedConfig) -> dict[str, float]:
    """Evaluate a fine-tuned model by its task's own figures, in percent."""
    import torch

    from evaluation.downstream.registry import get_evaluation

    torch.set_num_threads(threads)
    evaluation = get_evaluation(fine_tuned.task)
    result = evaluation.evaluate_folder(
        model, fine_tuned.shards, limit=fine_tuned.limit, resamples=1
    )
    return {
        name if isinstance(name, str) else "/".join(name): 100 * figure.value
        for name, figure in result.figures.items()
    }
