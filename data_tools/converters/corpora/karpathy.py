"""Karpathy's layout of Flickr8k, Flickr30k and COCO: one JSON with images, splits, sentences."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from data_tools.builder.build_corpus import CorpusPart
from data_tools.builder.caption_cleaning import add_caption_arguments, clean_captions
from data_tools.builder.sample_spec import Refused, SampleSpec
from data_tools.sources.annotation_rows import Row, explained, read_json
from vlp.config import ConfigError
from vlp.data.schema import Annotation

RESTVAL = "restval"
"""COCO's name for images of val2014 that nobody evaluates on; they are trained on."""


class Entry(NamedTuple):
    """One image of the JSON; `image_id` as its source counts."""

    filename: str
    split: str
    captions: list[str]
    source: str
    image_id: str


class _Sentence(Row):
    raw: str


class _KarpathyImage(Row):
    filename: str
    split: str
    sentences: list[_Sentence]
    filepath: str = ""
    cocoid: int | None = None


class _KarpathyFile(Row):
    images: list[_KarpathyImage]
    dataset: str | None = None


def add_split_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--splits` and what captions need."""
    parser.add_argument("--splits", nargs="+", help="only these (default: all)")
    add_caption_arguments(parser)


def read_karpathy(path: Path) -> list[Entry]:
    """Read `{"dataset", "images": [{"filename", "split", "sentences": [{"raw"}]}]}`.

    Raises:
        ConfigError: the file is missing or has another layout.
    """
    content = read_json(path)
    try:
        file = _KarpathyFile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(
            f"{path}: not a Karpathy-style JSON with images, filename, split and sentences/raw "
            f"({explained(error)})"
        ) from None
    source = file.dataset or path.stem
    return [_entry(image, source) for image in file.images]


def split_parts(
    entries: Sequence[Entry], splits: Sequence[str] | None, max_words: int
) -> list[CorpusPart]:
    """Return a folder of shards for each split.

    Raises:
        ConfigError: a split that is asked for does not exist.
    """
    there = sorted({entry.split for entry in entries})
    unknown = sorted(set(splits or ()) - set(there))
    if unknown:
        raise ConfigError(f"--splits: there is no {unknown[0]!r}, only {', '.join(there)}")
    parts = []
    for split in splits or there:
        chosen = [entry for entry in entries if entry.split == split]
        parts.append(CorpusPart(split, _wanted(chosen, max_words), len(chosen)))
    return parts


def key_of_image(filename: str) -> str:
    """Return the key of a sample from its image's name: no dot may end it early, nor a space."""
    return "_".join(Path(filename).stem.replace(".", "_").split())


def _wanted(entries: Sequence[Entry], max_words: int) -> Iterator[SampleSpec | Refused]:
    for entry in entries:
        key = key_of_image(entry.filename)
        captions, dropped = clean_captions(entry.captions, key, max_words)
        yield from dropped
        annotation = Annotation(captions=captions, source=entry.source, image_id=entry.image_id)
        yield SampleSpec(key, (entry.filename,), annotation)


def _entry(image: _KarpathyImage, source: str) -> Entry:
    name = f"{image.filepath}/{image.filename}" if image.filepath else image.filename
    number = Path(image.filename).stem if image.cocoid is None else str(image.cocoid)
    split = "train" if image.split == RESTVAL else image.split
    return Entry(name, split, [sentence.raw for sentence in image.sentences], source, number)
