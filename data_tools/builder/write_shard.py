"""Making one shard of a build: what a worker process does."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from data_tools.builder.fit_boxes import fit_boxes
from data_tools.builder.journal import Record, shard_name
from data_tools.builder.reencode import prepare_image
from data_tools.builder.sample_spec import has_text
from data_tools.executor.executor import go_on
from data_tools.sources.image_sources import ImageLocation
from vlp.data.limits import MAX_ANNOTATION_BYTES
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.sample_files import BadSample, contents, parse_annotation
from vlp.data.shards.tar import Member, append_member, close_tar
from vlp.io import sha256_of, sync, unfollowed

RETRIED = frozenset({"missing image", "unreadable image", "image too large"})
"""Failures of images, which another try may mend."""


class ShardItem(NamedTuple):
    """A sample to be made and where its images lie (None: nowhere)."""

    key: str
    annotation: Annotation
    size: tuple[int, int] | None
    places: tuple[ImageLocation | None, ...]
    names: tuple[str, ...]


class ShardJob(NamedTuple):
    """One shard to be made.

    Args:
        number: of the shard.
        folder: that it lies in.
        items: what it stands for.
        inputs: sha256 of the items.
        taken_down: keys that are left out.
        max_side, quality: see `BuildOptions`.
        before: the record of the shard as it lies there now, whose samples are kept and whose
            failures are not tried again.
        retry: try those failures again.
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
    """Write a shard under a temporary name; putting it in its place is the caller's.

    Returns:
        The record, and the number of the process, which the temporary name holds.
    """
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
        """Copy a sample's files; its number of captions, or None where it is not there.

        Raises:
            BadSample: it failed before.
        """
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
    """Write one sample; its number of captions.

    Raises:
        BadSample: an image is missing or cannot be used, or nothing is left to say about it.
    """
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
