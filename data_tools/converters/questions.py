"""Questions about images to shards: VQA v2, Visual Genome's questions and easy-VQA."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, Field
from typer import Option

from data_tools.builder.build import Target, convert_rows, image_identity, key_of
from data_tools.builder.samples import Fault, SampleSpec
from data_tools.options import BuildOptions, File, Images, Out
from data_tools.rows import (
    Faults,
    Row,
    json_rows,
    list_rows,
    parse_parts,
    parse_rows,
    read_json,
    streamed_list,
)
from vlp.config import ConfigError
from vlp.data.schema import Annotation, Answer, Question

ANNOTATORS = 10  # answers per question of VQA; a single answer gets this count


class PlainQuestion(NamedTuple):
    """A question with (answer, number of annotators); a tuple, as memory holds a million."""

    id: str
    question: str
    answers: tuple[tuple[str, int], ...] = ()
    question_type: str | None = None
    answer_type: str | None = None

    def to_question(self) -> Question:
        """Return the question as shards store it."""
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
    answers: list[Any]  # rows of _AnswerRow; a bad row is a fault and does not drop the others
    image_id: int | None = None
    question_type: str | None = None
    answer_type: str | None = None


class AnswerSet(NamedTuple):
    """Answers of a question, from a row of `annotations`."""

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
    subset: Annotated[str | None, Option(help="of files without header, as train2014")] = None,
    visual_genome: Annotated[Path | None, File(help="question_answers.json")] = None,
    image_data: Annotated[Path | None, File(help="Visual Genome's image_data.json")] = None,
) -> int:
    """VQA v2 (and Visual Genome's questions) to shards: one sample an image with all its questions.

    --questions and --annotations take the official files, with or without their header, gzipped or
    not; several are joined (train and val). A test set has no --annotations. Images have COCO's
    names, made from the header's data_subtype, or from --subset in a file without header.

    --visual-genome adds question_answers.json; its single answers count as given by ten people.
    With --image-data images of COCO get COCO's identity (`source` coco, `image_id` its number).
    """
    questions, annotations = questions or [], annotations or []
    if not questions and visual_genome is None:
        raise ConfigError("nothing to convert: give --questions or --visual-genome")
    faults: Faults = []
    entries: list[ImageQuestions] = []
    if questions:
        answers = read_answers(annotations, faults)
        entries += vqa_images(questions, answers, subset, faults)
        has_answers = any(question.answers for entry in entries for question in entry.questions)
        if annotations and not has_answers:
            raise ConfigError(
                f"{annotations[0]}: has no answer to a question of {questions[0]}; give files of "
                "the same split"
            )
    if visual_genome is not None:
        entries += genome_images(visual_genome, image_data, faults)
    settings = {
        "questions": [path.name for path in questions],
        "annotations": [path.name for path in annotations],
        "subset": subset,
        "visual_genome": None if visual_genome is None else visual_genome.name,
        "image_data": None if image_data is None else image_data.name,
    }
    licence = "annotations CC BY 4.0; images under Flickr's terms of use"
    return _build_shards(Target(out, build, "VQA", licence, settings), images, entries, faults)


def easy_vqa(
    questions: Annotated[Path, File(help="questions of one split")],
    images: Images,
    out: Out,
    build: BuildOptions,
    split: Annotated[str, Option(help="folder of the images in the release: train or test")] = "",
) -> int:
    """easy-VQA to shards: one sample an image of one shape, with all its questions.

    --questions takes {train,test}_questions.json, a list of [question, answer, image's number];
    --images the images of the same split, <number>.png. A question's id is its position in the
    file, from 0. Its answer counts as given by ten people.
    """
    faults: Faults = []
    entries = easy_images(questions, split, faults)
    settings = {"questions": questions.name, "split": split}
    return _build_shards(Target(out, build, "easy-VQA", "MIT", settings), images, entries, faults)


def count_answers(answers: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return (answer, number of people) pairs in order of first occurrence."""
    # Interned, as most answers are given thousands of times.
    return tuple(Counter(map(sys.intern, answers)).items())


def single_answer(question_id: str, question: str, answer: str) -> PlainQuestion:
    """Return a question with one answer, which gets the count of all annotators."""
    return PlainQuestion(question_id, question, ((sys.intern(answer), ANNOTATORS),))


def clean_answer(text: str) -> str:
    """Return an answer in lower case without a final full stop, as VQA's annotations have it."""
    return text.strip().removesuffix(".").strip().lower()


def read_answers(paths: Sequence[Path], faults: Faults) -> dict[str, AnswerSet]:
    """Return answers by question id; further annotations of a question are faults."""
    annotations: dict[str, AnswerSet] = {}
    for path in paths:
        for row in parse_rows(json_rows(path, faults, "annotations"), _AnnotationRow, faults):
            if row.question_id in annotations:
                faults.append(Fault("question annotated twice", row.question_id))
            else:
                where = f"question {row.question_id}"
                answers = parse_parts(row.answers, _AnswerRow, where, faults)
                annotations[row.question_id] = AnswerSet(
                    row.image_id,
                    count_answers(answer.answer for answer in answers),
                    _intern(row.question_type),
                    _intern(row.answer_type),
                )
    return annotations


def vqa_images(
    paths: Sequence[Path], answers: Mapping[str, AnswerSet], subset: str | None, faults: Faults
) -> list[ImageQuestions]:
    """Return the images of question files, in the order of their first question."""
    images: dict[str, ImageQuestions] = {}
    question_ids: set[str] = set()
    for path in paths:
        content = read_json(path, faults)
        rows = parse_rows(list_rows(content, path, "questions"), _QuestionRow, faults)
        data_subtype = content.get("data_subtype", subset)
        if data_subtype is None:
            raise ConfigError(f"{path}: has no header with data_subtype; give --subset train2014")
        # Images of test-dev2015 are called COCO_test2015_*.
        data_subtype = str(data_subtype).replace("test-dev", "test")
        for row in rows:
            if row.question_id in question_ids:
                faults.append(Fault("question id given twice", row.question_id))
                continue
            question_ids.add(row.question_id)
            if not row.question.strip():
                faults.append(Fault("empty question", row.question_id))
                continue
            name = f"COCO_{data_subtype}_{row.image_id:012d}.jpg"
            if name not in images:
                source, image_id = image_identity(name, "coco")
                images[name] = ImageQuestions(name, source, image_id, [])
            images[name].questions.append(_question(row, answers, faults))
    for question_id in sorted(answers.keys() - question_ids):
        faults.append(Fault("annotation without question", question_id))
    return list(images.values())


def genome_images(path: Path, image_data: Path | None, faults: Faults) -> list[ImageQuestions]:
    """Return the images of Visual Genome's question_answers.json, with COCO's ids if known."""
    coco_ids: dict[int, int] = {}
    if image_data is not None:
        data_rows = parse_rows(streamed_list(image_data, faults), _GenomeData, faults)
        coco_ids = {row.id: row.coco_id for row in data_rows if row.coco_id is not None}
    images: list[ImageQuestions] = []
    question_ids: set[str] = set()
    for image in parse_rows(streamed_list(path, faults), _GenomeImage, faults):
        questions = []
        where = f"Visual Genome image {image.id}"
        for row in parse_parts(image.qas, _GenomeQuestion, where, faults):
            if row.qa_id in question_ids:
                faults.append(Fault("question id given twice", f"Visual Genome {row.qa_id}"))
                continue
            question_ids.add(row.qa_id)
            answer = clean_answer(row.answer)
            if not answer or not row.question.strip():
                faults.append(Fault("question without answers", f"Visual Genome {row.qa_id}"))
                continue
            # With a prefix, as VQA may have the same id in the same shards.
            questions.append(single_answer(f"vg-{row.qa_id}", row.question, answer))
        if questions:
            source = "coco" if image.id in coco_ids else "visual_genome"
            image_id = str(coco_ids.get(image.id, image.id))
            images.append(ImageQuestions(f"{image.id}.jpg", source, image_id, questions, "vg-"))
    return images


def _question(row: _QuestionRow, answers: Mapping[str, AnswerSet], faults: Faults) -> PlainQuestion:
    answer_set = answers.get(row.question_id)
    if answer_set is not None and answer_set.image_id not in (None, row.image_id):
        detail = f"{row.question_id} (asked of {row.image_id}, answered of {answer_set.image_id})"
        faults.append(Fault("annotation of another image", detail))
        answer_set = None
    if answers and (answer_set is None or not answer_set.answers):
        faults.append(Fault("question without answers (kept)", row.question_id))
    if answer_set is None:
        return PlainQuestion(row.question_id, row.question)
    return PlainQuestion(row.question_id, row.question, *answer_set[1:])


def _intern(text: str | None) -> str | None:
    return None if text is None else sys.intern(text)


def easy_images(path: Path, split: str, faults: Faults) -> list[ImageQuestions]:
    """Return the images of easy-VQA's question file, in the order of their first question."""
    images: dict[int, ImageQuestions] = {}
    for number, (where, row) in enumerate(json_rows(path, faults)):
        if not _is_easy_question(row):
            problem = f"{where}: not [question, answer, image's number]"
            if not images:
                raise ConfigError(f"{problem}; is it the right file?")
            faults.append(Fault("row of another layout", problem))
            continue
        question, answer, image = row
        if image not in images:
            folder, prefix = (f"{split}/images/", f"{split}-") if split else ("", "")
            name, image_id = f"{folder}{image}.png", f"{prefix}{image}"
            images[image] = ImageQuestions(name, "easy-vqa", image_id, [], prefix)
        images[image].questions.append(single_answer(str(number), question, answer))
    return list(images.values())


def _is_easy_question(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 3
        and all(isinstance(text, str) and text.strip() for text in row[:2])
        and isinstance(row[2], int)
    )


def _build_shards(
    target: Target, image_paths: Sequence[Path], images: Sequence[ImageQuestions], faults: Faults
) -> int:
    samples = (
        SampleSpec(
            key_of(f"{image.prefix}{Path(image.name).stem}"),
            (image.name,),
            Annotation(
                source=image.source,
                image_id=image.image_id,
                questions=[question.to_question() for question in image.questions],
            ),
        )
        for image in images
    )
    return convert_rows(target, image_paths, samples, faults, len(images))
