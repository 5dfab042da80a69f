"""Captions that a model writes, against those of people: BLEU, METEOR, ROUGE-L, CIDEr, SPICE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from evaluation.core.eval_mode import evaluating
from evaluation.core.feature_cache import precision_context
from evaluation.core.results import Figure
from evaluation.core.samples import EvaluationError
from evaluation.core.work_sharding import Ranks
from evaluation.downstream.blocks import EvaluatedItems, image_name, judge_blocks
from evaluation.downstream.result import TaskResult, clustered_figures, judgeable, keep_scores
from vlp.data.downstream.caption import CaptionExample
from vlp.data.downstream.items import Item
from vlp.metrics.captions import CaptionToolError, caption_scores
from vlp.metrics.spice import spice_scores
from vlp.tasks.downstream.caption import CaptionTask

Row = dict[str, Any]

SAID = ("key", "image_id", "caption", "image", "scores")

_CORPUS = ("bleu1", "bleu2", "bleu3", "bleu4", "meteor")


def evaluate(
    task: CaptionTask,
    shards: Sequence[str | Path],
    *,
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Literal["float32", "bf16"] = "float32",
    resamples: int = 1000,
    progress: bool = False,
) -> TaskResult:
    """`cider` (up to 10), `bleu1` to `bleu4`, `rouge_l`, and with Java `meteor` and `spice`.

    Images without captions, as in a test set, are captioned and not counted. Samples that show
    the same image are one unit of the intervals.

    Raises:
        EvaluationError: no image can be used, none has a caption, or what the scores are computed
            with is missing.
        ConfigError: a shard folder cannot be read.
    """
    rows, skipped = predictions(
        task,
        shards,
        limit=limit,
        batch=batch,
        device=device,
        precision=precision,
        progress=progress,
    )
    folders = tuple(map(str, shards))
    captioned = judgeable(rows, "captions", folders, "no image has a caption")
    # Once on one rank: Java takes its time, and the tokeniser writes beside its own files.
    (scored,) = Ranks.current().map_blocks(1, lambda _: _scores(captioned, task.config.java))
    corpus, each, notes = scored
    clusters = [row["image"] for row in captioned]
    figures = clustered_figures(each, clusters, {}, resamples)
    keep_scores(captioned, each)
    figures |= {name: Figure(corpus[name], corpus[name], corpus[name], 0.0) for name in corpus}
    return TaskResult(
        kind=task.config.kind,
        items=len(rows),
        shards=folders,
        figures=figures,
        predictions=[{name: row[name] for name in SAID if name in row} for row in rows],
        skipped=skipped,
        notes=tuple(notes),
    )


def predictions(
    task: CaptionTask,
    shards: Sequence[str | Path],
    *,
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Literal["float32", "bf16"] = "float32",
    progress: bool = False,
) -> EvaluatedItems:
    """A caption for every image; arguments as in `evaluate`.

    Rows hold what is in `SAID` but `scores`, and people's `captions`, none in a test set.
    """
    images = task.dataset(shards, limit)

    def judge(made: Sequence[tuple[Item, CaptionExample]]) -> list[Row]:
        inputs = images.collate([sample for _, sample in made]).to(place)
        with precision_context(place, precision):
            said = task.predict(inputs)
        return [_row(item, sample, caption) for (item, sample), caption in zip(made, said)]

    with evaluating(task, device) as place:
        return judge_blocks(images.items, batch, images.make, judge, progress)


def _row(item: Item, sample: CaptionExample, caption: str) -> Row:
    return {
        "key": item.raw.key,
        "image_id": item.raw.annotation.image_id,
        "caption": caption,
        "captions": list(sample.captions),
        "image": image_name(item),
    }


def _scores(
    rows: Sequence[Row], java: bool
) -> tuple[dict[str, float], dict[str, NDArray[np.float64]], list[str]]:
    """Figures of the corpus, figures that are means over captions, and what is to be said."""
    said, references = [row["caption"] for row in rows], [row["captions"] for row in rows]
    try:
        scores = caption_scores(said, references, "ptb" if java else "plain", meteor=java)
    except CaptionToolError as error:
        raise EvaluationError(f"{error}; `task.java: false` goes without both") from error
    corpus = {name: scores.corpus[name] for name in _CORPUS if name in scores.corpus}
    each = {name: scores.each[name] for name in ("cider", "rouge_l")}
    notes = [
        f"{', '.join(corpus)} are of all captions together and have no interval.",
        "CIDEr goes up to 1000 here.",
    ]
    if java:
        try:
            each["spice"] = spice_scores(said, references)
        except CaptionToolError as error:
            notes.append(f"No SPICE: {error}.")
    else:
        notes.append("Without Java: plain tokens, no METEOR, no SPICE.")
    return corpus, each, notes
