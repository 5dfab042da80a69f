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
    decode_images,
)
from vlp.data.schema import Annotation, Question
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.shard_reader import Item, Items, ShardIndex
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import RngFactory
from vlp.data.text.tokenizer import TextProcessor, TextTokens, predicted_positions
from vlp.io import lines_of, parse_json
from vlp.scenes.annotation import SOURCE


def answers_of(question: Question) -> dict[str, int]:
    """Count the people who gave each answer; blank answers do not count."""
    counts: Counter[str] = Counter()
    for answer in question.answers:
        if answer.answer.strip() and answer.count > 0:
            counts[answer.answer.strip()] += answer.count
    return dict(counts)


def frequent_answers(folders: Sequence[str | Path], limit: int) -> tuple[str, ...]:
    """Return the most frequent answers of shards, the most frequent first."""
    counts: Counter[str] = Counter()
    for folder in folders:
        for annotation in ShardIndex.open(folder).annotations():
            if isinstance(annotation, Annotation):  # a bad one is counted when it is trained on
                for question in annotation.questions or ():
                    counts.update(answers_of(question))
    if not counts:
        raise ConfigError(
            f"{', '.join(map(str, folders))}: no question in these shards is answered"
        )
    by_count = sorted(counts, key=lambda answer: (-counts[answer], answer))
    return tuple(by_count[:limit])


def read_answers(file: str | Path) -> tuple[str, ...]:
    """Read a file of answers, a JSON list or one a line, without blank and repeated ones."""
    # The published list of 3,129 for VQA v2 begins with a blank answer.
    path = Path(file)
    try:
        content = parse_json(path.read_bytes()) if path.suffix == ".json" else lines_of(path)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: this list of answers cannot be read ({error})") from error
    if not isinstance(content, list) or not all(isinstance(answer, str) for answer in content):
        raise ConfigError(f"{path}: a list of answers is a JSON list of texts, or a text a line")
    answers = _distinct(content)
    if not answers:
        raise ConfigError(f"{path}: this list of answers is empty")
    return answers


def _distinct(answers: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer.strip() for answer in answers if answer.strip()))


class VqaDataConfig(DownstreamDataConfig):
    """Shards with `questions`, and the answers to choose from."""

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
    """One question about an image."""

    # (3, size, size)
    pixels: Tensor
    # Of one row.
    tokens: TextTokens
    question: Question
    # Number of people by answer; empty in a test set.
    answers: Mapping[str, int]
    # `question_types`
    types: Mapping[str, str]
    # In the loss.
    weight: float = 1.0


class VqaBatch(NamedTuple):
    """B questions and T answers of at most L tokens; one question, not valid, if all are bad."""

    # (B, 3, size, size) float32
    pixels: Tensor
    # (B, N) each
    text_ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    # (T, L) int64, [CLS] ... [SEP] and padding
    answer_ids: Tensor
    # (T,) int64, the question of each answer
    owners: Tensor
    # (T,) float32 of the question's people; they sum to its weight, 1 by default.
    shares: Tensor
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()
    # (R,), `predicted_positions` of the answers
    places: Tensor | None = None

    def to(self, device: torch.device | str) -> VqaBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


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
        image = decode_images(item.raw, 1)
        answers = answers_of(question)
        # A flipped image would make "left" false in an answer, too.
        words = " ".join([question.question, *answers])
        return VqaExample(
            self.prepare(image, words, number, rng_for)[0],
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
            question = example.question.id
            raise BadSample("no answers", f"{item.where}: nobody answered {question}")

    def blank(self) -> VqaExample:
        """Make a grey image with an empty question and answer."""
        size = self.prepare.evaluate.image_size
        pixels = torch.zeros(3, size, size)
        return VqaExample(pixels, self.text([""]), Question(id="", question=""), {"": 1}, {})

    def batch(
        self, examples: list[VqaExample], valid: Tensor, skipped: tuple[SkippedSample, ...]
    ) -> VqaBatch:
        """Stack questions with all their answers."""
        rows = [
            (answer, row, example.weight * count / sum(example.answers.values()))
            for row, example in enumerate(examples)
            for answer, count in example.answers.items()
        ]
        answers = self.answer_text([answer for answer, _, _ in rows])
        longest = int(answers.attention_mask.sum(1).max()) if rows else 0
        answer_ids = answers.text_ids[:, :longest]
        columns = zip(*(example.tokens for example in examples))
        ids, attention, words = (torch.cat(column) for column in columns)
        return VqaBatch(
            torch.stack([example.pixels for example in examples]),
            ids,
            attention,
            words,
            answer_ids=answer_ids,
            owners=torch.tensor([row for _, row, _ in rows], dtype=torch.int64),
            shares=torch.tensor([share for _, _, share in rows]),
            valid=valid,
            places=predicted_positions(answer_ids, self.answer_text.pad_id),
            skipped=skipped,
        )


def questions_in(annotation: Annotation) -> int:
    """Count the questions of a sample."""
    return len(annotation.questions or ())


def question_types(annotation: Annotation, question: Question) -> dict[str, str]:
    """Return a question's `answer_type` and `question_type`, where known."""
    extra = question.model_extra or {}
    values = {part: extra.get(f"{part}_type") for part in ("answer", "question")}
    types = {part: kind for part, kind in values.items() if isinstance(kind, str) and kind}
    # Questions of generated scenes have their type in the id alone.
    if annotation.source == SOURCE and "question" not in types and "-" in question.id:
        types["question"] = question.id.rpartition("-")[2]
    return types
