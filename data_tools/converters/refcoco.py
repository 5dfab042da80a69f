"""RefCOCO, RefCOCO+ and RefCOCOg to shards: expressions with the box that each refers to."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from data_tools.builder.build import (
    Target,
    benchmark_part,
    check_splits,
    convert_rows,
    image_identity,
    key_of,
    make_corpus,
    stems_of,
)
from data_tools.builder.samples import Fault, SampleSpec
from data_tools.options import BuildOptions, File, Images, Out, Splits
from data_tools.rows import (
    Faults,
    LocatedRow,
    Row,
    SplitName,
    json_rows,
    list_rows,
    parse_numbered_rows,
    parse_parts,
    parse_rows,
    read_json,
)
from vlp.config import ConfigError
from vlp.data.schema import Annotation, Box, Expression

LICENCE = "annotations as published by lichengunc/refer; images under Flickr's terms of use"
Refs = Annotated[Path | None, File(help="refs(unc).p or another split's")]
Instances = Annotated[Path | None, File(help="instances.json of the same data set")]
Detections = Annotated[Path | None, File(help="JSON of detected boxes, the proposals")]
Proposals = Mapping[str, list[list[float]]]  # boxes [x, y, width, height] in pixels, by image


class _Sentence(Row):
    sent_id: str
    sent: str


class _Reference(Row):
    ref_id: int
    ann_id: int
    image_id: int
    split: SplitName
    sentences: list[Any]  # rows of _Sentence; a bad row is a fault and does not drop the others
    category_id: int | None = None


class Image(Row):
    """A row of `images` of instances.json."""

    id: int
    file_name: str
    width: int
    height: int


class _Instance(Row):
    id: int
    image_id: int
    bbox: Box


class References(NamedTuple):
    """Contents of the two official files; images and objects by id."""

    references: list[_Reference]
    images: dict[int, Image]
    instances: dict[int, _Instance]


class BoxInImage(NamedTuple):
    """A box [x, y, width, height] and the (width, height) of its image, in pixels."""

    box: list[float]
    size: tuple[int, int]


class _DetectedBox(Row):
    image_id: str
    box: Box


class _Proposal(Row):
    box: Box


class _ScoredDetection(Row):
    sent: str
    gt_box: Box
    pred_boxes: list[Any]
    pred_boxes_img_id: list[str]


def refcoco(
    images: Images,
    out: Out,
    build: BuildOptions,
    refs: Refs = None,
    instances: Instances = None,
    splits: Splits = None,
    detections: Detections = None,
    expressions: Annotated[Path | None, File(help="list of expressions with proposals")] = None,
) -> int:
    """RefCOCO, RefCOCO+ and RefCOCOg to shards: expressions with the box that each refers to.

    --refs takes the official pickle (refs(unc).p, refs(google).p, refs(umd).p), read without
    running any code in it, and --instances the instances.json of the same folder. OUT gets a folder
    per split; an image with all its expressions of a split is one sample. --images takes COCO's
    train2014 images. --detections adds proposals: MAttNet's list of {image_id, box} or ALBEF's
    boxes by image, in pixels of the original image.

    --expressions takes a list of {sent, gt_box, pred_boxes, pred_boxes_img_id} instead; its shards
    go to OUT itself. An expression's id is its sent_id, or its position in a list without ids.
    """
    if (refs is None) == (expressions is None):
        raise ConfigError("give either --refs (with --instances) or --expressions")
    files = {
        "refs": refs,
        "instances": instances,
        "detections": detections,
        "expressions": expressions,
    }
    settings: dict[str, Any] = {name: path and path.name for name, path in files.items()}
    settings["splits"] = splits
    faults: Faults = []
    if expressions is not None:
        samples = list(scored_samples(expressions, faults))
        target = Target(out, build, "RefCOCO", LICENCE, settings)
        return convert_rows(target, images, samples, faults, len(samples))
    assert refs is not None
    if instances is None:
        raise ConfigError("--refs needs --instances, the instances.json of the same folder")
    data = read_references(refs, instances, faults)
    available = list(dict.fromkeys(reference.split for reference in data.references))
    check_splits(splits, available)
    proposals = None if detections is None else read_proposals(detections, faults)
    title = instances.parent.name
    parts = []
    for split in splits or available:
        split_faults = list(faults)
        samples = list(split_samples(data, split, proposals, split_faults))
        parts.append(benchmark_part(split, samples, split_faults, len(samples), title))
    return make_corpus(Target(out, build, title, LICENCE, settings), images, parts)


def read_references(refs: Path, instances: Path, faults: Faults) -> References:
    """Read the official pickle and its instances.json."""
    content = read_json(instances, faults)
    images = parse_rows(list_rows(content, instances, "images"), Image, faults)
    objects = parse_rows(list_rows(content, instances, "annotations"), _Instance, faults)
    return References(
        list(parse_rows(read_refs(refs), _Reference, faults)),
        {image.id: image for image in images},
        {instance.id: instance for instance in objects},
    )


def boxes_by_reference(refs: Path, instances: Path, faults: Faults) -> dict[int, BoxInImage]:
    """Return boxes by ref_id, without references of missing images or objects."""
    data = read_references(refs, instances, faults)
    boxes = {}
    for reference in data.references:
        image, instance = data.images.get(reference.image_id), data.instances.get(reference.ann_id)
        if image is not None and instance is not None and instance.image_id == image.id:
            boxes[reference.ref_id] = BoxInImage(instance.bbox, (image.width, image.height))
    return boxes


def split_samples(
    data: References, split: str, proposals: Proposals | None, faults: Faults
) -> Iterator[SampleSpec]:
    """Yield a sample per image with its expressions, in the order of a split's references."""
    stems = stems_of(image.file_name for image in data.images.values())
    expressions: dict[int, list[Expression]] = defaultdict(list)
    sent_ids: set[str] = set()
    for reference in data.references:
        if reference.split != split:
            continue
        instance = data.instances.get(reference.ann_id)
        detail = f"ref {reference.ref_id}"
        if reference.image_id not in data.images:
            faults.append(Fault("image not in instances.json", detail))
        elif instance is None:
            faults.append(Fault("object not in instances.json", detail))
        elif instance.image_id != reference.image_id:
            faults.append(Fault("object of another image", detail))
        else:
            expressions[reference.image_id] += _expressions(reference, instance, sent_ids, faults)
    for number, image_expressions in expressions.items():
        if not image_expressions:
            continue
        image = data.images[number]
        source, image_id = image_identity(image.file_name, "coco", stems[image.file_name])
        boxes = None if proposals is None else proposals.get(str(number))
        if proposals is not None and not boxes:
            faults.append(Fault("image without proposals (kept)", image.file_name))
        annotation = Annotation(
            source=source, image_id=image_id, expressions=image_expressions, proposals=boxes
        )
        key = key_of(stems[image.file_name])
        yield SampleSpec(key, (image.file_name,), annotation, (image.width, image.height))


def scored_samples(path: Path, faults: Faults) -> Iterator[SampleSpec]:
    """Yield a sample per image of a list of expressions, with the image's proposals."""
    expressions: dict[str, list[Expression]] = defaultdict(list)
    proposals: dict[str, list[list[float]]] = {}
    for number, row in parse_numbered_rows(json_rows(path, faults), _ScoredDetection, faults):
        if not row.pred_boxes_img_id:
            faults.append(Fault("expression without an image", str(number)))
            continue
        # `STEM_N.jpg`: the file stem of the image and the number of an expression.
        stem = row.pred_boxes_img_id[0].rpartition("_")[0]
        parts = ({"box": box} for box in row.pred_boxes)
        boxes = [part.box for part in parse_parts(parts, _Proposal, f"row {number}", faults)]
        if proposals.setdefault(stem, boxes) != boxes:
            faults.append(Fault("other proposals for the same image (the first kept)", stem))
        expressions[stem].append(Expression(id=str(number), text=row.sent, box=row.gt_box))
    for stem, image_expressions in expressions.items():
        source, image_id = image_identity(f"{stem}.jpg", "coco")
        annotation = Annotation(
            source=source,
            image_id=image_id,
            expressions=image_expressions,
            proposals=proposals[stem],
        )
        yield SampleSpec(key_of(stem), (f"{stem}.jpg",), annotation)


def read_proposals(path: Path, faults: Faults) -> Proposals:
    """Return detected boxes by image id."""
    # MAttNet has a list of {image_id, box or bbox}, perhaps under "dets"; ALBEF {image_id: boxes}.
    content = read_json(path, faults)
    if isinstance(content, dict) and isinstance(content.get("dets"), list):
        content = content["dets"]
    if isinstance(content, dict):
        content = [
            {"image_id": image_id, "box": box}
            for image_id, boxes in content.items()
            for box in (boxes if isinstance(boxes, list) else [boxes])
        ]
    if not isinstance(content, list):
        raise ConfigError(f"{path}: give a list of detections, or boxes by image id")
    rows = ((f"{path}, row {number}", _detection(row)) for number, row in enumerate(content, 1))
    proposals: dict[str, list[list[float]]] = defaultdict(list)
    for detection in parse_rows(rows, _DetectedBox, faults):
        proposals[detection.image_id].append(detection.box)
    return proposals


def _detection(row: Any) -> Any:
    """Return a detection with its four numbers under `box`."""
    if not isinstance(row, dict):
        return row
    box = row.get("box", row.get("bbox"))
    # In ALBEF's layout, a box may be an object with a score, too.
    if isinstance(box, dict):
        box = box.get("box", box.get("bbox"))
    # Some detectors write the score as a fifth number.
    return {**row, "box": box[:4] if isinstance(box, list) else box}


def _expressions(
    reference: _Reference, instance: _Instance, sent_ids: set[str], faults: Faults
) -> Iterator[Expression]:
    where = f"ref {reference.ref_id}"
    for sentence in parse_parts(reference.sentences, _Sentence, where, faults):
        detail = f"{sentence.sent_id} of ref {reference.ref_id}"
        if sentence.sent_id in sent_ids:
            faults.append(Fault("sent_id given twice", detail))
        elif not sentence.sent.strip():
            faults.append(Fault("empty expression", detail))
        else:
            yield Expression(
                id=sentence.sent_id,
                text=sentence.sent,
                box=instance.bbox,
                ref_id=reference.ref_id,
                ann_id=reference.ann_id,
                category_id=reference.category_id,
            )
        sent_ids.add(sentence.sent_id)


# Classes of plain containers; Python 2 calls their module `__builtin__`.
_PLAIN_CLASSES = {
    (module, name): kind
    for module in ("builtins", "__builtin__")
    for name, kind in {"set": set, "frozenset": frozenset, "list": list, "dict": dict}.items()
}


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of lists, dicts, texts and numbers only, as a pickle can call any function."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _PLAIN_CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}, which is not plain data"
            ) from None


def read_refs(path: Path) -> Iterator[LocatedRow]:
    """Return the rows of a pickled list, of Python 2 or 3, with their locations."""
    try:
        with open(path, "rb") as file:
            # Texts of Python 2 are bytes, of which a few may not be UTF-8.
            content = _PlainUnpickler(file, encoding="utf-8", errors="replace").load()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged pickle may raise any class
        raise ConfigError(
            f"{path}: not a pickle of references ({error}); take refs(unc).p as it is published"
        ) from error
    if not isinstance(content, list):
        raise ConfigError(f"{path}: holds {type(content).__name__}, not the list of references")
    return ((f"{path}, row {number}", row) for number, row in enumerate(content, 1))
