"""Captioning against reference captions (BLEU, METEOR, ROUGE-L, CIDEr, SPICE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from evaluation.downstream.submissions import Submission, write_captions
from evaluation.downstream.task_evaluation import (
    PageAction,
    Row,
    Scored,
    TaskEvaluation,
    register_evaluation,
)
from evaluation.results import Figure
from evaluation.samples import EvaluationError, single_line_errors
from evaluation.work_sharding import ProcessGroup, clustered_figures, set_scores
from vlp.data.shards.shard_reader import Item
from vlp.data.text.tokenizer import TextProcessor
from vlp.tasks.caption.data import CaptionBatch, CaptionExample
from vlp.tasks.caption.metrics import (
    CaptionToolError,
    caption_scores,
    require_caption_tools,
    spice_scores,
)
from vlp.tasks.caption.task import CaptionTask

_WITHOUT_JAVA = "set `task.java: false`, or `java` in the task.json of a trained model, for this"
_CORPUS_FIGURES = ("bleu1", "bleu2", "bleu3", "bleu4", "meteor")


class CaptionEvaluation(TaskEvaluation):
    """`cider` (up to 10), `bleu1` to `bleu4`, `rouge_l`, and with Java `meteor` and `spice`."""

    kind = "caption"
    title = "Captions"
    truth, no_truth = "captions", "no image has a caption"
    hidden = ("captions",)
    submission = Submission("image_id", write_captions)
    action = PageAction("Caption", "caption", "Write", "Caption")

    def require_tools(self, task: CaptionTask) -> None:
        """Raise EvaluationError without pycocoevalcap, or without Java if the task uses it."""
        try:
            require_caption_tools(task.config.java)
        except CaptionToolError as error:
            raise EvaluationError(f"{error}; {_WITHOUT_JAVA}") from error

    def merge_rows(self, rows: list[Row]) -> list[Row]:
        """Return one row per image: its first prediction, with the references of all its samples.

        Data sets with a sample per caption predict an image several times.
        """
        by_image: dict[Any, Row] = {}
        for index, row in enumerate(rows):
            has_id = row["image_id"] is not None
            first = by_image.setdefault(row["image"] if has_id else index, row)
            if first is not row:
                first["captions"] = [*first["captions"], *row["captions"]]
        return list(by_image.values())

    def row(self, task: CaptionTask, item: Item, example: CaptionExample, prediction: str) -> Row:
        """Return `key`, `image_id`, `caption`, reference `captions` and `image`."""
        return {
            "key": item.raw.key,
            "image_id": item.raw.annotation.image_id,
            "caption": prediction,
            "captions": list(example.captions),
            "image": item.raw.image_name,
        }

    def score(
        self, task: CaptionTask, rows: Sequence[Row], resamples: int, **options: Any
    ) -> Scored:
        """Compute the figures, with intervals over images."""
        # On one rank: Java is slow, and the tokeniser writes into its program folder.
        (scores,) = ProcessGroup.current().map_blocks(1, lambda _: _scores(rows, task.config.java))
        corpus, by_caption, notes = scores
        figures = clustered_figures(by_caption, [row["image"] for row in rows], {}, resamples)
        set_scores(rows, by_caption)
        # BLEU and METEOR are not means over captions, so they have no interval.
        figures |= {name: Figure(corpus[name], corpus[name], corpus[name], 0.0) for name in corpus}
        return Scored(figures, tuple(notes))

    def predict_item(
        self, task: CaptionTask, images: Sequence[Image.Image], text: str, device: torch.device
    ) -> list[tuple[str, float]]:
        """Return [(caption, probability)], a product over its word pieces and end token."""
        pixels = task.prepare(images, "", 0, None)
        ids, valid = torch.zeros(1, 0, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
        batch = CaptionBatch(pixels, ids, valid).to(device)
        memory = task.remember(batch.pixels)
        caption = task.write(memory)[0]
        processor = TextProcessor(task.text.tokenizer, task.config.data.max_caption)
        return [(caption, task.text_probability(memory, processor, caption))]


def _scores(
    rows: Sequence[Row], java: bool
) -> tuple[dict[str, float], dict[str, NDArray[np.float64]], list[str]]:
    """Return figures of the whole corpus, figures (captions,) by name, and notes."""
    captions, references = [row["caption"] for row in rows], [row["captions"] for row in rows]
    try:
        # A ValueError: all references are punctuation.
        with single_line_errors():
            scores = caption_scores(captions, references, java)
    except CaptionToolError as error:
        raise EvaluationError(f"{error}; {_WITHOUT_JAVA}") from error
    corpus = {name: scores.corpus[name] for name in _CORPUS_FIGURES if name in scores.corpus}
    by_caption = {name: scores.per_caption[name] for name in ("cider", "rouge_l")}
    notes = [
        f"{', '.join(corpus)} are of all captions together and have no interval.",
        "CIDEr goes up to 1000 in percent.",
    ]
    if java:
        # SPICE needs a separate download; the other figures do not depend on it.
        try:
            by_caption["spice"] = spice_scores(captions, references)
        except CaptionToolError as error:
            notes.append(f"No SPICE: {error}.")
    else:
        notes.append("Without Java: plain tokens, no METEOR, no SPICE.")
    return corpus, by_caption, notes


register_evaluation(CaptionEvaluation())
