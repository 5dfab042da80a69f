"""Images and the questions asked of them: what the converters of question answering share."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from data_tools.builder.build_benchmark import Rows, convert, key_of
from data_tools.builder.sample_spec import SampleSpec
from data_tools.sources.annotation_rows import Faults
from vlp.data.schema import Annotation, Answer, Question

ANNOTATORS = 10
"""Number of people a lone answer stands for, so that VQA's accuracy takes it for certain."""


class PlainQuestion(NamedTuple):
    """A question and how many people gave each answer, small enough to hold a million of them."""

    id: str
    question: str
    answers: tuple[tuple[str, int], ...] = ()
    question_type: str | None = None
    answer_type: str | None = None

    def typed(self) -> Question:
        """Return the question as it is stored."""
        content = {name: value for name, value in self._asdict().items() if value is not None}
        answers = [Answer(answer=text, count=count) for text, count in self.answers]
        return Question.model_validate({**content, "answers": answers})


class ImageQuestions(NamedTuple):
    """An image's file name and identity, its questions, and what its key begins with."""

    name: str
    source: str
    image_id: str
    questions: list[PlainQuestion]
    prefix: str = ""


def write_questions(
    arguments: argparse.Namespace,
    asked: Sequence[ImageQuestions],
    faults: Faults,
    *,
    title: str,
    licence: str,
) -> int:
    """Build the shards of some images with their questions; returns the exit code."""
    wanted = (
        SampleSpec(
            key_of(f"{one.prefix}{Path(one.name).stem}"),
            (one.name,),
            Annotation(
                source=one.source,
                image_id=one.image_id,
                questions=[question.typed() for question in one.questions],
            ),
        )
        for one in asked
    )
    return convert(arguments, [Rows(wanted, faults, len(asked))], title=title, licence=licence)


def counted(answers: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return how many people gave each answer, in the order in which answers first come."""
    # Most answers come thousands of times.
    return tuple(Counter(map(sys.intern, answers)).items())


def lone_answer(identifier: str, question: str, answer: str) -> PlainQuestion:
    """Return a question with one answer, which counts as what all annotators said."""
    return PlainQuestion(identifier, question, ((sys.intern(answer), ANNOTATORS),))


def plain_answer(text: str) -> str:
    """Return an answer without capital letters, white space around it and a full stop behind it."""
    return text.strip().removesuffix(".").strip().lower()
