"""What a model says about picture files and a text, with probabilities."""

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
from vlp.data.downstream.pair_classification import ClaimBatch
from vlp.data.downstream.vqa import VqaBatch
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.decoder.answer_decoder import Memory
from vlp.models.decoder.answer_likelihood import answer_likelihood
from vlp.models.folder import Loaded
from vlp.tasks.downstream.caption import Caption
from vlp.tasks.downstream.pair_classification import Claims, StatementsConfig
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
    """A label, an answer or a caption; of a folder without a task, whether text and picture match.

    The probability of an answer or a caption is that of all its word pieces and its end.

    Args:
        folder: model folder or hub name.
        images: picture files, two for a task about pairs. One that shows several panels is cut as
            the task was trained to.
        text: question, hypothesis, statement or caption; none for a model that writes captions.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the model.

    Raises:
        EvaluationError: a picture cannot be read, there are too many or too few, or the text is
            missing or not wanted.
        FileNotFoundError: there is no such model.
    """
    try:
        judge = load_task(folder) if has_task(folder) else vlp.load(folder)
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error
    kind = judge.kind if isinstance(judge, Downstream) else "match"
    _check(judge, kind, len(images), text)
    pictures = [read_pair(path, "").image for path in images]
    model = judge if isinstance(judge, Downstream) else judge.model
    with (
        torch.no_grad(),
        evaluating(model, device) as place,
        precision_context(place, precision),
    ):
        if isinstance(judge, Loaded):
            return Said(kind, matched_of(judge, pictures[0], text or "", place))
        if isinstance(judge, Claims):
            return Said(kind, labels_of(judge, pictures, text or "", place))
        if isinstance(judge, Vqa):
            return Said(kind, [answer_of(judge, pictures, text or "", place)])
        if isinstance(judge, Caption):
            return Said(kind, [caption_of(judge, pictures, place)])
    raise EvaluationError(f"{folder}: nothing is said about single pictures by a task {kind!r}")


def _check(judge: Downstream | Loaded, kind: str, images: int, text: str | None) -> None:
    wanted, parts = pictures_of(judge) if isinstance(judge, Claims) else (1, 1)
    if images != wanted:
        cut = f", to be cut into {parts} parts" if parts > 1 else ""
        raise EvaluationError(
            f"{kind} is about {wanted} picture{'s' if wanted > 1 else ''}{cut}, not {images}: give "
            f"--image FILE {'twice' if wanted > 1 else 'once'}"
        )
    if kind == "caption" and text is not None:
        raise EvaluationError("a model that writes captions reads no text: leave --text out")
    if kind != "caption" and not (text or "").strip():
        raise EvaluationError(f"{kind} needs a text: give --text")


def pictures_of(task: Claims) -> tuple[int, int]:
    """How many pictures a text is about, and into how many panels each is cut."""
    if isinstance(task.config, StatementsConfig):
        return task.config.pictures, task.config.panels
    return task.config.shown, 1


def labels_of(
    task: Claims, pictures: Sequence[Image.Image], text: str, place: torch.device
) -> list[tuple[str, float]]:
    """Classes with their probabilities, the likeliest first; pictures are whole, before any cut."""
    tokens = task.text([text])
    nothing = torch.tensor([-1])
    _, parts = pictures_of(task)
    shown = [part for picture in pictures for part in panels(picture, parts)]
    pixels = task.prepare(shown, text, 0, None)[None]
    batch = ClaimBatch(pixels, *tokens, nothing, torch.ones(1, dtype=torch.bool)).to(place)
    shares = task.logits(batch).float().softmax(-1)[0].tolist()
    return sorted(zip(task.config.classes, shares), key=lambda one: -one[1])


def answer_of(
    task: Vqa, pictures: Sequence[Image.Image], text: str, place: torch.device
) -> tuple[str, float]:
    """The answer to a question, and its probability."""
    none = torch.zeros(0, dtype=torch.int64)
    batch = VqaBatch(
        task.prepare(pictures, text, 0, None),
        *task.text([text]),
        answer_ids=none.view(0, 0),
        owners=none,
        shares=torch.zeros(0),
        valid=torch.ones(1, dtype=torch.bool),
    ).to(place)
    answer = task.predict(batch)[0]
    return answer, _probability(task, task.remember(batch), task.answer_text, answer, place)


def caption_of(
    task: Caption, pictures: Sequence[Image.Image], place: torch.device
) -> tuple[str, float]:
    """A caption, and its probability."""
    pixels = task.prepare(pictures, "", 0, None)
    ids, valid = torch.zeros(1, 0, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
    batch = CaptionBatch(pixels, ids, valid).to(place)
    said = task.write(batch)[0]
    memory = task.decoder.remember(task.model.encode_image(batch.pixels).states)
    words = TextProcessor(task.text.tokenizer, task.config.data.max_caption)
    return said, _probability(task, memory, words, said, place)


def _probability(
    task: Vqa | Caption, memory: Memory, words: TextProcessor, said: str, place: torch.device
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
    loaded: Loaded, picture: Image.Image, text: str, place: torch.device
) -> list[tuple[str, float]]:
    """Whether a text describes a picture, with probabilities, the likelier first."""
    image = loaded.model.encode_image(loaded.preprocess(picture)[None].to(place))
    words = loaded.model.encode_text(*(part.to(place) for part in loaded.text([text])))
    matches = float(loaded.model.match(image, words).sigmoid())
    return sorted([("matches", matches), ("does not", 1 - matches)], key=lambda one: -one[1])
