"""ALBEF's JSON lists to shards: retrieval, vqa, nlvr, ve or refcoco."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from typer import Option

from data_tools.builder.build import Target, convert_rows, image_identity, key_of
from data_tools.builder.samples import Fault, SampleSpec
from data_tools.converters.questions import (
    PlainQuestion,
    clean_answer,
    count_answers,
    single_answer,
)
from data_tools.converters.refcoco import (
    BoxInImage,
    Detections,
    Instances,
    Proposals,
    Refs,
    boxes_by_reference,
    read_proposals,
)
from data_tools.converters.statements import LABELS, TRUTH
from data_tools.options import BuildOptions, File, Images, Out
from data_tools.rows import Faults, Row, json_rows, parse_numbered_rows, parse_parts, parse_rows
from vlp.config import ConfigError
from vlp.data.schema import Annotation, Box, Expression

LICENCE = "that of the data set which the lists were made from"
UNKNOWN = "albef"  # source of an image if its path matches none of `_SOURCES`
# Sources by a pattern of the image's path without extension.
_SOURCES = {
    "flickr30k": re.compile("flickr30k", re.IGNORECASE),
    "visual_genome": re.compile(r"\bvg\b|vg_100k|visual.?genome", re.IGNORECASE),
    "nlvr2": re.compile(r"-img[01]$"),
}


class _RetrievalRow(Row):
    image: str
    caption: str | list[Any]  # a list except in training lists


class _VqaRow(Row):
    image: str
    question: str
    question_id: str | None = None
    answer: str | list[Any] | None = None  # str for Visual Genome, None in test lists
    dataset: str = "vqa"


class _Text(Row):
    text: str


class _LabelledRow(Row):
    sentence: str
    label: str


class _NlvrRow(_LabelledRow):
    images: list[str] = Field(min_length=2, max_length=2)


class _VeRow(_LabelledRow):
    image: str


Labelled = TypeVar("Labelled", bound=_LabelledRow)


class _RefcocoRow(Row):
    image: str
    text: str
    ref_id: int
    bbox: Box | None = None


def albef(
    kind: Annotated[
        Literal["retrieval", "vqa", "nlvr", "ve", "refcoco"], Option(help="what the lists hold")
    ],
    annotations: Annotated[list[Path], File(help="JSON lists")],
    images: Images,
    out: Out,
    build: BuildOptions,
    refs: Refs = None,
    instances: Instances = None,
    detections: Detections = None,
) -> int:
    """ALBEF's JSON lists to shards: retrieval, vqa, nlvr, ve or refcoco (--kind).

    --annotations takes the lists; --images folders, tars or zips with the images under their paths
    in the lists, or under their file names. Captions, questions and expressions of an image become
    one sample. Rows are counted from 0: `row` of a pair or statement is its row in the list, the id
    of an expression its row over all lists; a question without an id gets LIST-ROW. Lists of
    RefCOCO+ have no boxes: give --refs and --instances, the official files.
    """
    grounding = {"refs": refs, "instances": instances, "detections": detections}
    if kind != "refcoco" and any(path is not None for path in grounding.values()):
        raise ConfigError("--refs, --instances and --detections belong to --kind refcoco")
    if (refs is None) != (instances is None):
        raise ConfigError("--refs and --instances belong together: give both or neither")
    if len({path.stem for path in annotations}) < len(annotations):
        raise ConfigError("--annotations: two lists share a name, which keys and ids start with")
    faults: Faults = []
    boxes: Mapping[int, BoxInImage] = {}
    if refs is not None and instances is not None:
        boxes = boxes_by_reference(refs, instances, faults)
    proposals = None if detections is None else read_proposals(detections, faults)
    if kind == "refcoco":
        samples = list(_refcoco_samples(annotations, boxes, proposals, faults))
    else:
        samples = list(_KINDS[kind](annotations, faults))
    settings = {
        "kind": kind,
        "annotations": [path.name for path in annotations],
        **{name: path and path.name for name, path in grounding.items()},
    }
    target = Target(out, build, f"ALBEF {kind}", LICENCE, settings)
    return convert_rows(target, images, samples, faults, len(samples))


def _retrieval_samples(paths: Sequence[Path], faults: Faults) -> Iterator[SampleSpec]:
    # A training list has a row per caption.
    captions: dict[str, list[str]] = {}
    for path in paths:
        for row in parse_rows(json_rows(path, faults), _RetrievalRow, faults):
            texts = [row.caption] if isinstance(row.caption, str) else row.caption
            captions.setdefault(row.image, []).extend(_parse_texts(texts, row.image, faults))
    for image, image_captions in captions.items():
        yield _image_sample(image, {"captions": image_captions})


def _vqa_samples(paths: Sequence[Path], faults: Faults) -> Iterator[SampleSpec]:
    # A list has a row per question; an image may be in several lists.
    questions: dict[str, list[PlainQuestion]] = {}
    question_ids: set[str] = set()
    for path in paths:
        for number, row in parse_numbered_rows(json_rows(path, faults), _VqaRow, faults):
            question_id = f"{path.stem}-{number}" if row.question_id is None else row.question_id
            if row.dataset == "vg" and row.question_id is not None:
                question_id = f"vg-{question_id}"  # VQA may have the same number
            if question_id in question_ids:
                faults.append(Fault("question id given twice", question_id))
                continue
            question_ids.add(question_id)
            if not row.question.strip():
                faults.append(Fault("empty question", question_id))
                continue
            questions.setdefault(row.image, []).append(_question(question_id, row, faults))
    for image, image_questions in questions.items():
        content = [question.to_question() for question in image_questions]
        yield _image_sample(image, {"questions": content})


def _nlvr2_samples(paths: Sequence[Path], faults: Faults) -> Iterator[SampleSpec]:
    for key, number, row in _labelled_rows(
        paths, _NlvrRow, lambda label: label.lower() in TRUTH, faults
    ):
        source, left_image = _identity(row.images[0])
        annotation = Annotation(
            source=source,
            image_id=left_image.removesuffix("-img0"),
            statement=row.sentence,
            label=TRUTH[row.label.lower()],
            row=number,
        )
        yield SampleSpec(key, tuple(row.images), annotation)


def _snli_ve_samples(paths: Sequence[Path], faults: Faults) -> Iterator[SampleSpec]:
    for key, number, row in _labelled_rows(paths, _VeRow, lambda label: label in LABELS, faults):
        source, image_id = _identity(row.image)
        annotation = Annotation(
            source=source, image_id=image_id, hypothesis=row.sentence, label=row.label, row=number
        )
        yield SampleSpec(key, (row.image,), annotation)


def _refcoco_samples(
    paths: Sequence[Path],
    boxes: Mapping[int, BoxInImage],
    proposals: Proposals | None,
    faults: Faults,
) -> Iterator[SampleSpec]:
    """Yield a sample per image with all its expressions, in the order of their first rows."""
    expressions: dict[str, list[Expression]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    num_rows = 0  # in earlier lists
    for path in paths:
        rows = list(json_rows(path, faults))
        for number, row in parse_numbered_rows(rows, _RefcocoRow, faults):
            reference_box = boxes.get(row.ref_id)
            box = row.bbox if reference_box is None else reference_box.box
            if box is None:
                kind = "expression without a box (give --refs and --instances)"
                faults.append(Fault(kind, f"{path}, ref_id {row.ref_id}: {row.text}"))
                continue
            if reference_box is not None:
                sizes[row.image] = reference_box.size
            expression_id = str(num_rows + number)
            expression = Expression(id=expression_id, text=row.text, box=box, ref_id=row.ref_id)
            expressions.setdefault(row.image, []).append(expression)
        num_rows += len(rows)
    for image, image_expressions in expressions.items():
        content: dict[str, Any] = {"expressions": image_expressions}
        if proposals is not None:
            content["proposals"] = proposals.get(_identity(image)[1])
            if not content["proposals"]:
                faults.append(Fault("image without proposals (kept)", image))
        yield _image_sample(image, content)._replace(size=sizes.get(image))


_KINDS: dict[str, Callable[[Sequence[Path], Faults], Iterator[SampleSpec]]] = {
    "retrieval": _retrieval_samples,
    "vqa": _vqa_samples,
    "nlvr": _nlvr2_samples,
    "ve": _snli_ve_samples,
}


def _labelled_rows(
    paths: Sequence[Path], layout: type[Labelled], is_valid: Callable[[str], bool], faults: Faults
) -> Iterator[tuple[str, int, Labelled]]:
    """Yield (key, index in the list, row) of rows with a valid label."""
    for path in paths:
        for number, row in parse_numbered_rows(json_rows(path, faults), layout, faults):
            key = key_of(f"{path.stem}-{number}")
            if is_valid(row.label):
                yield key, number, row
            else:
                faults.append(Fault("unknown label", f"{key} ({row.label})"))


def _parse_texts(values: Sequence[Any], where: str, faults: Faults) -> Iterator[str]:
    parts = ({"text": value} for value in values)
    return (part.text for part in parse_parts(parts, _Text, where, faults))


def _question(question_id: str, row: _VqaRow, faults: Faults) -> PlainQuestion:
    if isinstance(row.answer, str):
        return single_answer(question_id, row.question, clean_answer(row.answer))
    answers = _parse_texts(row.answer or (), f"question {question_id}", faults)
    return PlainQuestion(question_id, row.question, count_answers(answers))


def _image_sample(image: str, content: dict[str, Any]) -> SampleSpec:
    source, image_id = _identity(image)
    annotation = Annotation(source=source, image_id=image_id, **content)
    # The key has the folders, as images of two data sets may have the same file name.
    return SampleSpec(key_of(image.rpartition(".")[0].strip("/.")), (image,), annotation)


def _identity(image: str) -> tuple[str, str]:
    """Return (source, image_id) of an image's path; the id is the path if the source is unknown."""
    path = str(PurePosixPath(image).with_suffix(""))
    source = next((name for name, pattern in _SOURCES.items() if pattern.search(path)), UNKNOWN)
    source, image_id = image_identity(image, source)
    return source, path.strip("/.") if source == UNKNOWN else image_id
