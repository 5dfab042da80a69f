"""Making one shard of a build: original images and boxes as they are stored."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple

from PIL import Image
from pydantic import BaseModel, ConfigDict

from data_tools.builder.samples import has_text
from data_tools.executor import go_on
from data_tools.originals import ImageLocation
from vlp.data.image.decode import TURNS, decode_image, open_image, orientation, reading
from vlp.data.limits import MAX_ANNOTATION_BYTES
from vlp.data.schema import Annotation, Expression, Word, captions_of
from vlp.data.shards.sample_files import BadSample, contents, parse_annotation
from vlp.data.shards.tar import Member, append_member, close_tar
from vlp.io import sha256_of, sync, unfollowed

_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


class Prepared(NamedTuple):
    """An encoded image as it is stored."""

    data: bytes
    extension: str
    size: tuple[int, int]
    """Width and height in pixels."""
    original: tuple[int, int]
    """Width and height that the header of the original says, before it is turned."""
    orientation: int = 1
    """Of the original, by EXIF: 1 (upright) to 8; from 5 on width and height are exchanged."""


def prepare_image(data: bytes, where: str, max_side: int | None, quality: int) -> Prepared:
    """Check an image wholly and re-encode it where it must be; raises BadSample.

    One whose longest side is above `max_side` pixels is reduced (Lanczos). Re-encoded images become
    JPEG; PNG stays PNG.
    """
    with reading(where), open_image(data, where) as image:
        original, turn = image.size, orientation(image)
        turn = turn if turn in TURNS else 1
        kind = _EXTENSIONS.get(image.format or "")
        reduced = max_side is not None and max(image.size) > max_side
        if kind is not None and turn == 1 and not reduced:
            # Of a JPEG at an eighth of its size every byte is still read, in less time.
            image.draft("RGB", (image.width // 8 + 1, image.height // 8 + 1))
            image.load()
            return Prepared(data, kind, original, original)
    stored = decode_image(data, where)
    if max_side is not None and reduced:
        stored = stored.resize(_fitted(stored.size, max_side), Image.Resampling.LANCZOS)
    stream = BytesIO()
    if kind == "png":
        stored.save(stream, "PNG")
    else:
        kind = "jpg"
        stored.save(stream, "JPEG", quality=quality)
    return Prepared(stream.getvalue(), kind, stored.size, original, turn)


def _fitted(size: tuple[int, int], max_side: int) -> tuple[int, int]:
    scale = max_side / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


OUTSIDE, CUT = "box outside its image", "box cut at the edge of its image (kept)"

LEAST_INSIDE = 0.5
"""A box is kept if more than this share of its area lies in the image, which it is cut to."""

TOLERANCE = 1.0
"""Pixels by which a box may stick out (rounding) without being counted as cut."""

# What each EXIF orientation does to a point, in shares of width and height.
_TURNED = {
    2: lambda x, y: (1 - x, y),
    3: lambda x, y: (1 - x, 1 - y),
    4: lambda x, y: (x, 1 - y),
    5: lambda x, y: (y, x),
    6: lambda x, y: (1 - y, x),
    7: lambda x, y: (1 - y, 1 - x),
    8: lambda x, y: (y, 1 - x),
}


def fit_boxes(
    annotation: Annotation, image: Prepared, size: tuple[int, int] | None
) -> tuple[Annotation, dict[str, list[str]]]:
    """Scale, turn and cut every box so that it lies in the stored image.

    Published boxes stick out of their images now and then (Visual Genome's by dozens of pixels):
    what sticks out is cut off. A box without area, or with too little of it inside
    (`LEAST_INSIDE`), is left out, an expression or a named word with it. Boxes are [x, y, width,
    height] in pixels of `size`, by default of the upright original. Returns the annotation, and by
    kind (`OUTSIDE`, `CUT`) the names of such boxes (`expression 7`, `boxes 0`).
    """
    faults: dict[str, list[str]] = defaultdict(list)
    frame = _Frame(image, size)

    def fitted(box: Sequence[float], name: str) -> list[float] | None:
        kind, kept = frame.fit(box)
        if kind is not None:
            faults[kind].append(name)
        return kept

    def fitted_word(word: Word) -> Word | None:
        name = f"word {word.caption}.{word.index}"
        kept = [fitted(box, name) for box in (word.box, *(word.others or ()))]
        inside = [box for box in kept if box is not None]
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
            kept = [fitted(box, f"{name} {number}") for number, box in enumerate(boxes)]
            update[name] = [box for box in kept if box is not None]
    return (annotation.model_copy(update=update) if update else annotation), faults


class _Frame:
    """From the pixels that boxes were drawn on to those of the stored image."""

    def __init__(self, image: Prepared, size: tuple[int, int] | None) -> None:
        exchanged = image.orientation > 4
        upright = image.original[::-1] if exchanged else image.original
        self._drawn_on = size if size is not None and min(size) > 0 else upright
        self._stored = image.size
        self._same = self._drawn_on == upright == image.size
        # Boxes that were drawn on the image before it was turned have its shape, not the upright.
        turn = exchanged and _shape_differs(self._drawn_on, upright)
        self._turn = _TURNED[image.orientation] if turn else None

    def fit(self, box: Sequence[float]) -> tuple[str | None, list[float] | None]:
        """Return the kind of fault of a box, if any, and the box (None: left out)."""
        x, y, wide, high = box
        width, height = self._drawn_on
        left, top = max(x, 0.0), max(y, 0.0)
        right, low = min(x + wide, width), min(y + high, height)
        area = wide * high
        if right <= left or low <= top or area == 0:
            return OUTSIDE, None
        if (left, top, right, low) == (x, y, x + wide, y + high) and self._same:
            return None, list(box)
        out = max(left - x, top - y, x + wide - right, y + high - low)
        if out > TOLERANCE and (right - left) * (low - top) <= LEAST_INSIDE * area:
            return OUTSIDE, None
        start, end = (left / width, top / height), (right / width, low / height)
        if self._turn is not None:
            start, end = self._turn(*start), self._turn(*end)
        (left, right), (top, low) = map(sorted, zip(start, end))
        across, down = self._stored
        scaled = (left * across, top * down, (right - left) * across, (low - top) * down)
        kept = [round(value, 2) for value in scaled]
        if min(kept[2:]) == 0:
            return OUTSIDE, None
        return CUT if out > TOLERANCE else None, kept


def _shape_differs(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a size is nearer to the other one with its sides exchanged."""
    ratio, aspect = math.log(one[0] / one[1]), math.log(other[0] / other[1])
    return abs(ratio + aspect) < abs(ratio - aspect)


RETRIED = frozenset({"missing image", "unreadable image", "image too large"})
"""Failures of images, which another try may mend."""


class Record(BaseModel):
    """One finished shard; without samples (all of them failed) it has no file."""

    model_config = ConfigDict(frozen=True)

    number: int
    wanted: int
    """Samples of the list that this shard stands for, written or not."""
    inputs: str
    """sha256 of those: keys, images and annotations."""
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
    """A sample to be made and where its images lie (None: nowhere)."""

    key: str
    annotation: Annotation
    size: tuple[int, int] | None
    places: tuple[ImageLocation | None, ...]
    names: tuple[str, ...]


class ShardJob(NamedTuple):
    """One shard to be made of items, whose sha256 is `inputs`.

    The samples of `before`, the record of the shard as it lies there now, are kept, and its
    failures not tried again unless `retry`.
    """

    number: int
    folder: Path
    items: Sequence[ShardItem]
    inputs: str
    taken_down: frozenset[str]
    max_side: int | None
    quality: int
    before: Record | None = None
    retry: bool = False

    def __str__(self) -> str:
        return shard_name(self.number)


def temporary(folder: Path, number: int, process: int) -> Path:
    """Return the path that a process writes a shard to before it is put in its place."""
    return folder / f"{shard_name(number)}.{process}.tmp"


def make_shard(job: ShardJob) -> tuple[Record, int]:
    """Write a shard under a temporary name; return the record and the process in that name."""
    process = os.getpid()
    path = temporary(job.folder, job.number, process)
    failures: dict[str, list[str]] = defaultdict(list)
    samples = captions = 0
    stored = _Stored(job)
    try:
        with open(path, "wb", opener=unfollowed) as file:
            for item in job.items:
                go_on()
                if item.key in job.taken_down:
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
        taken_down=sorted(job.taken_down),
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
        before = job.before
        if before is None:
            return
        for kind, names in before.failures.items():
            for name in names:
                key, slash, _ = name.partition("/")
                if slash:
                    self._boxes[key].append((kind, name))
                elif not (job.retry and kind in RETRIED):
                    self._failed[key] = kind
        if before.samples:
            self._load(job.folder / before.name, before.sha256)

    def copy(self, key: str, file: IO[bytes], failures: dict[str, list[str]]) -> int | None:
        """Copy a sample's files and return its number of captions; None where it is not there."""
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
        if sha256_of(path) != digest:
            return
        with open(path, "rb") as file:

            def read(member: Member) -> bytes:
                file.seek(member.offset)
                return file.read(member.size)

            for sample in contents(path).samples:
                count = len(captions_of(parse_annotation(sample, read, str(path))))
                self._samples[sample.key] = (list(sample.files.values()), count)
        self._data = path


def _write(item: ShardItem, job: ShardJob, file: IO[bytes], failures: dict[str, list[str]]) -> int:
    """Write one sample and return its number of captions; raises BadSample."""
    images = []
    for place, name in zip(item.places, item.names, strict=True):
        if place is None:
            raise BadSample("missing image", name)
        images.append(prepare_image(place.read(), name, job.max_side, job.quality))
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
