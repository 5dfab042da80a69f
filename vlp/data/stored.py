"""How one sample lies in a shard: the files that belong together, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from vlp.data.schema import Annotation, captions_of
from vlp.data.tar import Member, read_members

PICTURES = ("jpg", "jpeg", "png", "webp")


class BadSample(Exception):
    """A sample that cannot be used: what is wrong (`kind`, one of few) and where it lies."""

    def __init__(self, kind: str, where: str) -> None:
        super().__init__(kind, where)
        self.kind = kind
        self.where = where

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


class RawSample(NamedTuple):
    """One sample as stored: encoded pictures and the parsed annotation."""

    key: str
    image: bytes
    extension: str
    annotation: Annotation
    second_image: bytes | None = None


class SampleFiles(NamedTuple):
    """The members of one sample by extension (`jpg`, `json`, `1.jpg`)."""

    key: str
    files: dict[str, Member]


class Contents(NamedTuple):
    """The samples of one shard in order, up to `problem` (None: the shard is whole)."""

    samples: list[SampleFiles]
    problem: str | None = None
    missing: bool = False


def contents(path: Path) -> Contents:
    """What a shard holds; a shard that cannot be opened is `missing`, and raises nothing."""
    try:
        members, problem = read_members(path)
    except OSError as error:
        return Contents([], error.strerror or str(error), missing=True)
    samples: list[SampleFiles] = []
    for member in members:
        # WebDataset's rule: the key ends at the first dot of the file's own name, and the members
        # of one sample follow each other.
        directory, slash, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        key = f"{directory}{slash}{stem}"
        if not stem or not extension:
            continue
        if not samples or samples[-1].key != key:
            samples.append(SampleFiles(key, {}))
        samples[-1].files[extension.lower()] = member
    return Contents(samples, problem)


def parse(sample: SampleFiles, read: Callable[[Member], bytes], where: str) -> RawSample:
    """Read one sample through `read(member)`.

    Raises:
        BadSample: it has no picture, or its JSON or text cannot be read.
    """
    extension = next((name for name in PICTURES if name in sample.files), None)
    if extension is None:
        raise BadSample("missing picture", where)
    second = next((name for name in PICTURES if f"1.{name}" in sample.files), None)
    return RawSample(
        sample.key,
        read(sample.files[extension]),
        extension,
        parse_annotation(sample, read, where),
        None if second is None else read(sample.files[f"1.{second}"]),
    )


def parse_annotation(
    sample: SampleFiles, read: Callable[[Member], bytes], where: str
) -> Annotation:
    """`KEY.json`; `KEY.txt` is the caption where the JSON has none.

    Raises:
        BadSample: one of them cannot be read.
    """
    json, text = sample.files.get("json"), sample.files.get("txt")
    try:
        annotation = Annotation() if json is None else Annotation.model_validate_json(read(json))
        if text is not None and not captions_of(annotation):
            caption = read(text).decode("utf-8")
            annotation = annotation.model_copy(update={"caption": caption, "captions": None})
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise BadSample("bad annotation", f"{where}.json: {place} {problem['msg']}") from error
    except UnicodeDecodeError as error:
        raise BadSample("bad annotation", f"{where}.txt: not UTF-8") from error
    return annotation
