"""One shard of a build, and the journal of finished shards: one line of JSON a shard."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError

from data_tools.builder.samples import Refused, SampleSpec, TakeDown, has_text
from data_tools.executor import go_on
from data_tools.options import BuildOptions
from data_tools.originals import ImageLocation, Originals
from data_tools.shards import ShardReader
from vlp.config import ConfigError
from vlp.data.boxes import OTHER_SHAPE, OUTSIDE, clip_box, shares, turn_of
from vlp.data.image.decode import TURNS, decode_image, decoder_errors, open_image, orientation
from vlp.data.limits import MAX_ANNOTATION_BYTES
from vlp.data.schema import Annotation, Expression, Word, captions_of
from vlp.data.shards.sample_files import BadSample, contents
from vlp.data.shards.tar import Member, append_member, close_tar, readable
from vlp.io import atomic_write, open_nofollow, parse_json, sha256_of, sync

_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


class Prepared(NamedTuple):
    """An encoded image as it is stored."""

    data: bytes
    extension: str
    size: tuple[int, int]  # width, height in pixels
    original: tuple[int, int]  # width, height in the original's header, before turning
    orientation: int = 1  # EXIF, 1 (upright) to 8; from 5 on sides are exchanged


def prepare_image(data: bytes, where: str, max_side: int | None, quality: int) -> Prepared:
    """Verify an image; re-encode it if turned, above `max_side` pixels or of another format.

    Raises BadSample.
    """
    with decoder_errors(where), open_image(data, where) as image:
        original, turn = image.size, orientation(image)
        turn = turn if turn in TURNS else 1
        kind = _EXTENSIONS.get(image.format or "")
        reduced = max_side is not None and max(image.size) > max_side
        if kind is not None and turn == 1 and not reduced:
            # Of a JPEG at an eighth of its size every byte is still read, in less time.
            image.draft("RGB", (image.width // 8 + 1, image.height // 8 + 1))
            image.load()
            return Prepared(data, kind, original, original)
    # What is written anew stays PNG, or becomes JPEG.
    stored = decode_image(data, where)
    if max_side is not None and reduced:
        scale = max_side / max(stored.size)
        size = max(1, round(stored.width * scale)), max(1, round(stored.height * scale))
        stored = stored.resize(size, Image.Resampling.LANCZOS)
    stream = BytesIO()
    if kind == "png":
        stored.save(stream, "PNG")
    else:
        kind = "jpg"
        stored.save(stream, "JPEG", quality=quality)
    return Prepared(stream.getvalue(), kind, stored.size, original, turn)


def fit_boxes(
    annotation: Annotation, image: Prepared, size: tuple[int, int] | None
) -> tuple[Annotation, dict[str, list[str]]]:
    """Scale, turn and cut every box by the rule of `vlp.data.boxes`.

    Boxes are [x, y, width, height] in pixels of `size`, by default of the upright original. Returns
    the annotation, and the names of faulty boxes by kind (`vlp.data.boxes.OUTSIDE`, ...).
    """
    faults: dict[str, list[str]] = defaultdict(list)
    upright = image.original[::-1] if image.orientation > 4 else image.original
    drawn_on = size if size is not None and min(size) > 0 else upright
    turn = turn_of(drawn_on, upright, image.orientation)
    same = turn == 1 and drawn_on == upright == image.size

    def fit(box: Sequence[float]) -> tuple[str | None, list[float] | None]:
        if turn is None:
            return OTHER_SHAPE, None
        kind, corners = clip_box(box, drawn_on)
        if corners is None:
            return kind, None
        x, y, wide, high = box
        # An unchanged box keeps all its digits.
        if same and corners == (x, y, x + wide, y + high):
            return None, list(box)
        left, top, right, low = shares(corners, drawn_on, turn)
        across, down = image.size
        scaled = (left * across, top * down, (right - left) * across, (low - top) * down)
        rounded = [round(value, 2) for value in scaled]
        return (kind, rounded) if min(rounded[2:]) > 0 else (OUTSIDE, None)

    def fitted(box: Sequence[float], name: str) -> list[float] | None:
        kind, fitted_box = fit(box)
        if kind is not None:
            faults[kind].append(name)
        return fitted_box

    def fitted_word(word: Word) -> Word | None:
        name = f"word {word.caption}.{word.index}"
        boxes = [fitted(box, name) for box in (word.box, *(word.others or ()))]
        inside = [box for box in boxes if box is not None]
        # A word or expression without a box has nothing to point at.
        if not inside:
            return None
        return word.model_copy(update={"box": inside[0], "others": inside[1:] or None})

    update: dict[str, list[Expression] | list[Word] | list[list[float]]] = {}
    if annotation.expressions is not None:
        update["expressions"] = [
            expression.model_copy(update={"box": box})
            for expression in annotation.expressions
            if (box := fitted(expression.box, f"expression {expression.id}")) is not None
        ]
    if annotation.words is not None:
        words = map(fitted_word, annotation.words)
        update["words"] = [word for word in words if word is not None]
    for name in ("boxes", "proposals"):
        boxes = getattr(annotation, name)
        if boxes is not None:
            fitted_boxes = [fitted(box, f"{name} {number}") for number, box in enumerate(boxes)]
            update[name] = [box for box in fitted_boxes if box is not None]
    return (annotation.model_copy(update=update) if update else annotation), faults


# Another try may help.
RETRIED = frozenset({"missing image", "unreadable image", "image too large"})


class Record(BaseModel):
    """One finished shard; it has no file if all samples failed."""

    model_config = ConfigDict(frozen=True)

    number: int
    # Samples of the list, written or not, and the sha256 of their keys, images and annotations.
    wanted: int
    inputs: str
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


def shard_name(number: int) -> str:
    """Return the file name of a shard, as `ShardWriter` names them."""
    return f"shard-{number:06d}.tar"


class ShardItem(NamedTuple):
    """A sample to build and the places of its images (None: missing)."""

    key: str
    annotation: Annotation
    size: tuple[int, int] | None
    locations: tuple[ImageLocation | None, ...]
    names: tuple[str, ...]


class ShardJob(NamedTuple):
    """One shard to build; `inputs` is its items' sha256, `previous` the earlier run's record."""

    number: int
    folder: Path
    items: Sequence[ShardItem]
    inputs: str
    removed: frozenset[str]
    max_side: int | None
    quality: int
    previous: Record | None = None
    retry: bool = False

    def __str__(self) -> str:
        return shard_name(self.number)


def temporary(folder: Path, number: int, process: int) -> Path:
    """Return the path that a process writes a shard to before it is put in its place."""
    return folder / f"{shard_name(number)}.{process}.tmp"


def make_shard(job: ShardJob) -> tuple[Record, int]:
    """Write a shard under a temporary name; return the record and the process in that name."""
    process = os.getpid()
    # Two processes may write one shard, where a cluster takes the first for lost.
    path = temporary(job.folder, job.number, process)
    failures: dict[str, list[str]] = defaultdict(list)
    samples = captions = 0
    stored = _Stored(job)
    try:
        with open(path, "wb", opener=open_nofollow) as file:
            for item in job.items:
                go_on()
                if item.key in job.removed:
                    continue
                try:
                    count = stored.copy(item.key, file, failures)
                    if count is None:
                        count = _write(item, job, file, failures)
                except BadSample as bad:
                    failures[bad.kind].append(item.key)
                    continue
                samples += 1
                captions += count
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
        taken_down=sorted(job.removed),
        samples=samples,
        captions=captions,
        bytes=path.stat().st_size if samples else 0,
        sha256=digest if samples else "",
        failures=dict(sorted(failures.items())),
    )
    return record, process


class _Stored:
    """Result of an earlier run for this shard: samples to copy, failures not to try again."""

    def __init__(self, job: ShardJob) -> None:
        self._failed: dict[str, str] = {}
        self._samples: dict[str, tuple[list[Member], int]] = {}
        self._boxes: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._data: Path | None = None
        previous = job.previous
        if previous is None:
            return
        for kind, names in previous.failures.items():
            for name in names:
                key, slash, _ = name.partition("/")
                if slash:
                    self._boxes[key].append((kind, name))
                elif not (job.retry and kind in RETRIED):
                    self._failed[key] = kind
        if previous.samples:
            self._load(job.folder / previous.name, previous.sha256)

    def copy(self, key: str, file: IO[bytes], failures: dict[str, list[str]]) -> int | None:
        """Copy a sample's files and return its number of captions; None if missing."""
        if key in self._failed or key in self._samples:
            for kind, name in self._boxes.get(key, ()):
                failures[kind].append(name)
        if key in self._failed:
            raise BadSample(self._failed[key], key)
        if self._data is None or key not in self._samples:
            return None
        members, captions = self._samples[key]
        with open(self._data, "rb") as source:
            for member in members:
                source.seek(member.offset)
                append_member(file, member.name, source.read(member.size))
        return captions

    def _load(self, path: Path, digest: str) -> None:
        # A damaged shard is built from the originals again.
        if sha256_of(path) != digest:
            return
        with ShardReader(path) as shard:
            for sample in shard.samples:
                count = len(captions_of(shard.annotation(sample)))
                self._samples[sample.key] = (list(sample.files.values()), count)
        self._data = path


def _write(item: ShardItem, job: ShardJob, file: IO[bytes], failures: dict[str, list[str]]) -> int:
    """Write one sample and return its number of captions; raises BadSample."""
    images = []
    for location, name in zip(item.locations, item.names, strict=True):
        if location is None:
            raise BadSample("missing image", name)
        images.append(prepare_image(location.read(), name, job.max_side, job.quality))
    annotation, faults = fit_boxes(item.annotation, images[0], item.size)
    for kind, names in faults.items():
        failures[kind].extend(f"{item.key}/{name}" for name in names)
    content = annotation.to_json()
    if len(content) > MAX_ANNOTATION_BYTES:
        raise BadSample("bad annotation", f"{item.key} ({len(content)} bytes)")
    if not has_text(annotation):
        raise BadSample("no text", item.key)
    for number, image in enumerate(images):
        middle = f".{number}" if number else ""
        append_member(file, f"{item.key}{middle}.{image.extension}", image.data)
    append_member(file, f"{item.key}.json", content)
    return len(captions_of(annotation))


JOURNAL_NAME = "build.jsonl"
REMEDY = "--replace what is there"


def require_same_settings(
    out: Path, stored: Mapping[str, Any], settings: Mapping[str, Any], remedy: str
) -> None:
    """Refuse a folder that was begun with other settings."""
    # Settings that an older version did not store count as equal.
    for name, value in {**dict.fromkeys(stored), **settings}.items():
        if name in stored and stored[name] != value:
            raise ConfigError(
                f"{out} was begun with {name} {stored[name]}, this command says {value}: choose "
                f"another --out, or {remedy}"
            )


def require_own_shards(folder: Path, has_build: bool) -> None:
    """Refuse tars in OUT that no build wrote; they are neither deleted nor read with the shards."""
    # A shard without a record was published just before a kill: it is made again. One in a
    # folder where no build began, or of another kind of name, is somebody else's.
    for path in folder.glob("*.tar"):
        if not (has_build and is_shard_name(path.name)):
            raise ConfigError(
                f"{path}: a shard that this command did not write; move it, or choose another --out"
            )


class Journal:
    """The records of a folder of shards by number, as a context; the caller holds the lock."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.records: dict[int, Record] = {}
        self._path = folder / JOURNAL_NAME
        # All that the bytes of the shards depend on.
        self._settings = settings
        was_there = self._path.exists()
        self._file = open(self._path, "ab", opener=open_nofollow)  # noqa: SIM115
        try:
            has_build = self._read()
            require_own_shards(folder, has_build)
            self._is_new = not has_build
            if self._is_new:
                self._append({"settings": settings})
        except BaseException:
            self._file.close()
            if not was_there:
                self._path.unlink()
            raise

    def add(self, record: Record) -> None:
        """Remember a finished shard, just before its file is put in its place."""
        # After a kill between the two, the file's sha256 tells that the earlier record holds.
        self.records[record.number] = record
        self._append(record.model_dump())

    def last_shard(self) -> int:
        """Return the number of the last shard with a file; -1 without any."""
        names = (path.stem.removeprefix("shard-") for path in self.folder.glob("*.tar"))
        return max(map(int, names), default=-1)

    def finish(self, shards: int) -> None:
        """Write the file anew with the first `shards` records."""
        # In order, as parallel builds append them as they come.
        with atomic_write(self._path, durable=True) as file:
            file.write(_line({"settings": self._settings}))
            file.writelines(_line(self.records[number].model_dump()) for number in range(shards))
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._file.close()
        is_refused = kind is not None and issubclass(kind, (Exception, GeneratorExit))
        # A refused build has not begun; an interrupted one has.
        if self._is_new and not self.records and is_refused:
            self._path.unlink()

    def _read(self) -> bool:
        """Read the records; return whether a build began."""
        lines = self._path.read_bytes().split(b"\n")
        whole = 0
        last, previous = None, None
        for number, line in enumerate(lines[:-1], 1):
            try:
                content = parse_json(line)
                if "settings" in content:
                    self._compare(content["settings"])
                else:
                    last = Record.model_validate(content)
                    previous = self.records.get(last.number)
                    self.records[last.number] = last
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                raise ConfigError(
                    f"{self._path}: line {number} is not of a build ({reason}); {REMEDY}"
                ) from error
            whole += len(line) + 1
        if last is not None and previous is not None:
            path = self.folder / last.name
            if not _holds(path, last) and _holds(path, previous):
                self.records[previous.number] = previous
                whole -= len(lines[-2]) + 1
        # Behind the last line break lies the line a kill cut off.
        self._file.truncate(whole)
        return whole > 0

    def _compare(self, stored: dict[str, Any]) -> None:
        require_same_settings(self.folder, stored, self._settings, REMEDY)

    def _append(self, content: dict[str, Any]) -> None:
        self._file.write(_line(content))
        sync(self._file)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _holds(path: Path, record: Record) -> bool:
    return sha256_of(path) == record.sha256 if path.is_file() else not record.samples


def is_shard_name(name: str) -> bool:
    """Return whether a build gives its shards such a name."""
    digits = name.removeprefix("shard-").removesuffix(".tar")
    return digits.isdecimal() and name == shard_name(int(digits))


class Pieces:
    """Cutter of the list into pieces, which also decides which of them to build."""

    def __init__(
        self, originals: Originals, journal: Journal, options: BuildOptions, take_down: TakeDown
    ) -> None:
        self.originals = originals
        self.journal = journal
        self.options = options
        self.take_down = take_down
        self.refused: dict[str, list[str]] = defaultdict(list)
        self.shards = 0
        # Samples of shards that need not be made.
        self.unchanged = 0

    def jobs(self, specs: Iterable[SampleSpec | Refused]) -> Iterator[ShardJob]:
        """Yield the shards to build, once the list is read up to the last existing shard."""
        # Whether the list belongs to them is known then, so jobs before it wait in a file.
        last = self.journal.last_shard()
        with TemporaryFile(dir=self.journal.folder) as queue:
            for piece in self._pieces(self._usable(specs)):
                number, self.shards = self.shards, self.shards + 1
                job = self._job(number, piece)
                if job is None:
                    self.unchanged += len(piece)
                elif number < last:
                    pickle.dump(job, queue)
                else:
                    yield from _drained(queue)
                    yield job
            if self.shards <= last:
                raise ConfigError(
                    f"{self.journal.folder / shard_name(last)}: a shard of a longer list, and this "
                    f"one ends after {self.shards}; choose another --out, or {REMEDY}"
                )
            yield from _drained(queue)

    def _usable(self, specs: Iterable[SampleSpec | Refused]) -> Iterator[SampleSpec]:
        keys: set[str] = set()
        for item in specs:
            if isinstance(item, Refused):
                self.refused[item.kind].append(readable(item.id))
            elif not item.key.isprintable() or not item.key or {*item.key} & {*"./ "}:
                self.refused["bad key"].append(readable(item.key))
            elif item.key in keys:
                self.refused["duplicate key"].append(item.key)
            elif not has_text(item.annotation):
                self.refused["no text"].append(item.key)
            else:
                keys.add(item.key)
                yield item

    def _pieces(self, samples: Iterator[SampleSpec]) -> Iterator[list[ShardItem]]:
        """Cut where an earlier run cut, else after `samples_per_shard` samples with images."""
        piece: list[ShardItem] = []
        present = number = 0
        last = max(self.journal.records, default=-1)
        pending = self._stored_keys(last) if self.options.retry else {}
        for item in samples:
            locations = tuple(map(self.originals.find, item.images))
            piece.append(ShardItem(item.key, item.annotation, item.size, locations, item.images))
            present += None not in locations
            previous = self.journal.records.get(number)
            cut_previously = previous is not None and len(piece) == previous.wanted
            pending.pop(item.key, None)
            # The last piece of an earlier run holds all that was not downloaded yet.
            may_cut = previous is None or (self.options.retry and number == last and not pending)
            if cut_previously or (may_cut and present >= self.options.samples_per_shard):
                yield piece
                piece, present, number = [], 0, number + 1
        if piece:
            yield piece

    def _job(self, number: int, piece: list[ShardItem]) -> ShardJob | None:
        inputs = _digest(piece)
        removed = frozenset(
            item.key for item in piece if self.take_down.names(item.key, item.annotation)
        )
        stored = self.journal.records.get(number)
        if stored is None or stored.inputs != inputs:
            self._require_superset(number, piece)
            stored = None
        # The size tells enough here; `make_shard` compares the sha256 before it copies.
        elif not self._is_there(stored):
            stored = None
        retry = self.options.retry and stored is not None and bool(stored.failures.keys() & RETRIED)
        if stored is not None and set(stored.taken_down) == removed and not retry:
            return None
        return ShardJob(
            number,
            self.journal.folder,
            piece,
            inputs,
            removed,
            self.options.max_side,
            self.options.quality,
            stored,
            self.options.retry,
        )

    def _require_superset(self, number: int, piece: list[ShardItem]) -> None:
        # A shard would lose samples that its users have trained on.
        keys = {item.key for item in piece}
        lost = [key for key in self._stored_keys(number) if key not in keys]
        if lost:
            path = self.journal.folder / shard_name(number)
            raise ConfigError(
                f"{path}: holds {lost[0]}, one of {len(lost)} samples that this list does not "
                "have there (new ones must follow those of before); choose another --out, or "
                f"{REMEDY}"
            )

    def _stored_keys(self, number: int) -> dict[str, None]:
        """Return the keys of the samples in the existing shard, in order."""
        path = self.journal.folder / shard_name(number)
        return (
            dict.fromkeys(sample.key for sample in contents(path).samples) if path.exists() else {}
        )

    def _is_there(self, record: Record) -> bool:
        path = self.journal.folder / record.name
        return not record.samples or (path.is_file() and path.stat().st_size == record.bytes)


def _drained(queue: IO[bytes]) -> Iterator[ShardJob]:
    # The file is empty afterwards.
    end = queue.tell()
    queue.seek(0)
    while queue.tell() < end:
        yield pickle.load(queue)
    queue.seek(0)
    queue.truncate()


def _digest(piece: list[ShardItem]) -> str:
    digest = hashlib.sha256()
    for item in piece:
        digest.update(json.dumps([item.key, item.names, item.size]).encode())
        digest.update(item.annotation.to_json())
    return digest.hexdigest()
