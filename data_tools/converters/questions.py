"""Questions about images to shards: VQA v2, Visual Genome's questions and easy-VQA."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, Field
from typer import Option

from data_tools.builder.build import Target, convert_rows, file_names, image_identity, key_of
from data_tools.builder.samples import Refused, SampleSpec
from data_tools.options import BuildOptions, File, Images, Out
from data_tools.rows import (
    Faults,
    Row,
    json_list,
    members,
    parsed,
    parsed_parts,
    read_json,
    streamed_list,
)
from vlp.config import ConfigError
from vlp.data.schema import Annotation, Answer, Question

# People that a lone answer stands for in VQA's accuracy.
ANNOTATORS = 10


class PlainQuestion(NamedTuple):
    """A question and the number of people per answer, compact enough for a million."""

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
    """An image's file name and identity, its questions, and the prefix of its key."""

    name: str
    source: str
    image_id: str
    questions: list[PlainQuestion]
    prefix: str = ""


class _QuestionRow(Row):
    question_id: str
    image_id: int
    question: str


class _AnswerRow(Row):
    answer: str


class _AnnotationRow(Row):
    question_id: str
    # A bad answer costs itself, not its question.
    answers: list[Any]
    image_id: int | None = None
    question_type: str | None = None
    answer_type: str | None = None


class AnswerSet(NamedTuple):
    """Kept fields of a row of `annotations`."""

    image_id: int | None
    answers: tuple[tuple[str, int], ...]
    question_type: str | None
    answer_type: str | None


class _GenomeQuestion(Row):
    qa_id: str
    question: str
    answer: str


class _GenomeImage(Row):
    id: int = Field(validation_alias=AliasChoices("id", "image_id"))
    qas: list[Any]


class _GenomeData(Row):
    id: int = Field(validation_alias=AliasChoices("image_id", "id"))
    coco_id: int | None = None


def vqa(
    images: Images,
    out: Out,
    build: BuildOptions,
    questions: Annotated[list[Path] | None, File(help="VQA's question files")] = None,
    annotations: Annotated[list[Path] | None, File(help="VQA's annotation files")] = None,
    subset: Annotated[
        str | None, Option(help="train2014, val2014, test2015; for files without a header")
    ] = None,
    visual_genome: Annotated[
        Path | None, File(help="Visual Genome's question_answers.json")
    ] = None,
    image_data: Annotated[Path | None, File(help="Visual Genome's image_data.json")] = None,
) -> int:
    """VQA v2 (and Visual Genome's questions) to shards: one sample an image with all its questions.

    --questions and --annotations take the official files, with or without their header, gzipped or
    not; several are joined (train and val). A test set has no --annotations. Images are looked for
    under COCO's names, built from the header's data_subtype (--subset where there is no header).

    --visual-genome adds question_answers.json; its one answer counts as given by ten people. With
    --image-data an image that is also COCO's is named so.
    """
    questions, annotations = questions or [], annotations or []
    if not questions and visual_genome is None:
        raise ConfigError("nothing to convert: give --questions or --visual-genome")
    faults: Faults = []
    entries: list[ImageQuestions] = []
    if questions:
        answers = read_answers(annotations, faults)
        entries += vqa_images(questions, answers, subset, faults)
        if annotations and not any(
            question.answers for entry in entries for question in entry.questions
        ):
            raise ConfigError(
                f"{annotations[0]}: answers none of the questions of {questions[0]}; are both of "
                "the same split?"
            )
    if visual_genome is not None:
        entries += genome_images(visual_genome, image_data, faults)
    settings = {
        "questions": file_names(questions),
        "annotations": file_names(annotations),
        "subset": subset,
        "visual_genome": None if visual_genome is None else visual_genome.name,
        "image_data": None if image_data is None else image_data.name,
    }
    licence = "annotations CC BY 4.0; images under Flickr's terms of use"
    return _write(Target(out, build, "VQA", licence, settings), images, entries, faults)


def easy_vqa(
    questions: Annotated[Path, File(help="questions of one split")],
    images: Images,
    out: Out,
    build: BuildOptions,
    split: Annotated[str, Option(help="folder of the images in the release: train or test")] = "",
) -> int:
    """easy-VQA to shards: one sample an image of one shape, with all its questions.

    --questions takes {train,test}_questions.json, a list of [question, answer, image's number];
    --images the images of the same split, <number>.png. A question's position in the file (from 0)
    is its id. Its one answer counts as given by ten people.
    """
    faults: Faults = []
    entries = easy_images(questions, split, faults)
    settings = {"questions": questions.name, "split": split}
    return _write(Target(out, build, "easy-VQA", "MIT", settings), images, entries, faults)


def counted(answers: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return the number of people per answer, in order of first occurrence."""
    # Most answers come thousands of times.
    return tuple(Counter(map(sys.intern, answers)).items())


def lone_answer(identifier: str, question: str, answer: str) -> PlainQuestion:
    """Return a question with one answer, counted as given by all annotators."""
    return PlainQuestion(identifier, question, ((sys.intern(answer), ANNOTATORS),))


def plain_answer(text: str) -> str:
    """Return an answer as those of VQA are written: in lower case, without a full stop."""
    return text.strip().removesuffix(".").strip().lower()


def read_answers(paths: Sequence[Path], faults: Faults) -> dict[str, AnswerSet]:
    """Return the answers of each question id; of one that is annotated twice the first."""
    annotations: dict[str, AnswerSet] = {}
    for path in paths:
        for row in parsed(json_list(path, faults, "annotations"), _AnnotationRow, faults):
            if row.question_id in annotations:
                faults.append(Refused("question annotated twice", row.question_id))
            else:
                where = f"question {row.question_id}"
                answers = parsed_parts(row.answers, _AnswerRow, where, faults)
                annotations[row.question_id] = AnswerSet(
                    row.image_id,
                    counted(answer.answer for answer in answers),
                    _interned(row.question_type),
                    _interned(row.answer_type),
                )
    return annotations


def vqa_images(
    paths: Sequence[Path], answers: Mapping[str, AnswerSet], subset: str | None, faults: Faults
) -> list[ImageQuestions]:
    """Return the images that the question files ask about, in the order of their first question."""
    images: dict[str, ImageQuestions] = {}
    question_ids: set[str] = set()
    for path in paths:
        content = read_json(path, faults)
        rows = parsed(members(content, path, "questions"), _QuestionRow, faults)
        data_subtype = _subset_of(content, path, subset)
        for row in rows:
            if row.question_id in question_ids:
                faults.append(Refused("question id given twice", row.question_id))
                continue
            question_ids.add(row.question_id)
            if not row.question.strip():
                faults.append(Refused("empty question", row.question_id))
                continue
            name = f"COCO_{data_subtype}_{row.image_id:012d}.jpg"
            if name not in images:
                source, image_id = image_identity(name, "coco")
                images[name] = ImageQuestions(name, source, image_id, [])
            images[name].questions.append(_question(row, answers, faults))
    for unasked in sorted(answers.keys() - question_ids):
        faults.append(Refused("annotation without question", unasked))
    return list(images.values())


def genome_images(path: Path, image_data: Path | None, faults: Faults) -> list[ImageQuestions]:
    """Return the images of Visual Genome's question_answers.json."""
    coco: dict[int, int] = {}
    if image_data is not None:
        rows = parsed(streamed_list(image_data, faults), _GenomeData, faults)
        coco = {row.id: row.coco_id for row in rows if row.coco_id is not None}
    entries: list[ImageQuestions] = []
    question_ids: set[str] = set()
    for image in parsed(streamed_list(path, faults), _GenomeImage, faults):
        questions = []
        where = f"Visual Genome image {image.id}"
        for row in parsed_parts(image.qas, _GenomeQuestion, where, faults):
            if row.qa_id in question_ids:
                faults.append(Refused("question id given twice", f"Visual Genome {row.qa_id}"))
                continue
            question_ids.add(row.qa_id)
            answer = plain_answer(row.answer)
            if not answer or not row.question.strip():
                faults.append(Refused("question without answers", f"Visual Genome {row.qa_id}"))
                continue
            # Its numbers are not VQA's, and a shard may hold both.
            questions.append(lone_answer(f"vg-{row.qa_id}", row.question, answer))
        if questions:
            number = coco.get(image.id)
            source, image_id = ("visual_genome", image.id) if number is None else ("coco", number)
            entries.append(
                ImageQuestions(f"{image.id}.jpg", source, str(image_id), questions, "vg-")
            )
    return entries


def _question(row: _QuestionRow, answers: Mapping[str, AnswerSet], faults: Faults) -> PlainQuestion:
    match = answers.get(row.question_id)
    if match is not None and match.image_id not in (None, row.image_id):
        detail = f"{row.question_id} (asked of {row.image_id}, answered of {match.image_id})"
        faults.append(Refused("annotation of another image", detail))
        match = None
    if answers and (match is None or not match.answers):
        faults.append(Refused("question without answers (kept)", row.question_id))
    if match is None:
        return PlainQuestion(row.question_id, row.question)
    return PlainQuestion(
        row.question_id, row.question, match.answers, match.question_type, match.answer_type
    )


def _interned(text: str | None) -> str | None:
    return None if text is None else sys.intern(text)


def _subset_of(content: dict[str, Any], path: Path, subset: str | None) -> str:
    data_subtype = content.get("data_subtype", subset)
    if data_subtype is None:
        raise ConfigError(f"{path}: no data_subtype in a header; say --subset train2014 or another")
    return str(data_subtype)


def easy_images(path: Path, split: str, faults: Faults) -> list[ImageQuestions]:
    """Return the images that a question file asks about, in the order of their first question."""
    images: dict[int, ImageQuestions] = {}
    for number, (where, row) in enumerate(json_list(path, faults)):
        if not _fits(row):
            problem = f"{where}: not [question, answer, image's number]"
            if not images:
                raise ConfigError(f"{problem}; is it the right file?")
            faults.append(Refused("row of another layout", problem))
            continue
        question, answer, image = row
        if image not in images:
            folder, prefix = (f"{split}/images/", f"{split}-") if split else ("", "")
            name, image_id = f"{folder}{image}.png", f"{prefix}{image}"
            images[image] = ImageQuestions(name, "easy-vqa", image_id, [], prefix)
        images[image].questions.append(lone_answer(str(number), question, answer))
    return list(images.values())


def _fits(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 3
        and all(isinstance(text, str) and text.strip() for text in row[:2])
        and isinstance(row[2], int)
    )


def _write(
    target: Target, image_paths: Sequence[Path], entries: Sequence[ImageQuestions], faults: Faults
) -> int:
    """Build the shards of some images with their questions; returns the exit code."""
    samples = (
        SampleSpec(
            key_of(f"{entry.prefix}{Path(entry.name).stem}"),
            (entry.name,),
            Annotation(
                source=entry.source,
                image_id=entry.image_id,
                questions=[question.typed() for question in entry.questions],
            ),
        )
        for entry in entries
    )
    return convert_rows(target, image_paths, samples, faults, len(entries))
