"""Questions about images, with the answers of several people to each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
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
    """Count the people who gave each answer; blank answers are left out."""
    counts: Counter[str] = Counter()
    for answer in question.answers:
        if answer.answer.strip() and answer.count > 0:
            counts[answer.answer.strip()] += answer.count
    return dict(counts)


def frequent_answers(folders: Sequence[str | Path], limit: int) -> tuple[str, ...]:
    """Return the `limit` most frequent answers of shards, in descending order."""
    counts: Counter[str] = Counter()
    for folder in folders:
        for annotation in ShardIndex.open(folder).annotations():
            if isinstance(annotation, Annotation):  # else a bad sample, which training counts
                for question in annotation.questions or ():
                    counts.update(answers_of(question))
    if not counts:
        raise ConfigError(
            f"{', '.join(map(str, folders))}: no question in these shards is answered"
        )
    return tuple(sorted(counts, key=lambda answer: (-counts[answer], answer))[:limit])


def read_answers(file: str | Path) -> tuple[str, ...]:
    """Read a JSON list of answers, or a text file of one per line, without duplicates."""
    path = Path(file)
    try:
        content = parse_json(path.read_bytes()) if path.suffix == ".json" else lines_of(path)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: this list of answers cannot be read ({error})") from error
    if not isinstance(content, list) or not all(isinstance(answer, str) for answer in content):
        raise ConfigError(f"{path}: write answers as a JSON list of strings, or one per line")
    # The published list of 3,129 answers of VQA v2 begins with a blank answer.
    answers = tuple(dict.fromkeys(answer.strip() for answer in content if answer.strip()))
    if not answers:
        raise ConfigError(f"{path}: this list of answers is empty")
    return answers


class VqaDataConfig(DownstreamDataConfig):
    """Shards with `questions`, and the answers to choose from."""

    max_answer: int = Field(
        12, ge=3, description="largest number of tokens of an answer, [CLS] and [SEP] included"
    )
    answers: str | None = Field(
        None,
        description="file of the answers to choose from, a JSON list or one answer per line; null: "
        "the most frequent answers of `train`",
    )
    most_answers: int = Field(3129, ge=1, description="largest number of answers from `train`")
    folder_weights: Mapping[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="loss weight of the questions of a folder of `train`, by default 1"
    )


class VqaExample(NamedTuple):
    """One question about an image."""

    # (3, size, size) float32
    pixels: Tensor
    # Of the question, one row.
    tokens: TextTokens
    question: Question
    # Number of people by answer; empty in a test set.
    answers: Mapping[str, int]
    # See `question_types`.
    types: Mapping[str, str]
    # Weight of the question in the loss.
    weight: float = 1.0


class VqaBatch(NamedTuple):
    """B questions with T answers in all; if all samples are bad, one row that is not valid."""

    # (B, 3, size, size) float32
    pixels: Tensor
    # (B, N) each, of the questions
    text_ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    # (T, L) int64, [CLS] ... [SEP] and padding, of the answers
    answer_ids: Tensor
    # (T,) int64, row of each answer's question
    question_index: Tensor
    # (T,) float32, share of the question's people who gave the answer, times the question's weight
    answer_weights: Tensor
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()
    # (R,) int64, `predicted_positions` of `answer_ids`
    positions: Tensor | None = None

    def to(self, device: torch.device | str) -> VqaBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


class VqaDataset(DownstreamDataset[VqaExample, VqaBatch]):
    """Questions of shard folders; `folder_weights` are their loss weights by folder."""

    def __init__(
        self,
        items: Items,
        text: TextProcessor,
        prepare: ImagePreparation,
        max_answer: int,
        folder_weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        super().__init__(items, text, prepare)
        self.folder_weights = dict(folder_weights)
        self.answer_text = TextProcessor(text.tokenizer, max_answer)

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> VqaExample:
        """Make the example of item `number`; `rng_for` draws the augmentation of training."""
        annotation = item.raw.annotation
        question = (annotation.questions or [])[item.part]
        if not question.question.strip():
            raise BadSample("no text", f"{item.where}: question {question.id} is blank")
        image = decode_images(item.raw, 1)
        answers = answers_of(question)
        # A flip would make "left" false, in an answer too.
        text = " ".join([question.question, *answers])
        return VqaExample(
            self.prepare(image, text, number, rng_for)[0],
            self.text([question.question]),
            question,
            answers,
            question_types(annotation, question),
            self._weight(number),
        )

    def _weight(self, number: int) -> float:
        if not self.folder_weights:
            return 1.0
        return self.folder_weights.get(self.items.folders[self.items.locate(number)[0]], 1.0)

    def require_truth(self, example: VqaExample, item: Item) -> None:
        """Require an answer."""
        if not example.answers:
            question = example.question.id
            raise BadSample("no answers", f"{item.where}: question {question} has no answer")

    def blank(self) -> VqaExample:
        """Make a grey image with an empty question and answer."""
        size = self.prepare.evaluate.image_size
        pixels = torch.zeros(3, size, size)
        return VqaExample(pixels, self.text([""]), Question(id="", question=""), {"": 1}, {})

    def batch(
        self, examples: list[VqaExample], valid: Tensor, skipped: tuple[SkippedSample, ...]
    ) -> VqaBatch:
        """Stack questions with all their answers; `valid` is (B,) bool."""
        answers: list[str] = []
        rows: list[int] = []
        weights: list[float] = []
        for row, example in enumerate(examples):
            people = sum(example.answers.values())
            for answer, count in example.answers.items():
                answers.append(answer)
                rows.append(row)
                weights.append(example.weight * count / people)
        tokens = self.answer_text(answers)
        longest = int(tokens.attention_mask.sum(1).max()) if answers else 0
        answer_ids = tokens.text_ids[:, :longest]
        questions = TextTokens(*map(torch.cat, zip(*(example.tokens for example in examples))))
        return VqaBatch(
            torch.stack([example.pixels for example in examples]),
            *questions,
            answer_ids=answer_ids,
            question_index=torch.tensor(rows, dtype=torch.int64),
            answer_weights=torch.tensor(weights),
            valid=valid,
            positions=predicted_positions(answer_ids, self.answer_text.pad_id),
            skipped=skipped,
        )


def questions_in(annotation: Annotation) -> int:
    """Return the number of questions of a sample."""
    return len(annotation.questions or ())


def question_types(annotation: Annotation, question: Question) -> dict[str, str]:
    """Return the types of `answer` and `question`, as far as the question has VQA v2's fields."""
    extra = question.model_extra or {}
    values = {part: extra.get(f"{part}_type") for part in ("answer", "question")}
    types = {part: value for part, value in values.items() if isinstance(value, str) and value}
    # Questions of generated scenes end their id with the type.
    if annotation.source == SOURCE and "question" not in types and "-" in question.id:
        types["question"] = question.id.rpartition("-")[2]
    return types
