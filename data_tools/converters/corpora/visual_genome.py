"""Turn Visual Genome's regions and images into shards.

    python -m data_tools visual_genome --regions region_descriptions.json \\
        --image-data image_data.json --images VG_100K/ VG_100K_2/ --out shards/visual_genome

Each region's phrase is a caption, and a referring expression with the region's box. image_data.json
(optional) says which images are COCO's: those get COCO's identity (`source` coco, `image_id` the
number there), so that one image in both corpora is known as one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import AliasChoices, Field, ValidationError

from data_tools.builder.build_corpus import CorpusPart, make_corpus
from data_tools.builder.caption_cleaning import add_caption_arguments, clean_caption, why_dropped
from data_tools.builder.fit_boxes import OUTSIDE
from data_tools.builder.options import add_build_arguments
from data_tools.builder.sample_spec import Refused, SampleSpec
from data_tools.sources.annotation_rows import Faults, Row, parsed
from data_tools.sources.json_stream import streamed_list
from vlp.data.schema import Annotation, Expression

SOURCE = "visual_genome"
LICENCE = "annotations CC BY 4.0; images under Flickr's terms of use"


class _Region(Row):
    region_id: str
    phrase: str
    x: float
    y: float
    width: float
    height: float


class _GenomeImage(Row):
    id: int = Field(validation_alias=AliasChoices("id", "image_id"))
    regions: list[dict[str, Any]]


class _Data(Row):
    id: int = Field(validation_alias=AliasChoices("image_id", "id"))
    width: int
    height: int
    coco_id: int | None = None
    flickr_id: int | None = None
    url: str | None = None


class _Known(NamedTuple):
    data: dict[int, _Data]
    faults: Faults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--regions", type=Path, required=True, help="region_descriptions.json")
    parser.add_argument(
        "--image-data", type=Path, help="image_data.json: sizes, URLs and COCO's numbers"
    )
    add_caption_arguments(parser)
    add_build_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert; what was left out is printed and named in the manifest."""
    known = _Known({}, [])
    if arguments.image_data is not None:
        rows = parsed(streamed_list(arguments.image_data), _Data, known.faults)
        known = _Known({row.id: row for row in rows}, known.faults)
    part = CorpusPart(
        "", wanted_images(arguments.regions, known, arguments.max_words), len(known.data) or None
    )
    return make_corpus(arguments, [part], title="Visual Genome regions", licence=LICENCE)


def wanted_images(path: Path, known: _Known, max_words: int) -> Iterator[SampleSpec | Refused]:
    """Yield a sample for each image of region_descriptions.json.

    Raises:
        ConfigError: the file is missing or has another layout.
    """
    for image in parsed(streamed_list(path), _GenomeImage, known.faults):
        key = f"vg-{image.id}"
        captions: list[str] = []
        expressions: list[Expression] = []
        for content in image.regions:
            try:
                region = _Region.model_validate(content)
            except ValidationError:
                which = content.get("region_id", "without an id")
                yield Refused("region of another layout", f"{key}/region {which}")
                continue
            phrase = clean_caption(region.phrase)
            reason = why_dropped(phrase, max_words)
            if reason is not None:
                yield Refused(reason, f"{key}/region {region.region_id}")
                continue
            captions.append(phrase)
            box = [region.x, region.y, region.width, region.height]
            try:
                expressions.append(Expression(id=region.region_id, text=phrase, box=box))
            except ValidationError:  # a negative side
                yield Refused(OUTSIDE, f"{key}/expression {region.region_id}")
        data = known.data.get(image.id)
        in_coco = data is not None and data.coco_id is not None
        annotation = Annotation(
            captions=list(dict.fromkeys(captions)),
            expressions=expressions,
            source="coco" if in_coco else SOURCE,
            image_id=str(data.coco_id if data and in_coco else image.id),
            visual_genome_id=image.id,
            **({"url": data.url, "flickr_id": data.flickr_id} if data else {}),
        )
        size = (data.width, data.height) if data else None
        yield SampleSpec(key, (f"{image.id}.jpg",), annotation, size)
    yield from known.faults
