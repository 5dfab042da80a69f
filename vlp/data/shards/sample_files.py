"""Layout of one sample in a shard: the files that belong together, and their contents."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from vlp.data.limits import MAX_ANNOTATION_BYTES, MAX_IMAGE_BYTES
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.tar import Member, read_members
from vlp.io import redacted

IMAGES = ("jpg", "jpeg", "png", "webp")

# What can be wrong with a sample of a shard. Tasks that read other files have kinds of their own.
KINDS = (
    "missing shard",  # gone, or it cannot be opened
    "corrupt shard",  # the shard is damaged before the sample ends
    "duplicate key",  # the key came before in the shard
    "missing image",  # there is no KEY.jpg|jpeg|png|webp; links are not followed
    "image too large",  # in bytes, pixels, sides or scans, beyond `vlp.data.limits`
    "unreadable image",  # no image, or damaged
    "bad annotation",  # KEY.json or KEY.txt is damaged, too large, or means something else
    "no text",  # there is nothing to read beside the image
)

# The files of a sample lie side by side and are read at once, unless more than this lies between.
_GAP = 2**20

_TEXTS = ("json", "txt")


class BadSample(Exception):
    """A sample that cannot be used: what is wrong (`kind`, see KINDS) and where it lies."""

    def __init__(self, kind: str, where: str) -> None:
        where = redacted(where)
        super().__init__(kind, where)
        self.kind = kind
        self.where = where

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


class RawSample(NamedTuple):
    """One sample as stored: encoded images and the parsed annotation."""

    key: str
    image: bytes
    extension: str
    annotation: Annotation
    second_image: bytes | None = None


class SampleFiles(NamedTuple):
    """The members of one sample by extension (`jpg`, `json`, `1.jpg`).

    `repeated`: the key came before in this shard, so one of the two is not what its key says.
    """

    key: str
    files: dict[str, Member]
    repeated: bool = False


class Contents(NamedTuple):
    """The samples of one shard in order, up to `problem` (None: the shard is whole)."""

    samples: list[SampleFiles]
    problem: str | None = None
    missing: bool = False


def contents(path: Path) -> Contents:
    """List a shard's samples; one that cannot be opened is `missing`, and raises nothing."""
    try:
        members, problem = read_members(path)
    except OSError as error:
        return Contents([], error.strerror or str(error), missing=True)
    return Contents(grouped(members), problem)


def grouped(members: Iterable[Member]) -> list[SampleFiles]:
    """Return the samples that members of a tar form, in their order.

    WebDataset's rule: the key ends at the first dot of the file's own name, and the members of one
    sample follow each other. A sample whose key came before is marked as `repeated`, also where the
    two follow each other.
    """
    samples: list[SampleFiles] = []
    keys: set[str] = set()
    for member in members:
        directory, slash, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        key, extension = f"{directory}{slash}{stem}", extension.lower()
        if not stem or not extension:
            continue
        if not samples or samples[-1].key != key or extension in samples[-1].files:
            samples.append(SampleFiles(key, {}, key in keys))
            keys.add(key)
        samples[-1].files[extension] = member
    return samples


def parse(sample: SampleFiles, read: Callable[[Member], bytes], where: str) -> RawSample:
    """Read one sample through `read(member)`, its files at once where they lie side by side.

    Raises:
        BadSample: it has no image or one too large, its JSON or text cannot be read, or its key
            came before.
    """
    if sample.repeated:
        raise _repeated(where)
    extension = next((name for name in IMAGES if name in sample.files), None)
    if extension is None:
        raise BadSample("missing image", where)
    images = [extension, *(f"1.{name}" for name in IMAGES if f"1.{name}" in sample.files)][:2]
    for name in images:
        if (size := sample.files[name].size) > MAX_IMAGE_BYTES:
            told = f"{where}.{name}: {size} bytes, more than {MAX_IMAGE_BYTES}"
            raise BadSample("image too large", told)
    _require_small_texts(sample, where)
    wanted = [sample.files[name] for name in (*images, *_TEXTS) if name in sample.files]
    read = _at_once(wanted, read)
    annotation = parse_annotation(sample, read, where)
    image, *second = (read(sample.files[name]) for name in images)
    return RawSample(sample.key, image, extension, annotation, second[0] if second else None)


def parse_annotation(
    sample: SampleFiles, read: Callable[[Member], bytes], where: str
) -> Annotation:
    """Parse `KEY.json`; `KEY.txt` is the caption where the JSON has none.

    Raises:
        BadSample: one of them cannot be read, or the sample's key came before.
    """
    if sample.repeated:
        raise _repeated(where)
    _require_small_texts(sample, where)
    json, text = (sample.files.get(name) for name in _TEXTS)
    try:
        annotation = Annotation()
        if json is not None:
            annotation = Annotation.model_validate_json(read(json).removeprefix(BOM_UTF8))
        if text is not None and not captions_of(annotation):
            caption = read(text).decode("utf-8-sig")
            annotation = annotation.model_copy(update={"caption": caption, "captions": None})
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        reason = f"{place} {problem['msg']}".strip()
        raise BadSample("bad annotation", f"{where}.json: {reason}") from error
    except UnicodeDecodeError as error:
        raise BadSample("bad annotation", f"{where}.txt: not UTF-8") from error
    return annotation


def _repeated(where: str) -> BadSample:
    return BadSample(
        "duplicate key", f"{where} (came before; the files of one sample must follow each other)"
    )


def _require_small_texts(sample: SampleFiles, where: str) -> None:
    for name in _TEXTS:
        if name in sample.files and (size := sample.files[name].size) > MAX_ANNOTATION_BYTES:
            told = f"{where}.{name}: {size} bytes, more than {MAX_ANNOTATION_BYTES}"
            raise BadSample("bad annotation", told)


def _at_once(
    members: Sequence[Member], read: Callable[[Member], bytes]
) -> Callable[[Member], bytes]:
    """Return a reader of the members, which reads them at once if they lie close together."""
    start = min(member.offset for member in members)
    end = max(member.offset + member.size for member in members)
    if end - start > sum(member.size for member in members) + _GAP:
        return read
    data = read(Member(members[0].name, start, end - start))
    return lambda member: data[member.offset - start : member.offset - start + member.size]
