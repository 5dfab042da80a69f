"""Samples of shard folders in a fixed order, and workers that read them in blocks."""

from __future__ import annotations

import io
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation, caption_indices, captions_of
from vlp.data.shards.remote import is_url
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.shard_reader import Items
from vlp.data.stream.loader import open_loader, worker_settings
from vlp.io import Redacted
from vlp.training.engines.environment import cores_of_rank


class EvaluationError(Redacted, ValueError):
    """Wrong input of an evaluation; the command prints its message in one line."""


@contextmanager
def single_line_errors(kind: type[Exception] = ValueError) -> Iterator[None]:
    """Turn an error of a kind into an EvaluationError with its message in one line."""
    try:
        yield
    except kind as error:
        raise EvaluationError(" ".join(str(error).split())) from error


class CaptionedSample(NamedTuple):
    """One image with its captions."""

    # Decoded, or stored output of the image tower (tokens, width).
    image: Image.Image
    captions: list[str]
    annotation: Annotation
    # (source, image_id), equal for all samples of one image.
    image_identity: tuple[str, str]
    key: str = ""
    # Hash of the image's bytes; empty if it has an image_id.
    digest: str = ""


class Samples:
    """Random access to the samples of shard folders, in the order of folders and shards."""

    def __init__(self, folders: Sequence[str | Path], limit: int | None = None) -> None:
        """Open the folders' indices; `limit` keeps the first samples."""
        self._items = Items(folders, limit=limit)
        self.folders = list(self._items.folders)
        self._sources = [_canonical_folder(folder) for folder in self.folders]

    def __len__(self) -> int:
        return len(self._items)

    def read(self, index: int, min_size: int | None = None) -> CaptionedSample | SkippedSample:
        """Read and decode a sample; return a SkippedSample if it is corrupt or has no caption.

        min_size: pixels that both sides keep when a JPEG is decoded at a reduced size.
        """
        try:
            raw = self._items.read(index).raw
            captions = captions_of(raw.annotation)
            if not captions:
                raise BadSample("no text", raw.where)
            image = self._image(index, raw.image, raw.where, min_size)
        except BadSample as bad:
            return SkippedSample(bad.kind, bad.where)
        image_id = raw.annotation.image_id
        folder, shard, *_ = self._items.locate(index)
        digest = ""
        # Images with equal bytes and no image_id are reported, but not merged.
        if image_id is None:
            digest = raw.image_digest
            shard_name = self._items.indices[folder].shards[shard].name
            image_identity = (self._sources[folder], f"{shard_name}, {raw.key}")
        else:
            image_identity = (raw.annotation.source or self._sources[folder], image_id)
        return CaptionedSample(image, captions, raw.annotation, image_identity, raw.key, digest)

    def _image(self, index: int, data: bytes, where: str, min_size: int | None) -> Any:
        return decode_image(data, where, min_size)


def drop_blank_captions(sample: CaptionedSample | SkippedSample) -> CaptionedSample | SkippedSample:
    """Return a sample without blank captions, with caption indices of words updated.

    A word of a blank or missing caption makes it a SkippedSample.
    """
    if isinstance(sample, SkippedSample):
        return sample
    annotation = sample.annotation
    if annotation.words is None:
        return sample
    indices = caption_indices(annotation)
    words = []
    for word in annotation.words:
        if word.caption not in indices:
            where = (
                f"{'/'.join(sample.image_identity)}: word {word.word!r} of caption {word.caption}"
            )
            return SkippedSample("bad annotation", f"{where}, which is blank or missing")
        words.append(word.model_copy(update={"caption": indices.index(word.caption)}))
    without_blanks = annotation.model_copy(update={"captions": sample.captions, "words": words})
    return sample._replace(annotation=without_blanks)


def _canonical_folder(folder: str) -> str:
    """Return the absolute path of a folder, the same however it is written; URLs unchanged."""
    return folder if is_url(folder) else str(Path(folder).resolve())


def count_kinds(skipped: Sequence[SkippedSample]) -> dict[str, int]:
    """Return the number of skipped samples by kind."""
    return dict(sorted(Counter(skip.kind for skip in skipped).items()))


def format_kinds(counts: Mapping[str, int]) -> str:
    """Format the result of `count_kinds` as text: `3 no text, 1 unreadable image`."""
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


Value = TypeVar("Value")

MAX_WORKERS = 8
# Bytes to which tensors are aligned in a buffer; a multiple of every element's size.
_ALIGNMENT = 64


def workers_for(device: torch.device, workers: int | None) -> int:
    """Return the number of worker processes: `workers`.

    None: 0 on a CPU, and on a GPU the number of this rank's cores, at most 8.
    """
    if workers is not None:
        return workers
    return 0 if device.type == "cpu" else min(MAX_WORKERS, cores_of_rank())


class BlockReader(Generic[Value]):
    """Reader of blocks by number: `reader[block]` is `read(block)`.

    Within `prefetch`, worker processes read the next blocks in the background, into pinned memory
    for a GPU. They need a picklable `read` that returns CPU tensors and holds no model.
    """

    def __init__(
        self, read: Callable[[int], Value], device: torch.device, workers: int | None = None
    ) -> None:
        self._read, self._pin = read, device.type == "cuda"
        self._workers = workers_for(device, workers)
        self._prefetch_blocks = range(0)
        self._next_block = -1
        self._worker_values: Generator[Value, None, None] | None = None

    @contextmanager
    def prefetch(self, blocks: range) -> Iterator[None]:
        """Read `blocks` in the background within the context, for access in rising order."""
        self._prefetch_blocks = blocks if self._workers else range(0)
        try:
            yield
        finally:
            self._prefetch_blocks = range(0)
            self._stop()

    def values(self, blocks: range) -> Iterator[Value]:
        """Yield the values of `blocks` in order, prefetched."""
        with self.prefetch(blocks):
            yield from map(self.__getitem__, blocks)

    def __getitem__(self, block: int) -> Value:
        """Return a block's value; an error of `read` is raised unchanged, also from a worker."""
        if block not in self._prefetch_blocks:
            return self._read(block)
        # The workers read on in order: for any other block they start again at that block.
        if self._worker_values is None or block != self._next_block:
            self._stop()
            self._worker_values = self._from_workers(range(block, self._prefetch_blocks.stop))
        # -1 if `next` raises: the workers then start again at the next block that is read.
        self._next_block = -1
        value = next(self._worker_values)
        self._next_block = block + 1
        if self._next_block == self._prefetch_blocks.stop:
            self._stop()
        return value

    def _from_workers(self, blocks: range) -> Generator[Value, None, None]:
        loader: DataLoader[_Parcel] = DataLoader(
            _Blocks(self._read, blocks),
            batch_size=None,
            collate_fn=_unchanged,
            pin_memory=self._pin,
            # A loader draws a seed; with its own generator, the global RNG state is unchanged.
            generator=torch.Generator(),
            **worker_settings(min(self._workers, len(blocks)), prefetch=1),
        )
        with open_loader(loader) as parcels:
            for parcel in parcels:
                value = parcel.value()
                if isinstance(value, _FailedRead):
                    raise value.error
                yield value

    def _stop(self) -> None:
        if self._worker_values is not None:
            self._worker_values.close()
            self._worker_values = None


class _Parcel(NamedTuple):
    """A value from a worker: its pickle without tensors, and the bytes of all its tensors."""

    content: bytes
    # One buffer, as each tensor from a DataLoader's worker costs a file descriptor.
    buffer: Tensor

    @classmethod
    def of(cls, value: Any) -> _Parcel:
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(value)
        buffer = torch.empty(packer.size, dtype=torch.uint8)
        for start, tensor in packer.tensors:
            tensor_bytes = tensor.flatten().view(torch.uint8)
            buffer[start : start + len(tensor_bytes)] = tensor_bytes
        return cls(file.getvalue(), buffer)

    def value(self) -> Any:
        return _Unpacker(io.BytesIO(self.content), self.buffer).load()


class _Packer(pickle.Pickler):
    """Pickler that writes a tensor as its offset in the buffer, dtype and shape."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype, torch.Size] | None:
        if type(obj) is not Tensor:
            return None
        # The next tensor starts at a multiple of the alignment.
        start, self.size = self.size, self.size + -(-obj.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.tensors.append((start, obj))
        return start, obj.dtype, obj.shape


class _Unpacker(pickle.Unpickler):
    """Unpickler that restores tensors as views of the buffer."""

    def __init__(self, file: io.BytesIO, buffer: Tensor) -> None:
        super().__init__(file)
        self._buffer = buffer

    def persistent_load(self, reference: tuple[int, torch.dtype, torch.Size]) -> Tensor:
        start, dtype, shape = reference
        return self._buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class _FailedRead(NamedTuple):
    error: Exception


class _Blocks(Dataset[_Parcel]):
    def __init__(self, read: Callable[[int], Any], blocks: range) -> None:
        self._read, self._blocks = read, blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> _Parcel:
        try:
            return _Parcel.of(self._read(self._blocks[index]))
        except Exception as error:
            error.add_note(f"In a reading process:\n{traceback.format_exc()}")
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                # Not picklable: PyTorch's worker sends the error's text.
                raise error from None
            return _Parcel.of(_FailedRead(error))


def _unchanged(parcel: Any) -> Any:
    return parcel


def evenly_spaced(total: int, limit: int | None) -> list[int]:
    """Return indices of `limit` of `total` samples, evenly spaced from first to last; None: all."""
    count = total if limit is None else min(limit, total)
    indices: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return indices
