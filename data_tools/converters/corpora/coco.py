"""Turn COCO's captions and images into shards, a folder a split.

    python -m data_tools coco --annotations dataset_coco.json --images coco/ --out shards/coco

--annotations takes Karpathy's dataset_coco.json (train, val, test; `restval` goes to train), or the
official captions_train2017.json, captions_val2014.json ... (a folder each, named train2017 ...).
--images takes the official zips as they are, or the folders. Of the test sets COCO gives no
captions away, so there is nothing to convert.

--instances takes the official instances_*.json of the same images, beside official captions. Then
samples have all boxes, and words of captions that name the only object of a category have its box:
`python -m evaluation pointing` asks whether a model finds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_tools.builder.build_corpus import CorpusPart, make_corpus
from data_tools.builder.caption_cleaning import clean_captions
from data_tools.builder.options import add_build_arguments
from data_tools.builder.sample_spec import Refused, SampleSpec
from data_tools.converters.benchmarks.category_words import CategoryWords
from data_tools.converters.corpora.karpathy import (
    add_split_arguments,
    key_of_image,
    read_karpathy,
    split_parts,
)
from data_tools.sources.annotation_rows import Faults, Row, json_list, parsed, read_json
from vlp.config import ConfigError
from vlp.data.schema import Annotation

SOURCE = "coco"
LICENCE = "annotations CC BY 4.0 (COCO Consortium); images under Flickr's terms of use"


class _CocoImage(Row):
    id: int
    file_name: str
    coco_url: str | None = None
    flickr_url: str | None = None


class _Caption(Row):
    id: int
    image_id: int
    caption: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--annotations",
        type=Path,
        nargs="+",
        required=True,
        help="Karpathy's dataset_coco.json, or official captions_*.json files (gzipped or not)",
    )
    parser.add_argument(
        "--instances", type=Path, nargs="+", default=[], help="official instances_*.json files"
    )
    add_split_arguments(parser)
    add_build_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert every split; what was left out is printed and named in the manifests."""
    entries, parts, names = [], [], []
    faults: Faults = []
    objects = CategoryWords(arguments.instances, faults) if arguments.instances else None
    for path in arguments.annotations:
        content = read_json(path)
        if isinstance(content, dict) and "annotations" in content:
            names.append(path.name.split(".")[0].removeprefix("captions_"))
            part = official_part(path, names[-1], arguments.max_words, objects, faults)
            parts.append(part)
        else:
            entries += read_karpathy(path)
    if entries and parts:
        raise ConfigError("--annotations: Karpathy's JSON or official files, not both at once")
    if entries and objects is not None:
        raise ConfigError(
            "--instances goes with official captions_*.json, not with Karpathy's JSON"
        )
    if entries:
        parts = split_parts(entries, arguments.splits, arguments.max_words)
    elif arguments.splits:
        unknown = sorted(set(arguments.splits) - set(names))
        if unknown:
            raise ConfigError(f"--splits: there is no {unknown[0]!r}, only {', '.join(names)}")
        parts = [part for part in parts if part.name in arguments.splits]
    settings = {"max_words": arguments.max_words, "instances": objects is not None}
    return make_corpus(arguments, parts, title="COCO captions", licence=LICENCE, settings=settings)


def official_part(
    path: Path,
    name: str,
    max_words: int,
    objects: CategoryWords | None = None,
    faults: Sequence[Refused] = (),
) -> CorpusPart:
    """Return the shards of one official file.

    Args:
        path: of the captions.
        name: of the folder.
        max_words: of a caption.
        objects: of the images, whose boxes are wanted.
        faults: found before.

    Raises:
        ConfigError: the file is missing or has another layout.
    """
    faults = list(faults)
    captions: dict[int, list[str]] = {}
    for row in parsed(json_list(path, "annotations"), _Caption, faults):
        captions.setdefault(row.image_id, []).append(row.caption)
    images = list(parsed(json_list(path, "images"), _CocoImage, faults))
    return CorpusPart(name, _wanted(images, captions, faults, max_words, objects), len(images))


def _wanted(
    images: list[_CocoImage],
    captions: dict[int, list[str]],
    faults: Faults,
    max_words: int,
    objects: CategoryWords | None,
) -> Iterator[SampleSpec | Refused]:
    for image in images:
        key = key_of_image(image.file_name)
        texts, dropped = clean_captions(captions.get(image.id, ()), key, max_words)
        yield from dropped
        annotation = Annotation(
            captions=texts,
            source=SOURCE,
            image_id=str(image.id),
            url=image.coco_url,
            flickr_url=image.flickr_url,
            boxes=None if objects is None else objects.boxes(image.id),
            words=None if objects is None else objects.words(image.id, texts),
        )
        size = None if objects is None else objects.size(image.id)
        yield SampleSpec(key, (image.file_name,), annotation, size)
    for number in captions.keys() - {image.id for image in images}:
        yield Refused("captions of an unknown image", str(number))
    yield from faults
