"""Samples of an open shard: grouping of tar members by key, and parsing of their contents."""

from __future__ import annotations

import hashlib
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import ValidationError

from vlp.data import file_names
from vlp.data.limits import MAX_ANNOTATION_BYTES, MAX_IMAGE_BYTES
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.tar import BLOCK, Member, members_in, open_tar, plain_members, section
from vlp.io import Redacted, parse_json, redact

IMAGES = tuple(suffix[1:] for suffix in file_names.IMAGES)

# Kinds of fault of a shard's sample. Tasks that read other files have more kinds.
KINDS = (
    "missing shard",  # it does not exist or cannot be opened
    "corrupt shard",  # the shard is damaged before the sample ends
    "duplicate key",  # the key came before in the shard
    "missing image",  # no KEY.jpg|jpeg|png|webp|gif|bmp; links are not followed
    "image too large",  # in bytes, pixels, sides or scans, beyond `vlp.data.limits`
    "unreadable image",  # not an image, or damaged
    "bad annotation",  # KEY.json or KEY.txt is damaged, too large, or not of `vlp.data.schema`
    "no text",  # an image without the text that training needs
)

# A sample's files are adjacent and read at once, unless more unneeded bytes lie between them.
_GAP = 2**20

_TEXTS = ("json", "txt", "cls")

# Longer samples are not read as a whole, but file by file as needed.
_BYTES_AT_ONCE = 2**20

Reader = Callable[[Member], bytes]


class BadSample(Exception):
    """A sample that cannot be used: the `kind` of fault (see KINDS) and its location."""

    def __init__(self, kind: str, where: str) -> None:
        where = redact(where)
        super().__init__(kind, where)
        self.kind = kind
        self.where = where

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


class RawSample(NamedTuple):
    """One sample as stored: encoded images, the annotation, and its location for messages."""

    key: str
    image: bytes
    extension: str
    annotation: Annotation
    second_image: bytes | None
    where: str

    @property
    def image_name(self) -> str:
        """SOURCE/ID, equal for samples of the same image; without an id the sample's location."""
        if self.annotation.image_id is None:
            return f"/{self.where}"
        return f"{self.annotation.source or ''}/{self.annotation.image_id}"

    @property
    def image_digest(self) -> str:
        """Hash of the encoded image, 128 bits in hex."""
        return hashlib.blake2b(self.image, digest_size=16).hexdigest()


class SampleFiles(NamedTuple):
    """Members of a sample by extension (`json`, `1.jpg`); `repeated`: the key came before."""

    key: str
    files: dict[str, Member]
    repeated: bool = False


class Contents(NamedTuple):
    """The samples of a shard in order, and the damage after them (`problem`; None: intact)."""

    samples: list[SampleFiles]
    problem: str | None = None
    missing: bool = False


class ShardFile:
    """An open tar of samples, shared by processes; `path` names it in messages."""

    def __init__(self, handle: int, path: object, policy: str = "skip") -> None:
        self.handle, self.path, self.policy = handle, path, policy
        self.bytes = os.fstat(handle).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)

    def list_samples(self) -> Contents:
        """List all samples by the headers of the tar."""
        if not self.bytes:
            return Contents([])
        members, problem = members_in(section(self.handle, 0, self.bytes), self.bytes)
        return Contents(group_by_key(members), problem)

    def samples_at(self, start: int, size: int) -> tuple[Contents, Reader]:
        """List the samples in a part of the tar, with a reader of their files."""
        # A tar ends with an empty block: with one appended, the part is a tar.
        if size > _BYTES_AT_ONCE:
            headers = section(self.handle, start, start + size, zeros=BLOCK)
            members, problem = members_in(headers, size + BLOCK)
            read: Reader = lambda m: self.content(m._replace(offset=start + m.offset))  # noqa: E731
            return Contents(group_by_key(members), problem), read
        data = os.pread(self.handle, size, start)
        plain = plain_members(data) if len(data) == size else None
        if plain is None:
            members, problem = members_in(BytesIO(data + bytes(BLOCK)), len(data) + BLOCK)
        else:
            members, problem = plain, None
        listing = Contents(group_by_key(members), problem)
        return listing, lambda m: data[m.offset : m.offset + m.size]

    def content(self, member: Member) -> bytes:
        """Return the bytes of a file in the tar."""
        try:
            data = os.pread(self.handle, member.size, member.offset)
        except OSError as error:
            bad = BadSample("missing shard", f"{self.path} ({error.strerror})")
            raise outage_error(bad, self.policy) from error
        if len(data) != member.size:
            raise BadSample("corrupt shard", f"{self.path}: cut off inside {member.name}")
        return data

    def where(self, sample: SampleFiles) -> str:
        """Return the location of a sample for messages."""
        return f"{self.path}, {sample.key}"

    def read(self, sample: SampleFiles) -> RawSample:
        """Return a listed sample with its images; raises BadSample."""
        return parse(sample, self.content, self.where(sample))

    def annotation(self, sample: SampleFiles) -> Annotation:
        """Return a listed sample's annotation, its images left unread; raises BadSample."""
        return parse_annotation(sample, self.content, self.where(sample))

    def count_captions(self, sample: SampleFiles) -> int:
        """Return a listed sample's number of captions as in a shard index: 0 for a bad sample."""
        try:
            return len(captions_of(self.annotation(sample)))
        except BadSample:
            return 0


def contents(path: Path) -> Contents:
    """Return a shard's samples and damage; a shard that cannot be opened is `missing`."""
    try:
        with ShardFile(open_tar(path), path) as shard:
            return shard.list_samples()
    except OSError as error:
        return Contents([], error.strerror or str(error), missing=True)


def group_by_key(members: Iterable[Member]) -> list[SampleFiles]:
    """Group consecutive members of a tar with the same key into samples, as WebDataset does.

    The key is the path up to the first dot of the file name, the extension the rest.
    """
    samples: list[SampleFiles] = []
    keys: set[str] = set()
    for member in members:
        directory, slash, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        key, extension = f"{directory}{slash}{stem}", extension.lower()
        if not stem or not extension:
            continue
        # A second file of an extension starts another sample, which is `repeated`.
        if not samples or samples[-1].key != key or extension in samples[-1].files:
            samples.append(SampleFiles(key, {}, key in keys))
            keys.add(key)
        samples[-1].files[extension] = member
    return samples


def parse(sample: SampleFiles, read: Reader, where: str) -> RawSample:
    """Read a sample with its images; `read` returns a member's bytes. Raises BadSample."""
    if sample.repeated:
        raise _duplicate_key(where)
    image_extension = next((name for name in IMAGES if name in sample.files), None)
    if image_extension is None:
        names = ", ".join(f"{sample.key}.{name}" for name in list(sample.files)[:4])
        dots = "; a key ends at its first dot" if any("." in name for name in sample.files) else ""
        raise BadSample("missing image", f"{where} (it has {names}{dots})")
    second_extension = next((f"1.{e}" for e in IMAGES if f"1.{e}" in sample.files), None)
    extensions = [e for e in (image_extension, second_extension) if e is not None]
    for extension in extensions:
        if (size := sample.files[extension].size) > MAX_IMAGE_BYTES:
            message = f"{where}.{extension}: {size} bytes, more than {MAX_IMAGE_BYTES}"
            raise BadSample("image too large", message)
    _require_small_texts(sample, where)
    members = [sample.files[name] for name in (*extensions, *_TEXTS) if name in sample.files]
    read = _read_together(members, read)
    annotation = parse_annotation(sample, read, where)
    image = read(sample.files[image_extension])
    second_image = read(sample.files[second_extension]) if second_extension else None
    return RawSample(sample.key, image, image_extension, annotation, second_image, where)


_ITEM_FIELDS = {"questions", "expressions", "label"}  # fields with the items of tasks


def parse_annotation(sample: SampleFiles, read: Reader, where: str) -> Annotation:
    """Parse `KEY.json`, or take the caption of `KEY.txt` and the label of `KEY.cls`.

    The JSON's caption and label win. Invalid fields of a captioned sample are dropped, as other
    tools' fields may have our names. Raises BadSample; without a caption also for invalid
    questions, expressions and labels, as evaluations would silently lose these items.
    """
    if sample.repeated:
        raise _duplicate_key(where)
    _require_small_texts(sample, where)
    json, text, label = (sample.files.get(name) for name in _TEXTS)
    try:
        annotation = Annotation()
        if json is not None:
            content = read(json).removeprefix(BOM_UTF8)
            try:
                annotation = Annotation.model_validate_json(content)
            except ValidationError as error:
                locations = [problem["loc"] for problem in error.errors()]
                invalid = {loc[0] for loc in locations if loc}
                annotation = _without_fields(content, invalid)
                is_object = all(locations)  # the location () is the whole JSON
                has_caption = is_object and len(captions_of(annotation)) > 0
                may_drop = has_caption and invalid.isdisjoint(_ITEM_FIELDS)
                if not may_drop and (text is None or not read(text).strip()):
                    raise
        if text is not None and not captions_of(annotation):
            caption = read(text).decode("utf-8-sig")
            annotation = annotation.model_copy(update={"caption": caption, "captions": None})
        if label is not None and annotation.label is None:
            value = read(label).decode("utf-8-sig").strip()
            annotation = annotation.model_copy(update={"label": value})
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        reason = f"{field} {problem['msg']}".strip()
        raise BadSample("bad annotation", f"{where}.json: {reason}") from error
    except UnicodeDecodeError as error:
        raise BadSample("bad annotation", f"{where}.txt: not UTF-8") from error
    return annotation


def _without_fields(content: bytes, invalid: set[int | str]) -> Annotation:
    """Return an annotation without some fields; an empty one if it is no JSON object."""
    try:
        fields = dict(parse_json(content))
        return Annotation.model_validate({n: fields[n] for n in fields if n not in invalid})
    except (ValueError, TypeError):
        return Annotation()


def _duplicate_key(where: str) -> BadSample:
    return BadSample(
        "duplicate key", f"{where} (came before; the files of one sample must follow each other)"
    )


def _require_small_texts(sample: SampleFiles, where: str) -> None:
    for name in _TEXTS:
        if name in sample.files and (size := sample.files[name].size) > MAX_ANNOTATION_BYTES:
            message = f"{where}.{name}: {size} bytes, more than {MAX_ANNOTATION_BYTES}"
            raise BadSample("bad annotation", message)


def _read_together(members: Sequence[Member], read: Reader) -> Reader:
    """Return a reader of members that reads them at once, unless much lies between them."""
    start = min(member.offset for member in members)
    end = max(member.offset + member.size for member in members)
    if end - start > sum(member.size for member in members) + _GAP:
        return read
    data = read(Member(members[0].name, start, end - start))
    return lambda member: data[member.offset - start : member.offset - start + member.size]


class SkippedSample(NamedTuple):
    """The fault and location of a bad sample; its row stays empty."""

    kind: str
    where: str


class DataError(Redacted, RuntimeError):
    """Error of the data that ends a run; the message is for the user."""

    # Not `message`: PyTorch passes a worker's message by that keyword to classes that have it.
    @property
    def plain_message(self) -> str:
        """The message without the traceback that PyTorch prepends to a worker's error."""
        return str(self).rpartition("DataError: ")[2].strip()


class PausedDataError(DataError):
    """A store that is unreachable for long; a scheduler starts the run again later."""


class UnreadableDataError(DataError):
    """A shard that cannot be read; a pretraining can skip its samples."""


def outage_error(bad: BadSample, policy: str, may_pass: bool = True) -> Exception:
    """Return the error for a bad sample by `OutageConfig.policy`; `may_pass`: retries may help."""
    if policy == "skip":
        return bad
    if policy == "pause" and may_pass:
        return PausedDataError(str(bad))
    return UnreadableDataError(str(bad))
