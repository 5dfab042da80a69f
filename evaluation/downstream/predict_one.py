"""What a model says about image files and a text, with probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from PIL import Image

import vlp
from evaluation.core.eval_mode import evaluating
from evaluation.core.feature_cache import precision_context
from evaluation.core.samples import EvaluationError
from evaluation.downstream.predict import has_task
from evaluation.probes.anchor_maps import read_pair
from vlp.data.downstream.caption import CaptionBatch
from vlp.data.downstream.images import panels
from vlp.data.downstream.pair_classification import PairBatch
from vlp.data.downstream.vqa import VqaBatch
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.decoder.answer_decoder import Memory
from vlp.models.decoder.answer_likelihood import answer_likelihood
from vlp.models.folder import Loaded
from vlp.tasks.downstream.caption import CaptionTask
from vlp.tasks.downstream.pair_classification import Nlvr2Config, PairClassification
from vlp.tasks.downstream.task import Downstream, load_task
from vlp.tasks.downstream.vqa import Vqa


class Said(NamedTuple):
    """Answers with their probabilities, the likeliest first, and what they are of."""

    kind: str
    answers: list[tuple[str, float]]

    def text(self) -> str:
        """For the terminal."""
        width = max(len(answer) for answer, _ in self.answers)
        return "\n".join(f"{answer.ljust(width)}  {p:.4f}" for answer, p in self.answers)


def predict_one(
    folder: str | Path,
    images: Sequence[str | Path],
    text: str | None = None,
    device: torch.device | str | None = None,
    precision: Literal["float32", "bf16"] = "float32",
) -> Said:
    """A label, an answer or a caption; of a folder without a task, whether text and image match.

    The probability of an answer or a caption is that of all its word pieces and its end.

    Args:
        folder: model folder or hub name.
        images: image files, two for a task about pairs. One that shows several panels is cut as
            the task was trained to.
        text: question, hypothesis, statement or caption; none for a model that writes captions.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the model.

    Raises:
        EvaluationError: an image cannot be read, there are too many or too few, or the text is
            missing or not wanted.
        FileNotFoundError: there is no such model.
    """
    try:
        judge = load_task(folder) if has_task(folder) else vlp.load(folder)
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error
    kind = judge.kind if isinstance(judge, Downstream) else "match"
    _check(judge, kind, len(images), text)
    opened = [read_pair(path, "").image for path in images]
    model = judge if isinstance(judge, Downstream) else judge.model
    with (
        torch.no_grad(),
        evaluating(model, device) as place,
        precision_context(place, precision),
    ):
        if isinstance(judge, Loaded):
            return Said(kind, matched_of(judge, opened[0], text or "", place))
        if isinstance(judge, PairClassification):
            return Said(kind, labels_of(judge, opened, text or "", place))
        if isinstance(judge, Vqa):
            return Said(kind, [answer_of(judge, opened, text or "", place)])
        if isinstance(judge, CaptionTask):
            return Said(kind, [caption_of(judge, opened, place)])
    raise EvaluationError(f"{folder}: nothing is said about single images by a task {kind!r}")


def _check(judge: Downstream | Loaded, kind: str, images: int, text: str | None) -> None:
    wanted, parts = images_of(judge) if isinstance(judge, PairClassification) else (1, 1)
    if images != wanted:
        cut = f", to be cut into {parts} parts" if parts > 1 else ""
        raise EvaluationError(
            f"{kind} is about {wanted} image{'s' if wanted > 1 else ''}{cut}, not {images}: give "
            f"--image FILE {'twice' if wanted > 1 else 'once'}"
        )
    if kind == "caption" and text is not None:
        raise EvaluationError("a model that writes captions reads no text: leave --text out")
    if kind != "caption" and not (text or "").strip():
        raise EvaluationError(f"{kind} needs a text: give --text")


def images_of(task: PairClassification) -> tuple[int, int]:
    """How many images a text is about, and into how many panels each is cut."""
    if isinstance(task.config, Nlvr2Config):
        return task.config.images, task.config.panels
    return task.config.shown, 1


def labels_of(
    task: PairClassification, images: Sequence[Image.Image], text: str, place: torch.device
) -> list[tuple[str, float]]:
    """Classes with their probabilities, the likeliest first; images are whole, before any cut."""
    tokens = task.text([text])
    nothing = torch.tensor([-1])
    _, parts = images_of(task)
    shown = [part for image in images for part in panels(image, parts)]
    pixels = task.prepare(shown, text, 0, None)[None]
    batch = PairBatch(pixels, *tokens, nothing, torch.ones(1, dtype=torch.bool)).to(place)
    shares = task.logits(batch).float().softmax(-1)[0].tolist()
    return sorted(zip(task.config.classes, shares), key=lambda one: -one[1])


def answer_of(
    task: Vqa, images: Sequence[Image.Image], text: str, place: torch.device
) -> tuple[str, float]:
    """The answer to a question, and its probability."""
    none = torch.zeros(0, dtype=torch.int64)
    batch = VqaBatch(
        task.prepare(images, text, 0, None),
        *task.text([text]),
        answer_ids=none.view(0, 0),
        owners=none,
        shares=torch.zeros(0),
        valid=torch.ones(1, dtype=torch.bool),
    ).to(place)
    answer = task.predict(batch)[0]
    return answer, _probability(task, task.remember(batch), task.answer_text, answer, place)


def caption_of(
    task: CaptionTask, images: Sequence[Image.Image], place: torch.device
) -> tuple[str, float]:
    """A caption, and its probability."""
    pixels = task.prepare(images, "", 0, None)
    ids, valid = torch.zeros(1, 0, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
    batch = CaptionBatch(pixels, ids, valid).to(place)
    said = task.predict(batch)[0]
    memory = task.decoder.remember(task.model.encode_image(batch.pixels).states)
    words = TextProcessor(task.text.tokenizer, task.config.data.max_caption)
    return said, _probability(task, memory, words, said, place)


def _probability(
    task: Vqa | CaptionTask, memory: Memory, words: TextProcessor, said: str, place: torch.device
) -> float:
    found = answer_likelihood(
        task.decoder,
        memory,
        words([said]).text_ids.to(place),
        task.model.text_encoder.embedding,
        task.text.pad_id,
    )
    return float(found.log_probability.exp())


def matched_of(
    loaded: Loaded, image: Image.Image, text: str, place: torch.device
) -> list[tuple[str, float]]:
    """Whether a text describes an image, with probabilities, the likelier first."""
    features = loaded.model.encode_image(loaded.preprocess(image)[None].to(place))
    words = loaded.model.encode_text(*(part.to(place) for part in loaded.text([text])))
    matches = float(loaded.model.match(features, words).sigmoid())
    return sorted([("matches", matches), ("does not", 1 - matches)], key=lambda one: -one[1])
