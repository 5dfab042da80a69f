"""ALBEF's JSON lists to shards: retrieval, vqa, nlvr, ve or refcoco."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from typer import Option

from data_tools.builder.build import Target, convert_rows, file_names, image_identity, key_of
from data_tools.builder.samples import Refused, SampleSpec
from data_tools.converters.questions import PlainQuestion, counted, lone_answer, plain_answer
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
from data_tools.rows import Faults, Row, json_list, parsed, parsed_parts
from vlp.config import ConfigError
from vlp.data.schema import Annotation, Box, Expression

LICENCE = "that of the data set which the lists were made from"
# Source of images without one in their path.
UNKNOWN = "albef"
# What the folders of the usual layouts say about where an image is from.
_SOURCES = {
    "flickr30k": re.compile("flickr30k", re.IGNORECASE),
    "visual_genome": re.compile(r"\bvg\b|vg_100k|visual.?genome", re.IGNORECASE),
    "nlvr2": re.compile(r"-img[01]$"),
}


class AlbefRetrievalRow(Row):
    """A row of a retrieval list; training lists repeat the image, the others list captions."""

    image: str
    # A bad text of a list costs itself, not its row.
    caption: str | list[Any]


class AlbefVqaRow(Row):
    """A row of a VQA list; a test list has no answers, Visual Genome's one each."""

    image: str
    question: str
    question_id: str | None = None
    answer: str | list[Any] | None = None
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

    --annotations takes the lists, --images the images (folders, tars, zips) under the paths that
    the lists name or just their file names. Captions, questions and expressions of one image become
    one sample. Pairs and statements are numbered by their position in the list (`row`, from 0),
    expressions by that in all lists, questions without an id by list and position. RefCOCO+ has
    no boxes in its lists: give --refs and --instances, the official files.
    """
    grounding = {"refs": refs, "instances": instances, "detections": detections}
    if kind != "refcoco" and any(path is not None for path in grounding.values()):
        raise ConfigError("--refs, --instances and --detections belong to --kind refcoco")
    if (refs is None) != (instances is None):
        raise ConfigError("--refs and --instances belong together: give both or neither")
    stems = [path.stem for path in annotations]
    # Keys and ids have the list's name.
    if len(set(stems)) < len(stems):
        raise ConfigError("--annotations: two lists share a name, which samples are named after")
    faults: Faults = []
    boxes: Mapping[int, BoxInImage] = {}
    if refs is not None and instances is not None:
        boxes = boxes_by_reference(refs, instances, faults)
    proposals = None if detections is None else read_proposals(detections, faults)
    if kind == "refcoco":
        samples = list(_grounded(annotations, boxes, proposals, faults))
    else:
        samples = list(_KINDS[kind](annotations, faults))
    settings = {
        "kind": kind,
        "annotations": file_names(annotations),
        **{name: path and path.name for name, path in grounding.items()},
    }
    target = Target(out, build, f"ALBEF {kind}", LICENCE, settings)
    return convert_rows(target, images, samples, faults, len(samples))


def _captioned(paths: Sequence[Path], faults: Faults) -> Iterator[SampleSpec]:
    # Training lists repeat the image in each row.
    captions: dict[str, list[str]] = {}
    for path in paths:
        for row in parsed(json_list(path, faults), AlbefRetrievalRow, faults):
            texts = [row.caption] if isinstance(row.caption, str) else row.caption
            captions.setdefault(row.image, []).extend(_texts(texts, row.image, faults))
    for image, image_captions in captions.items():
        yield _of_image(image, {"captions": image_captions})


def _questions(paths: Sequence[Path], faults: Faults) -> Iterator[SampleSpec]:
    # An image has several rows, perhaps in several lists.
    questions: dict[str, list[PlainQuestion]] = {}
    question_ids: set[str] = set()
    for path in paths:
        for number, row in enumerate(parsed(json_list(path, faults), AlbefVqaRow, faults)):
            question_id = f"{path.stem}-{number}" if row.question_id is None else row.question_id
            if row.dataset == "vg" and row.question_id is not None:
                # Their numbers are not VQA's.
                question_id = f"vg-{question_id}"
            if question_id in question_ids:
                faults.append(Refused("question id given twice", question_id))
                continue
            question_ids.add(question_id)
            if not row.question.strip():
                faults.append(Refused("empty question", question_id))
                continue
            questions.setdefault(row.image, []).append(_question(question_id, row, faults))
    for image, image_questions in questions.items():
        yield _of_image(image, {"questions": [question.typed() for question in image_questions]})


def _nlvr2(paths: Sequence[Path], faults: Faults) -> Iterator[SampleSpec]:
    for key, number, row in _labelled(
        paths, _NlvrRow, lambda label: label.lower() in TRUTH, faults
    ):
        source, first = _identity(row.images[0])
        annotation = Annotation(
            source=source,
            image_id=first.removesuffix("-img0"),
            statement=row.sentence,
            label=TRUTH[row.label.lower()],
            row=number,
        )
        yield SampleSpec(key, tuple(row.images), annotation)


def _snli_ve(paths: Sequence[Path], faults: Faults) -> Iterator[SampleSpec]:
    for key, number, row in _labelled(paths, _VeRow, lambda label: label in LABELS, faults):
        source, image_id = _identity(row.image)
        annotation = Annotation(
            source=source, image_id=image_id, hypothesis=row.sentence, label=row.label, row=number
        )
        yield SampleSpec(key, (row.image,), annotation)


def _grounded(
    paths: Sequence[Path],
    boxes: Mapping[int, BoxInImage],
    proposals: Proposals | None,
    faults: Faults,
) -> Iterator[SampleSpec]:
    """Yield one sample an image with all its expressions, in the order of their first rows."""
    expressions: dict[str, list[Expression]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    numbers = count()
    for path in paths:
        for row in parsed(json_list(path, faults), _RefcocoRow, faults):
            number = next(numbers)
            reference_box = boxes.get(row.ref_id)
            box = row.bbox if reference_box is None else reference_box.box
            if box is None:
                kind = "expression without a box (give --refs and --instances)"
                faults.append(Refused(kind, f"{path}, ref_id {row.ref_id}: {row.text}"))
                continue
            if reference_box is not None:
                sizes[row.image] = reference_box.size
            expression = Expression(id=str(number), text=row.text, box=box, ref_id=row.ref_id)
            expressions.setdefault(row.image, []).append(expression)
    for image, image_expressions in expressions.items():
        content: dict[str, Any] = {"expressions": image_expressions}
        if proposals is not None:
            content["proposals"] = proposals.get(_identity(image)[1])
            if not content["proposals"]:
                faults.append(Refused("image without proposals (kept)", image))
        yield _of_image(image, content)._replace(size=sizes.get(image))


_KINDS: dict[str, Callable[[Sequence[Path], Faults], Iterator[SampleSpec]]] = {
    "retrieval": _captioned,
    "vqa": _questions,
    "nlvr": _nlvr2,
    "ve": _snli_ve,
}


def _labelled(
    paths: Sequence[Path], layout: type[Labelled], is_valid: Callable[[str], bool], faults: Faults
) -> Iterator[tuple[str, int, Labelled]]:
    """Yield key, number in its list, and row, for rows with a known label."""
    for path in paths:
        for number, row in enumerate(parsed(json_list(path, faults), layout, faults)):
            if is_valid(row.label):
                yield key_of(f"{path.stem}-{number}"), number, row
            else:
                faults.append(Refused("unknown label", f"{path}, row {number} ({row.label})"))


def _texts(values: Sequence[Any], where: str, faults: Faults) -> Iterator[str]:
    parts = ({"text": value} for value in values)
    return (part.text for part in parsed_parts(parts, _Text, where, faults))


def _question(identifier: str, row: AlbefVqaRow, faults: Faults) -> PlainQuestion:
    if isinstance(row.answer, str):
        return lone_answer(identifier, row.question, plain_answer(row.answer))
    answers = _texts(row.answer or (), f"question {identifier}", faults)
    return PlainQuestion(identifier, row.question, counted(answers))


def _of_image(image: str, content: dict[str, Any]) -> SampleSpec:
    source, image_id = _identity(image)
    annotation = Annotation(source=source, image_id=image_id, **content)
    # The folders, too: two data sets may number their images alike.
    return SampleSpec(key_of(image.rpartition(".")[0].strip("/.")), (image,), annotation)


def _identity(image: str) -> tuple[str, str]:
    path = str(PurePosixPath(image).with_suffix(""))
    source = next((name for name, pattern in _SOURCES.items() if pattern.search(path)), UNKNOWN)
    source, image_id = image_identity(image, source)
    # Lists may mix corpora that number their images alike.
    return source, path.strip("/.") if source == UNKNOWN else image_id
