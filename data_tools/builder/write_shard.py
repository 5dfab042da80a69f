"""The shards of a build: which ones to write, how, and the journal of finished ones."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from itertools import count, repeat
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError

from data_tools.builder.samples import Fault, SampleSpec, TakeDown, has_text
from data_tools.executor import raise_if_stopped
from data_tools.options import BuildOptions
from data_tools.originals import ImageLocation, Originals
from data_tools.shards import ShardReader
from vlp.config import ConfigError
from vlp.data.boxes import OTHER_SHAPE, OUTSIDE, clip_box, relative_corners, turn_of
from vlp.data.image.decode import TURNS, decode_image, decoder_errors, open_image, orientation
from vlp.data.limits import MAX_ANNOTATION_BYTES
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.sample_files import BadSample, contents
from vlp.data.shards.shard_writer import shard_name
from vlp.data.shards.tar import Member, append_member, close_tar, escape_name
from vlp.io import atomic_write, open_nofollow, parse_json, sha256_of, sync

_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


class StoredImage(NamedTuple):
    """An encoded image as the shard stores it, upright."""

    data: bytes
    extension: str
    size: tuple[int, int]  # width, height in pixels
    original: tuple[int, int]  # width, height in the original's header, before turning
    orientation: int = 1  # EXIF of the original, 1 (upright) to 8; 5 to 8 exchange the sides


def prepare_image(data: bytes, where: str, max_side: int | None, quality: int) -> StoredImage:
    """Verify an image; re-encode it if not upright, above `max_side` pixels or of another format.

    Raises BadSample.
    """
    with decoder_errors(where), open_image(data, where) as image:
        original, turn = image.size, orientation(image)
        turn = turn if turn in TURNS else 1
        extension = _EXTENSIONS.get(image.format or "")
        is_too_large = max_side is not None and max(image.size) > max_side
        if extension is not None and turn == 1 and not is_too_large:
            # A draft at 1/8 of a JPEG's size still reads every byte, and is faster.
            image.draft("RGB", (image.width // 8 + 1, image.height // 8 + 1))
            image.load()
            return StoredImage(data, extension, original, original)
    upright = decode_image(data, where)
    if max_side is not None and is_too_large:
        scale = max_side / max(upright.size)
        size = max(1, round(upright.width * scale)), max(1, round(upright.height * scale))
        upright = upright.resize(size, Image.Resampling.LANCZOS)
    stream = BytesIO()
    if extension == "png":
        upright.save(stream, "PNG")
    else:
        extension = "jpg"
        upright.save(stream, "JPEG", quality=quality)
    return StoredImage(stream.getvalue(), extension, upright.size, original, turn)


def fit_boxes(
    annotation: Annotation, image: StoredImage, size: tuple[int, int] | None
) -> tuple[Annotation, dict[str, list[str]]]:
    """Turn, scale and clip the boxes of an annotation to the stored image.

    Boxes are [x, y, width, height] in pixels of `size`, by default of the upright original. Returns
    the annotation, and the names of faulty boxes by kind of fault (`vlp.data.boxes.OUTSIDE`, ...).
    """
    faults: dict[str, list[str]] = defaultdict(list)
    upright = image.original[::-1] if image.orientation > 4 else image.original
    annotated_size = size if size is not None and min(size) > 0 else upright
    turn = turn_of(annotated_size, upright, image.orientation)
    is_unchanged = turn == 1 and annotated_size == upright == image.size

    def fit(box: Sequence[float]) -> tuple[str | None, list[float] | None]:
        """Return the kind of fault (None: no fault) and the new box (None: drop it)."""
        if turn is None:
            return OTHER_SHAPE, None
        kind, corners = clip_box(box, annotated_size)
        if corners is None:
            return kind, None
        x, y, width, height = box
        # Not scaled, so not rounded: the box keeps all its digits.
        if is_unchanged and corners == (x, y, x + width, y + height):
            return None, list(box)
        left, top, right, bottom = relative_corners(corners, annotated_size, turn)
        columns, rows = image.size
        scaled = (left * columns, top * rows, (right - left) * columns, (bottom - top) * rows)
        rounded = [round(value, 2) for value in scaled]
        return (kind, rounded) if min(rounded[2:]) > 0 else (OUTSIDE, None)

    def fit_all(boxes: Iterable[Sequence[float]], names: Iterable[str]) -> list[list[float]]:
        new_boxes = []
        for box, name in zip(boxes, names):
            kind, new_box = fit(box)
            if kind is not None:
                faults[kind].append(name)
            if new_box is not None:
                new_boxes.append(new_box)
        return new_boxes

    # Words and expressions without a box are dropped.
    update: dict[str, Any] = {}
    if annotation.expressions is not None:
        update["expressions"] = [
            expression.model_copy(update={"box": box})
            for expression in annotation.expressions
            for box in fit_all([expression.box], [f"expression {expression.id}"])
        ]
    if annotation.words is not None:
        update["words"] = []
        for word in annotation.words:
            name = f"word {word.caption}.{word.index}"
            boxes = fit_all(word.boxes, repeat(name))
            if boxes:
                word_update = {"box": boxes[0], "others": boxes[1:] or None}
                update["words"].append(word.model_copy(update=word_update))
    for field in ("boxes", "proposals"):
        boxes = getattr(annotation, field)
        if boxes is not None:
            update[field] = fit_all(boxes, (f"{field} {number}" for number in count()))
    return (annotation.model_copy(update=update) if update else annotation), faults


# Failures that `--retry` tries again.
RETRYABLE = frozenset({"missing image", "unreadable image", "image too large"})


class Record(BaseModel):
    """A finished shard; it has no file if all samples failed."""

    model_config = ConfigDict(frozen=True)

    number: int
    wanted: int  # samples in this part of the list, written or not
    inputs: str  # sha256 of their keys, images and annotations
    taken_down: list[str] = []
    samples: int = 0
    captions: int = 0
    bytes: int = 0
    sha256: str = ""
    failures: dict[str, list[str]] = {}

    @property
    def name(self) -> str:
        """File name of the shard."""
        return shard_name(self.number)


class ShardItem(NamedTuple):
    """A sample to write, and the locations of its images (None: missing)."""

    sample: SampleSpec
    locations: tuple[ImageLocation | None, ...]


class ShardJob(NamedTuple):
    """A shard to write."""

    number: int
    folder: Path
    items: Sequence[ShardItem]
    inputs: str  # sha256 of the items
    take_down_keys: frozenset[str]  # keys of samples to leave out
    options: BuildOptions
    previous: Record | None  # an earlier run's, with the same inputs

    def __str__(self) -> str:
        return shard_name(self.number)


def make_shard(job: ShardJob) -> tuple[Record, Path]:
    """Write a shard under a temporary name; returns its record and its path."""
    # With the process, as a cluster may run a job twice at once, if it believes a worker lost.
    path = job.folder / f"{shard_name(job.number)}.{os.getpid()}.tmp"
    failures: dict[str, list[str]] = defaultdict(list)
    samples = captions = 0
    earlier = _EarlierShard(job)
    try:
        with open(path, "wb", opener=open_nofollow) as file:
            for item in job.items:
                raise_if_stopped()
                key = item.sample.key
                if key in job.take_down_keys:
                    continue
                try:
                    num_captions = earlier.copy(key, file, failures)
                    if num_captions is None:
                        num_captions = _write_sample(item, job, file, failures)
                except BadSample as bad:
                    failures[bad.kind].append(key)
                    continue
                samples += 1
                captions += num_captions
            close_tar(file)
            sync(file)
        digest = sha256_of(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    record = Record(
        number=job.number,
        wanted=len(job.items),
        inputs=job.inputs,
        taken_down=sorted(job.take_down_keys),
        samples=samples,
        captions=captions,
        bytes=path.stat().st_size if samples else 0,
        sha256=digest if samples else "",
        failures=dict(sorted(failures.items())),
    )
    return record, path


class _EarlierShard:
    """An earlier run's version of a shard: samples to copy, failures not to try again."""

    def __init__(self, job: ShardJob) -> None:
        self._failures: dict[str, str] = {}  # kind by key
        self._samples: dict[str, tuple[list[Member], int]] = {}  # files, number of captions
        self._box_faults: dict[str, list[tuple[str, str]]] = defaultdict(list)  # kind, name
        self._path: Path | None = None
        previous = job.previous
        if previous is None:
            return
        for kind, names in previous.failures.items():
            for name in names:
                key, slash, _ = name.partition("/")
                if slash:
                    self._box_faults[key].append((kind, name))
                elif not (job.options.retry and kind in RETRYABLE):
                    self._failures[key] = kind
        path = job.folder / previous.name
        # Samples of a damaged shard are built from the originals again.
        if not previous.samples or sha256_of(path) != previous.sha256:
            return
        self._path = path
        with ShardReader(path) as shard:
            for sample in shard.samples:
                files = list(sample.files.values())
                self._samples[sample.key] = files, shard.count_captions(sample)

    def copy(self, key: str, file: IO[bytes], failures: dict[str, list[str]]) -> int | None:
        """Append a sample's files and return its number of captions; None for a sample to build.

        Raises BadSample for a sample that failed.
        """
        if key in self._failures or key in self._samples:
            for kind, name in self._box_faults.get(key, ()):
                failures[kind].append(name)
        if key in self._failures:
            raise BadSample(self._failures[key], key)
        if self._path is None or key not in self._samples:
            return None
        members, captions = self._samples[key]
        with open(self._path, "rb") as source:
            for member in members:
                source.seek(member.offset)
                append_member(file, member.name, source.read(member.size))
        return captions


def _write_sample(
    item: ShardItem, job: ShardJob, file: IO[bytes], failures: dict[str, list[str]]
) -> int:
    """Append a sample's files and return its number of captions; raises BadSample."""
    sample, images = item.sample, []
    for location, name in zip(item.locations, sample.images, strict=True):
        if location is None:
            raise BadSample("missing image", name)
        options = job.options
        images.append(prepare_image(location.read(), name, options.max_side, options.quality))
    annotation, faults = fit_boxes(sample.annotation, images[0], sample.size)
    for kind, names in faults.items():
        failures[kind].extend(f"{sample.key}/{name}" for name in names)
    content = annotation.to_json()
    if len(content) > MAX_ANNOTATION_BYTES:
        raise BadSample("bad annotation", f"{sample.key} ({len(content)} bytes)")
    if not has_text(annotation):
        raise BadSample("no text", sample.key)
    for image, stem in zip(images, (sample.key, f"{sample.key}.1")):
        append_member(file, f"{stem}.{image.extension}", image.data)
    append_member(file, f"{sample.key}.json", content)
    return len(captions_of(annotation))


JOURNAL_NAME = "build.jsonl"
REMEDY = "pass --replace"
_SHARD_NAME = re.compile(r"shard-(?:[0-9]{6}|[1-9][0-9]{6,})\.tar")


def require_same_settings(
    out: Path, stored: Mapping[str, Any], settings: Mapping[str, Any], remedy: str
) -> None:
    """Refuse a folder with shards of other settings; only settings in `stored` are compared."""
    changed = [name for name in stored if stored[name] != settings.get(name)]
    if not changed:
        return
    # The `data_set` of an import holds its `name`, which is an option.
    name, option = changed[0], ""
    if "name" in changed:
        name, option = "name", f", pass --name {shlex.quote(stored['name'])}"
    raise ConfigError(
        f"{out} was begun with {name} {stored[name]}, this command says {settings.get(name)}: "
        f"choose another --out{option}, or {remedy}"
    )


def require_build_shards(folder: Path, has_build: bool) -> None:
    """Refuse tars that no build wrote: they would be read with the shards, or deleted."""
    # A shard's name is enough: a kill may leave a build's shard without a record.
    for path in folder.glob("*.tar"):
        if not has_build or not _SHARD_NAME.fullmatch(path.name):
            raise ConfigError(
                f"{path}: a shard that this command did not write; move it, or choose another --out"
            )


class Journal(AbstractContextManager["Journal"]):
    """Records of a folder's finished shards, a JSON line each; use it as a context, under a lock.

    The bytes of shards depend on the samples and on `settings` alone.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.records: dict[int, Record] = {}
        self._path = folder / JOURNAL_NAME
        self._settings = settings
        existed = self._path.exists()
        self._file = open(self._path, "ab", opener=open_nofollow)  # noqa: SIM115
        try:
            has_build = self._read()
            require_build_shards(folder, has_build)
            self._is_new = not has_build
            if self._is_new:
                self._append({"settings": settings})
        except BaseException:
            self._file.close()
            if not existed:
                self._path.unlink()
            raise

    def add(self, record: Record) -> None:
        """Add a finished shard, just before its file is renamed to its final name."""
        # After a kill between record and rename, `_read` finds the earlier record by its sha256.
        self.records[record.number] = record
        self._append(record.model_dump())

    def finish(self, shards: int) -> None:
        """Rewrite the file with the first `shards` records in order, and close it."""
        with atomic_write(self._path, durable=True) as file:
            file.write(_line({"settings": self._settings}))
            file.writelines(_line(self.records[number].model_dump()) for number in range(shards))
        self._file.close()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._file.close()
        has_failed = kind is not None and issubclass(kind, (Exception, GeneratorExit))
        # A build that failed before its first shard leaves no trace; Ctrl-C keeps the settings.
        if self._is_new and not self.records and has_failed:
            self._path.unlink()

    def _read(self) -> bool:
        """Read settings and records, and drop a last line that a kill made invalid.

        Returns whether any line is left.
        """
        lines = self._path.read_bytes().split(b"\n")
        size = 0  # of whole lines
        last, previous = None, None
        for number, line in enumerate(lines[:-1], 1):
            try:
                content = parse_json(line)
                if "settings" in content:
                    require_same_settings(self.folder, content["settings"], self._settings, REMEDY)
                else:
                    last = Record.model_validate(content)
                    previous = self.records.get(last.number)
                    self.records[last.number] = last
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                raise ConfigError(
                    f"{self._path}: line {number} is not a record of a build ({reason}); {REMEDY}"
                ) from error
            size += len(line) + 1
        # A kill between `add` and the renaming left the previous file in place: drop the last line.
        if last is not None and previous is not None:
            path = self.folder / last.name
            if not _matches_file(last, path) and _matches_file(previous, path):
                self.records[previous.number] = previous
                size -= len(lines[-2]) + 1
        # Also drop a line that a kill cut off, which has no line break.
        self._file.truncate(size)
        return size > 0

    def _append(self, content: dict[str, Any]) -> None:
        self._file.write(_line(content))
        sync(self._file)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _matches_file(record: Record, path: Path) -> bool:
    return sha256_of(path) == record.sha256 if path.is_file() else not record.samples


class BuildPlan:
    """Division of a list of samples into shards, and selection of the shards to write."""

    def __init__(
        self, originals: Originals, journal: Journal, options: BuildOptions, take_down: TakeDown
    ) -> None:
        self.originals = originals
        self.journal = journal
        self.options = options
        self.take_down = take_down
        self.faults: dict[str, list[str]] = defaultdict(list)  # ids by kind
        self.num_shards = 0
        self.num_unchanged = 0  # samples of shards that need no writing

    def jobs(self, specs: Iterable[SampleSpec | Fault]) -> Iterator[ShardJob]:
        """Yield the shards to write, after checking the list against all existing shards."""
        # Until the last existing shard is checked, jobs wait in a file.
        folder = self.journal.folder
        names = (path.stem.removeprefix("shard-") for path in folder.glob("*.tar"))
        last = max(map(int, names), default=-1)
        with TemporaryFile(dir=folder) as queue:
            for items in self._divide(self._usable_specs(specs)):
                number, self.num_shards = self.num_shards, self.num_shards + 1
                job = self._job(number, items)
                if job is None:
                    self.num_unchanged += len(items)
                elif number < last:
                    pickle.dump(job, queue)
                else:
                    yield from _drain(queue)
                    yield job
            if self.num_shards <= last:
                raise ConfigError(
                    f"{folder / shard_name(last)}: a shard of a longer list; this list ends after "
                    f"{self.num_shards} shards; choose another --out, or {REMEDY}"
                )
            yield from _drain(queue)

    def _usable_specs(self, specs: Iterable[SampleSpec | Fault]) -> Iterator[SampleSpec]:
        keys: set[str] = set()
        for item in specs:
            if isinstance(item, Fault):
                self.faults[item.kind].append(escape_name(item.id))
            elif not item.key.isprintable() or not item.key or {*item.key} & {*"./ "}:
                self.faults["bad key"].append(escape_name(item.key))
            elif item.key in keys:
                self.faults["duplicate key"].append(item.key)
            elif not has_text(item.annotation):
                self.faults["no text"].append(item.key)
            else:
                keys.add(item.key)
                yield item

    def _divide(self, samples: Iterator[SampleSpec]) -> Iterator[list[ShardItem]]:
        """Divide as the earlier run did, then by `samples_per_shard` samples with images."""
        items: list[ShardItem] = []
        present = number = 0
        last = max(self.journal.records, default=-1)
        pending = self._stored_keys(last) if self.options.retry else {}
        for sample in samples:
            locations = tuple(map(self.originals.find, sample.images))
            items.append(ShardItem(sample, locations))
            present += None not in locations
            pending.pop(sample.key, None)
            record = self.journal.records.get(number)
            ends_record = record is not None and len(items) == record.wanted
            # The earlier run's last shard may list many samples that had no image then. --retry
            # ends it at `samples_per_shard` samples with images, but not before its stored samples.
            may_end = record is None or (self.options.retry and number == last and not pending)
            if ends_record or (may_end and present >= self.options.samples_per_shard):
                yield items
                items, present, number = [], 0, number + 1
        if items:
            yield items

    def _job(self, number: int, items: list[ShardItem]) -> ShardJob | None:
        """Return the job that writes a shard, None if the existing shard is up to date."""
        inputs = _digest(items)
        samples = [item.sample for item in items]
        take_down_keys = frozenset(
            sample.key
            for sample in samples
            if self.take_down.matches(sample.key, sample.annotation)
        )
        record = self.journal.records.get(number)
        if record is None or record.inputs != inputs:
            self._require_superset(number, items)
            record = None
        # The size is a quick check; `make_shard` compares the sha256 before it copies samples.
        elif record.samples:
            path = self.journal.folder / record.name
            if not path.is_file() or path.stat().st_size != record.bytes:
                record = None
        if record is not None and set(record.taken_down) == take_down_keys:
            may_retry = self.options.retry and record.failures.keys() & RETRYABLE
            if not may_retry:
                return None
        return ShardJob(
            number, self.journal.folder, items, inputs, take_down_keys, self.options, record
        )

    def _require_superset(self, number: int, items: list[ShardItem]) -> None:
        # Otherwise a shard would lose samples that a model may have been trained on.
        keys = {item.sample.key for item in items}
        lost = [key for key in self._stored_keys(number) if key not in keys]
        if lost:
            path = self.journal.folder / shard_name(number)
            raise ConfigError(
                f"{path}: holds {lost[0]}, one of {len(lost)} samples that this list does not "
                "have in this shard; add new samples after the old ones, choose another --out, or "
                f"{REMEDY}"
            )

    def _stored_keys(self, number: int) -> dict[str, None]:
        """Return the keys in an existing shard, in order; empty without the shard."""
        return dict.fromkeys(
            sample.key for sample in contents(self.journal.folder / shard_name(number)).samples
        )


def _drain(queue: IO[bytes]) -> Iterator[ShardJob]:
    """Yield the jobs in a file from its start, then empty it."""
    end = queue.tell()
    queue.seek(0)
    while queue.tell() < end:
        yield pickle.load(queue)
    queue.seek(0)
    queue.truncate()


def _digest(items: Iterable[ShardItem]) -> str:
    digest = hashlib.sha256()
    for sample, _ in items:
        digest.update(json.dumps([sample.key, sample.images, sample.size]).encode())
        digest.update(sample.annotation.to_json())
    return digest.hexdigest()
