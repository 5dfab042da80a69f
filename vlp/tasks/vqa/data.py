"""Questions about images, each with the answers that several people gave."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from vlp.config import ConfigError
from vlp.data.downstream.dataset import (
    DownstreamDataConfig,
    DownstreamDataset,
    ImagePreparation,
    decoded,
)
from vlp.data.schema import Annotation, Question
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.shard_reader import Item, Items, ShardIndex
from vlp.data.stream.batch import moved
from vlp.data.stream.loader import RngFactory
from vlp.data.text.tokenizer import TextProcessor, TextTokens, predicted_places
from vlp.io import lines_of, parse_json
from vlp.scenes.annotation import SOURCE


def answers_of(question: Question) -> dict[str, int]:
    """Count the people who gave each answer; blank answers do not count."""
    said: Counter[str] = Counter()
    for one in question.answers:
        if one.answer.strip() and one.count > 0:
            said[one.answer.strip()] += one.count
    return dict(said)


def frequent_answers(folders: Sequence[str | Path], most: int) -> tuple[str, ...]:
    """Return the most frequent answers of shards, the most frequent first."""
    said: Counter[str] = Counter()
    for folder in folders:
        for annotation in ShardIndex.open(folder).annotations():
            if isinstance(annotation, Annotation):  # a bad one is counted when it is trained on
                for question in annotation.questions or ():
                    said.update(answers_of(question))
    if not said:
        raise ConfigError(
            f"{', '.join(map(str, folders))}: no question in these shards is answered"
        )
    by_count = sorted(said, key=lambda answer: (-said[answer], answer))
    return tuple(by_count[:most])


def read_answers(file: str | Path) -> tuple[str, ...]:
    """Read a file of answers, a JSON list or one a line, without blank and repeated ones.

    The published list of 3,129 for VQA v2 begins with a blank one.
    """
    path = Path(file)
    try:
        listed = parse_json(path.read_bytes()) if path.suffix == ".json" else lines_of(path)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: this list of answers cannot be read ({error})") from error
    if not isinstance(listed, list) or not all(isinstance(answer, str) for answer in listed):
        raise ConfigError(f"{path}: a list of answers is a JSON list of texts, or a text a line")
    found = _distinct(listed)
    if not found:
        raise ConfigError(f"{path}: this list of answers is empty")
    return found


def _distinct(answers: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer.strip() for answer in answers if answer.strip()))


class VqaDataConfig(DownstreamDataConfig):
    """Shards with `questions`, and what may be answered."""

    max_answer: int = Field(
        12, ge=3, description="tokens of a padded answer, [CLS] and [SEP] in; longer ones are cut"
    )
    answers: str | None = Field(
        None,
        description="file of the answers to choose from, a JSON list or a text a line; null: the "
        "most frequent ones of `train`",
    )
    most_answers: int = Field(3129, ge=1, description="of those that are taken from `train`")
    folder_weights: Mapping[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="weight in the loss of the questions of a folder of `train`; of others 1"
    )


class VqaExample(NamedTuple):
    """pixels (3, size, size); tokens of one row; answers with the number of people, empty in a test
    set; types of the question by division, where known; weight in the loss.
    """

    pixels: Tensor
    tokens: TextTokens
    question: Question
    answers: Mapping[str, int]
    types: Mapping[str, str]
    weight: float = 1.0


class VqaBatch(NamedTuple):
    """B questions and T answers of at most L tokens.

    pixels (B, 3, size, size) float32; text_ids, attention_mask, word_mask (B, N); answer_ids (T, L)
    int64, [CLS] ... [SEP] and padding; owners (T,) int64, the question of each; shares (T,) float32
    of its people, together the question's weight, 1 by default; valid (B,) bool; places (R,),
    `predicted_places` of the answers. A batch without a good question has one that is not valid.
    """

    pixels: Tensor
    text_ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    answer_ids: Tensor
    owners: Tensor
    shares: Tensor
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()
    places: Tensor | None = None

    def to(self, device: torch.device | str) -> VqaBatch:
        """Move every tensor to `device`."""
        return moved(self, device)


class VqaDataset(DownstreamDataset[VqaExample, VqaBatch]):
    """Questions of shard folders."""

    def __init__(
        self,
        items: Items,
        text: TextProcessor,
        prepare: ImagePreparation,
        max_answer: int,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        super().__init__(items, text, prepare)
        self.weights = dict(weights)
        self.answer_text = TextProcessor(text.tokenizer, max_answer)

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> VqaExample:
        """Make the question of an item; `rng_for` augments, in training."""
        annotation = item.raw.annotation
        question = (annotation.questions or [])[item.part]
        if not question.question.strip():
            raise BadSample("no text", f"{item.where}: question {question.id} is blank")
        image = decoded(item.raw, 1)
        answers = answers_of(question)
        # A flipped image would make "left" false in an answer, too.
        said = " ".join([question.question, *answers])
        return VqaExample(
            self.prepare(image, said, number, rng_for)[0],
            self.text([question.question]),
            question,
            answers,
            question_types(annotation, question),
            self._weight(number),
        )

    def _weight(self, number: int) -> float:
        if not self.weights:
            return 1.0
        return self.weights.get(self.items.folders[self.items.place(number)[0]], 1.0)

    def require_truth(self, example: VqaExample, item: Item) -> None:
        """Check that the question has answers."""
        if not example.answers:
            asked = example.question.id
            raise BadSample("no answers", f"{item.where}: nobody answered {asked}")

    def blank(self) -> VqaExample:
        """Make a grey image with an empty question and answer."""
        size = self.prepare.evaluate.image_size
        pixels = torch.zeros(3, size, size)
        return VqaExample(pixels, self.text([""]), Question(id="", question=""), {"": 1}, {})

    def batch(
        self, examples: list[VqaExample], valid: Tensor, skipped: tuple[SkippedSample, ...]
    ) -> VqaBatch:
        """Stack questions with all their answers."""
        said = [
            (answer, row, one.weight * count / sum(one.answers.values()))
            for row, one in enumerate(examples)
            for answer, count in one.answers.items()
        ]
        answers = self.answer_text([answer for answer, _, _ in said])
        longest = int(answers.attention_mask.sum(1).max()) if said else 0
        answer_ids = answers.text_ids[:, :longest]
        ids, attention, words = (torch.cat(rows) for rows in zip(*(one.tokens for one in examples)))
        return VqaBatch(
            torch.stack([one.pixels for one in examples]),
            ids,
            attention,
            words,
            answer_ids=answer_ids,
            owners=torch.tensor([row for _, row, _ in said], dtype=torch.int64),
            shares=torch.tensor([share for _, _, share in said]),
            valid=valid,
            places=predicted_places(answer_ids, self.answer_text.pad_id),
            skipped=skipped,
        )


def questions_in(annotation: Annotation) -> int:
    """Count the questions of a sample."""
    return len(annotation.questions or ())


def question_types(annotation: Annotation, question: Question) -> dict[str, str]:
    """Return a question's `answer_type` and `question_type`, by its annotation or generated id."""
    extra = question.model_extra or {}
    named = {part: extra.get(f"{part}_type") for part in ("answer", "question")}
    found = {part: kind for part, kind in named.items() if isinstance(kind, str) and kind}
    if annotation.source == SOURCE and "question" not in found and "-" in question.id:
        found["question"] = question.id.rpartition("-")[2]
    return found
