"""VQA v2 (and Visual Genome's questions) to shards: one sample an image with all its questions.

--questions and --annotations take the official files, with or without their header, gzipped or not;
several are joined (train and val). Without --annotations (a test set) questions have no answers.
Images are looked for under COCO's names, built from the header's data_subtype (--subset where a
file has no header). Answers are stored as {answer, count}; who was how sure is not kept.

--visual-genome adds question_answers.json. Its one answer counts as given by ten people, without
its capital letters and full stop, as VQA's answers are written. With --image-data an image that is
also COCO's is named so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import AliasChoices, Field

from data_tools.builder.build_benchmark import image_identity
from data_tools.builder.options import add_build_arguments
from data_tools.builder.sample_spec import Refused
from data_tools.converters.benchmarks.questions import (
    ImageQuestions,
    PlainQuestion,
    counted,
    lone_answer,
    plain_answer,
    write_questions,
)
from data_tools.sources.annotation_rows import Faults, Row, json_list, members, parsed, read_json
from data_tools.sources.json_stream import streamed_list
from vlp.config import ConfigError

LICENCE = "annotations CC BY 4.0; images under Flickr's terms of use"


class QuestionRow(Row):
    """A row of `questions`."""

    question_id: str
    image_id: int
    question: str


class AnswerRow(Row):
    """An answer of a row of `annotations`."""

    answer: str


class AnnotationRow(Row):
    """A row of `annotations`."""

    question_id: str
    answers: list[AnswerRow]
    image_id: int | None = None
    question_type: str | None = None
    answer_type: str | None = None


class Given(NamedTuple):
    """Kept fields of a row of `annotations`."""

    image_id: int | None
    answers: tuple[tuple[str, int], ...]
    question_type: str | None
    answer_type: str | None


class GenomeQuestion(Row):
    """A question of Visual Genome."""

    qa_id: str
    question: str
    answer: str


class GenomeImage(Row):
    """A row of Visual Genome's question_answers.json."""

    id: int = Field(validation_alias=AliasChoices("id", "image_id"))
    qas: list[GenomeQuestion]


class GenomeData(Row):
    """A row of Visual Genome's image_data.json."""

    id: int = Field(validation_alias=AliasChoices("image_id", "id"))
    coco_id: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--questions", type=Path, nargs="+", default=[], help="VQA's question files"
    )
    parser.add_argument(
        "--annotations", type=Path, nargs="+", default=[], help="VQA's annotation files"
    )
    parser.add_argument("--subset", help="train2014, val2014, test2015; for files without a header")
    parser.add_argument(
        "--image-name",
        default="COCO_{subset}_{image_id:012d}.jpg",
        metavar="PATTERN",
        help="file name of an image (default %(default)s)",
    )
    parser.add_argument("--visual-genome", type=Path, help="Visual Genome's question_answers.json")
    parser.add_argument("--image-data", type=Path, help="Visual Genome's image_data.json")
    add_build_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert; what is left out, or has no answers, is printed and named in the manifest.

    Raises:
        ConfigError: neither source is given, or a file cannot be used.
    """
    if not arguments.questions and arguments.visual_genome is None:
        raise ConfigError("nothing to convert: give --questions or --visual-genome")
    faults: Faults = []
    asked: list[ImageQuestions] = []
    if arguments.questions:
        answers = read_answers(arguments.annotations, faults)
        asked += vqa_images(
            arguments.questions, answers, arguments.subset, arguments.image_name, faults
        )
        if arguments.annotations:
            _check_answered(asked, arguments)
    if arguments.visual_genome is not None:
        asked += genome_images(arguments.visual_genome, arguments.image_data, faults)
    return write_questions(arguments, asked, faults, title="VQA", licence=LICENCE)


def read_answers(paths: Sequence[Path], faults: Faults) -> dict[str, Given]:
    """Return the answers of each question id; of one that is annotated twice the first.

    Raises:
        ConfigError: a file cannot be read or holds no annotations.
    """
    found: dict[str, Given] = {}
    for path in paths:
        for row in parsed(json_list(path, "annotations"), AnnotationRow, faults):
            if row.question_id in found:
                faults.append(Refused("question annotated twice", row.question_id))
            else:
                found[row.question_id] = Given(
                    row.image_id,
                    counted(answer.answer for answer in row.answers),
                    _interned(row.question_type),
                    _interned(row.answer_type),
                )
    return found


def vqa_images(
    paths: Sequence[Path],
    answers: Mapping[str, Given],
    subset: str | None,
    pattern: str,
    faults: Faults,
) -> list[ImageQuestions]:
    """Return the images that the question files ask about, in the order of their first question.

    Raises:
        ConfigError: a file cannot be used, has no header where `subset` is None, or the pattern of
            the images' names makes no sense.
    """
    images: dict[str, ImageQuestions] = {}
    seen: set[str] = set()
    for path in paths:
        content = read_json(path)
        rows = parsed(members(content, path, "questions"), QuestionRow, faults)
        known = _subset_of(content, path, subset) if "{subset" in pattern else ""
        for row in rows:
            if row.question_id in seen:
                faults.append(Refused("question id given twice", row.question_id))
                continue
            seen.add(row.question_id)
            if not row.question.strip():
                faults.append(Refused("empty question", row.question_id))
                continue
            name = _file_name(pattern, known, row.image_id)
            if name not in images:
                source, image_id = image_identity(name, "coco")
                images[name] = ImageQuestions(name, source, image_id, [])
            images[name].questions.append(_question(row, answers, faults))
    for unasked in sorted(answers.keys() - seen):
        faults.append(Refused("annotation without question", unasked))
    return list(images.values())


def genome_images(path: Path, image_data: Path | None, faults: Faults) -> list[ImageQuestions]:
    """Return the images of Visual Genome's question_answers.json.

    Raises:
        ConfigError: a file cannot be used.
    """
    coco: dict[int, int] = {}
    if image_data is not None:
        rows = parsed(streamed_list(image_data), GenomeData, faults)
        coco = {row.id: row.coco_id for row in rows if row.coco_id is not None}
    found: list[ImageQuestions] = []
    seen: set[str] = set()
    for image in parsed(streamed_list(path), GenomeImage, faults):
        questions = []
        for asked in image.qas:
            if asked.qa_id in seen:
                faults.append(Refused("question id given twice", f"Visual Genome {asked.qa_id}"))
                continue
            seen.add(asked.qa_id)
            answer = plain_answer(asked.answer)
            if not answer or not asked.question.strip():
                faults.append(Refused("question without answers", f"Visual Genome {asked.qa_id}"))
                continue
            # Its numbers are not VQA's, and a shard may hold both.
            questions.append(lone_answer(f"vg-{asked.qa_id}", asked.question, answer))
        if questions:
            number = coco.get(image.id)
            source, image_id = ("visual_genome", image.id) if number is None else ("coco", number)
            found.append(ImageQuestions(f"{image.id}.jpg", source, str(image_id), questions, "vg-"))
    return found


def _question(row: QuestionRow, answers: Mapping[str, Given], faults: Faults) -> PlainQuestion:
    given = answers.get(row.question_id)
    if given is not None and given.image_id not in (None, row.image_id):
        which = f"{row.question_id} (asked of {row.image_id}, answered of {given.image_id})"
        faults.append(Refused("annotation of another image", which))
        given = None
    if answers and (given is None or not given.answers):
        faults.append(Refused("question without answers (kept)", row.question_id))
    if given is None:
        return PlainQuestion(row.question_id, row.question)
    return PlainQuestion(
        row.question_id, row.question, given.answers, given.question_type, given.answer_type
    )


def _interned(text: str | None) -> str | None:
    return None if text is None else sys.intern(text)


def _check_answered(asked: Sequence[ImageQuestions], arguments: argparse.Namespace) -> None:
    if not any(question.answers for one in asked for question in one.questions):
        raise ConfigError(
            f"{arguments.annotations[0]}: answers none of the questions of "
            f"{arguments.questions[0]}; are both of the same split?"
        )


def _subset_of(content: dict[str, Any], path: Path, subset: str | None) -> str:
    found = content.get("data_subtype", subset)
    if found is None:
        raise ConfigError(f"{path}: no data_subtype in a header; say --subset train2014 or another")
    return str(found)


def _file_name(pattern: str, subset: str, image_id: int) -> str:
    try:
        return pattern.format(subset=subset, image_id=image_id)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"--image-name {pattern!r}: {{subset}} and {{image_id}} can stand in it ({error})"
        ) from error
