"""Evaluation of a trained run: figures by name, and the ranks of each query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, mean
from typing import TYPE_CHECKING, Any, get_args

from evaluation.ablations.config import AblationConfig, FineTunedConfig, MeasuredConfig
from evaluation.jobs import View
from evaluation.options import EvalOptions
from vlp.config import parse_yaml
from vlp.io import parse_json
from vlp.training.run_folder import read_log

if TYPE_CHECKING:
    from evaluation.retrieval.retrieval import RetrievalResult


def evaluate_run(folder: Path, threads: int, config: AblationConfig) -> dict[str, Any]:
    """Evaluate a run and return the content of `result.json`; retrieval also writes QUERIES."""
    import torch

    # OMP_NUM_THREADS is set for the process of the training alone.
    torch.set_num_threads(threads)
    run_report = parse_json((folder / "report.json").read_text(encoding="utf-8"))
    if config.scenes is not None:
        figures = evaluate_scenes(folder, Path(config.scenes))
    elif config.measured is not None:
        figures = evaluate_images(folder, config.measured)
        log, _ = read_log(folder / "log.jsonl")
        figures |= last_losses(log, run_report["resumed_at_steps"])
    elif config.fine_tuned is not None:
        figures = evaluate_fine_tuned(folder, config.fine_tuned)
    else:
        from evaluation.vision import evaluate_folder

        figures = evaluate_folder(folder / "model", EvalOptions(limit=config.limit))
    cost = {"training/steps": run_report["step"], "training/minutes": run_report["seconds"] / 60}
    return {"evaluation": config.evaluation(), "figures": {**figures, **cost}}


def evaluate_scenes(folder: Path, scenes: Path) -> dict[str, float]:
    """Evaluate swaps in three views, recall at 1, pointing and paths on held-out scenes.

    Figures are in percent, except the spread of paths (patches and tokens).
    """
    import vlp
    from evaluation.probes.swaps import evaluate_swaps
    from evaluation.probes.word_pointing import evaluate_pointing
    from evaluation.retrieval.retrieval import evaluate_retrieval

    loaded = vlp.load(folder / "model")
    figures: dict[str, float] = {}
    # One resample, as intervals are not stored: the report computes intervals over seeds.
    for view in get_args(View):
        swaps = evaluate_swaps(
            loaded, [scenes / "swaps"], view=view, options=EvalOptions(resamples=1)
        )
        for (scorer, kind, score), figure in swaps.figures.items():
            figures[f"swaps/{view}/{scorer}/{kind}/{score}"] = 100 * figure.value
    recall = evaluate_retrieval(
        loaded, [scenes / "val"], rerank=8, options=EvalOptions(resamples=1)
    )
    write_queries(folder, recall)
    for key, figure in recall.figures.items():
        if key[2] == "R@1":
            figures["/".join(key)] = 100 * figure.value
    pointing = evaluate_pointing(loaded, [scenes / "val"], options=EvalOptions(resamples=1))
    for name, words in pointing.kinds.items():
        figures[f"pointing/{name}"] = 100 * words.pointing.value
        if words.anchors is not None:
            figures[f"anchors/{name}"] = 100 * words.anchors.value
    for name, value in pointing.paths.items():
        figures[f"paths/{name}"] = value if name == "spread" else 100 * value
    return figures


def evaluate_images(folder: Path, settings: MeasuredConfig) -> dict[str, float]:
    """Evaluate recall and foils in percent, and list losses in nats (`list_loss/...`).

    Recall is of the dual encoder (`dual/...`), and re-ranked by similarity plus match score
    (`rerank/...`) and by the match score alone (`match/...`). The list loss is the cross-entropy
    over a query's re-ranked candidates.
    """
    import vlp
    from evaluation.probes.foils import evaluate_foils
    from evaluation.retrieval.retrieval import evaluate_retrieval

    loaded = vlp.load(folder / "model")
    recall = evaluate_retrieval(
        loaded, settings.shards, rerank=settings.rerank, rerank_by="both",
        options=EvalOptions(limit=settings.limit, resamples=1), features=settings.features or (),
    )  # fmt: skip
    write_queries(folder, recall)
    figures = {"/".join(key): 100 * figure.value for key, figure in recall.figures.items()}
    figures |= {f"list_loss/{name}": loss for name, loss in recall.facts["list_loss"].items()}
    if settings.foils:
        foils = evaluate_foils(
            loaded, settings.shards, options=EvalOptions(limit=settings.foils, resamples=1)
        )
        for name, figure in foils.figures.items():
            figures[f"foils/{name.replace(', ', '/')}"] = 100 * figure.value
    return figures


def last_losses(log: Sequence[Mapping[str, Any]], resumes: Sequence[int]) -> dict[str, float]:
    """Return the mean of each loss over the last fifth of a training's steps, as `training/NAME`.

    resumes: steps at which the training was resumed.
    """
    losses: dict[str, list[tuple[float, float]]] = {}
    previous = 0
    # A log line averages the steps since the previous line. After a resume in between, it averages
    # the steps since the resume only, and its weight is their share. A line without steps weighs 1.
    for row in log:
        step = row["step"]
        start = max([previous, *(resume for resume in resumes if resume < step)])
        share = (step - start) / max(step - previous, 1) or 1.0
        if step > 0.8 * log[-1]["step"]:
            for name, value in row.items():
                # JSON has no NaN: a loss that was not finite is logged as null.
                if name.startswith("loss/") and value is not None:
                    key = f"training/{name.removeprefix('loss/')}"
                    losses.setdefault(key, []).append((value, share))
        # Lines of validations have no `samples`, and average no steps.
        if "samples" in row:
            previous = step
    return {name: _mean(values) for name, values in losses.items()}


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    values, weights = zip(*weighted)
    # Without a resume all weights are equal; `mean` does not round in between.
    return mean(values) if len(set(weights)) == 1 else fmean(values, weights)


def evaluate_fine_tuned(folder: Path, settings: FineTunedConfig) -> dict[str, float]:
    """Evaluate a fine-tuned model by its task's figures, in percent."""
    from evaluation.downstream.task_evaluation import get_evaluation

    run_config = parse_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    result = get_evaluation(run_config["task"]["kind"]).evaluate_folder(
        folder / "model", settings.shards, options=EvalOptions(limit=settings.limit, resamples=1)
    )
    return {
        name if isinstance(name, str) else "/".join(name): 100 * figure.value
        for name, figure in result.figures.items()
    }


def write_queries(folder: Path, recall: RetrievalResult) -> None:
    """Write a row per query: direction, image, caption index, and rank of the best positive.

    Ranks are by stage, from 1; `evaluation.ablations.tables` bootstraps them.
    """
    from evaluation.ablations.tables import QUERIES, pd

    rows = [{**query, **query["ranks"]} for query in recall.predictions or ()]
    columns = ["direction", "image", "caption", *recall.stages]
    pd.DataFrame(rows, columns=columns).to_csv(folder / QUERIES, index=False)
