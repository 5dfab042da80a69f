"""Samples of shard folders in a fixed order, read in blocks by workers; bad ones are counted."""

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
from vlp.data.schema import Annotation, caption_numbers, captions_of
from vlp.data.shards.remote import is_url
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.shard_reader import Items
from vlp.data.stream.loader import open_loader, worker_settings
from vlp.io import Redacted
from vlp.training.engines.environment import cores_of_rank


class EvaluationError(Redacted, ValueError):
    """An evaluation that cannot be done; the command prints its message in one line."""


@contextmanager
def single_line_errors() -> Iterator[None]:
    """Turn a ValueError into one line for the person at the terminal."""
    try:
        yield
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error


class CaptionedSample(NamedTuple):
    """One image with its captions."""

    # Decoded, or stored output of the image tower (tokens, width).
    image: Image.Image
    captions: list[str]
    annotation: Annotation
    # Equal for samples of one image: source and image_id.
    identity: tuple[str, str]
    key: str = ""
    # Hash of the bytes of an image without image_id.
    digest: str = ""


class Samples:
    """Random access over shard folders, in their order, shard by shard."""

    def __init__(self, folders: Sequence[str | Path], limit: int | None = None) -> None:
        """Open the folders' indices; `limit` keeps the first samples."""
        self._items = Items(folders, limit=limit)
        self.folders = list(self._items.folders)
        self._sources = [_canonical_folder(folder) for folder in self.folders]

    def __len__(self) -> int:
        return len(self._items)

    def read(self, position: int, min_size: int | None = None) -> CaptionedSample | SkippedSample:
        """Read and decode one sample; a corrupt one is returned as SkippedSample.

        min_size: pixels a side that a JPEG may shrink to while it is decoded.
        """
        try:
            raw = self._items.read(position).raw
            captions = captions_of(raw.annotation)
            if not captions:
                raise BadSample("no text", raw.where)
            image = self._image(position, raw.image, raw.where, min_size)
        except BadSample as bad:
            return SkippedSample(bad.kind, bad.where)
        image_id = raw.annotation.image_id
        folder, shard, *_ = self._items.place(position)
        digest = ""
        # Equal bytes without an image_id are reported, not taken for one image.
        if image_id is None:
            digest = raw.image_digest
            shard_name = self._items.indices[folder].shards[shard].name
            identity = (self._sources[folder], f"{shard_name}, {raw.key}")
        else:
            identity = (raw.annotation.source or self._sources[folder], image_id)
        return CaptionedSample(image, captions, raw.annotation, identity, raw.key, digest)

    def _image(self, position: int, data: bytes, where: str, min_size: int | None) -> Any:
        """Decode the image of a sample."""
        return decode_image(data, where, min_size)


def drop_blank_captions(sample: CaptionedSample | SkippedSample) -> CaptionedSample | SkippedSample:
    """Return a sample without its blank captions, with word indices of captions adjusted.

    A word of a blank or missing caption makes the annotation bad.
    """
    if isinstance(sample, SkippedSample) or sample.annotation.words is None:
        return sample
    annotation = sample.annotation
    numbers = caption_numbers(annotation)
    words = []
    for word in sample.annotation.words:
        if word.caption not in numbers:
            location = f"{'/'.join(sample.identity)}: word {word.word!r} of caption {word.caption}"
            return SkippedSample("bad annotation", f"{location}, which is blank or not there")
        words.append(word.model_copy(update={"caption": numbers.index(word.caption)}))
    without_blanks = annotation.model_copy(update={"captions": sample.captions, "words": words})
    return sample._replace(annotation=without_blanks)


def _canonical_folder(folder: str) -> str:
    """Return the same for every spelling of a folder."""
    return folder if is_url(folder) else str(Path(folder).resolve())


def count_kinds(skipped: Sequence[SkippedSample]) -> dict[str, int]:
    """Count the bad samples of each kind."""
    return dict(sorted(Counter(skip.kind for skip in skipped).items()))


def kinds_in_words(counts: Mapping[str, int]) -> str:
    """Format the result of `count_kinds` for a table's notes: `3 no text, 1 unreadable image`."""
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


Value = TypeVar("Value")

MOST_WORKERS = 8
# Bytes; a multiple of every element's size.
_ALIGNED = 64


def workers_for(device: torch.device, workers: int | None) -> int:
    """Return the reading processes: as given, else 0 on a CPU or this rank's cores up to 8."""
    if workers is not None:
        return workers
    return 0 if device.type == "cpu" else min(MOST_WORKERS, cores_of_rank())


class BlockReader(Generic[Value]):
    """Values of blocks by number: `reader[block]`.

    Inside `ahead`, workers read a block ahead, into pinned memory for a GPU; else only time
    differs. `read` runs in the workers, without a model, and returns CPU tensors.
    """

    def __init__(
        self, read: Callable[[int], Value], device: torch.device, workers: int | None = None
    ) -> None:
        self._read, self._pin = read, device.type == "cuda"
        self._workers = workers_for(device, workers)
        self._ahead = range(0)
        self._next = -1
        self._values: Generator[Value, None, None] | None = None

    @contextmanager
    def ahead(self, blocks: range) -> Iterator[None]:
        """Read these blocks, mostly used and in rising order, ahead of their turn."""
        self._ahead = blocks if self._workers else range(0)
        try:
            yield
        finally:
            self._ahead = range(0)
            self._stop()

    def __getitem__(self, block: int) -> Value:
        """Return a block's value; errors of `read` are raised unchanged from any process."""
        if block not in self._ahead:
            return self._read(block)
        if self._values is None or block != self._next:
            self._stop()
            self._values = self._from_workers(range(block, self._ahead.stop))
        # After an error, workers are started anew at the next block.
        self._next = -1
        value = next(self._values)
        self._next = block + 1
        if self._next == self._ahead.stop:
            self._stop()
        return value

    def _from_workers(self, blocks: range) -> Generator[Value, None, None]:
        loader: DataLoader[_Parcel] = DataLoader(
            _Blocks(self._read, blocks),
            batch_size=None,
            collate_fn=_identity,
            pin_memory=self._pin,
            # A loader draws a seed: from its own generator, so that the global one is unchanged.
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
        if self._values is not None:
            self._values.close()
            self._values = None


class _Parcel(NamedTuple):
    """A value on its way: pickled, but for the bytes of its tensors."""

    content: bytes
    # One for all, as each tensor from a DataLoader's worker costs a file descriptor.
    tensors: Tensor

    @classmethod
    def of(cls, value: Any) -> _Parcel:
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(value)
        tensors = torch.empty(packer.size, dtype=torch.uint8)
        for start, tensor in packer.tensors:
            stored = tensor.flatten().view(torch.uint8)
            tensors[start : start + len(stored)] = stored
        return cls(file.getvalue(), tensors)

    def value(self) -> Any:
        return _Unpacker(io.BytesIO(self.content), self.tensors).load()


class _Packer(pickle.Pickler):
    """Leaves tensors out, and finds each a place."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype, torch.Size] | None:
        if type(obj) is not Tensor:
            return None
        start, self.size = self.size, self.size + -(-obj.nbytes // _ALIGNED) * _ALIGNED
        self.tensors.append((start, obj))
        return start, obj.dtype, obj.shape


class _Unpacker(pickle.Unpickler):
    """Puts the tensors back, as views."""

    def __init__(self, file: io.BytesIO, tensors: Tensor) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, reference: tuple[int, torch.dtype, torch.Size]) -> Tensor:
        start, dtype, shape = reference
        return self._tensors[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


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
            error.add_note(f"In a process that reads:\n{traceback.format_exc()}")
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                # PyTorch sends the text of an error that cannot be pickled.
                raise error from None
            return _Parcel.of(_FailedRead(error))


def _identity(parcel: Any) -> Any:
    return parcel


def evenly_spread(total: int, limit: int | None) -> list[int]:
    """Choose `count` of `total` samples, from the first to the last; None is all of them."""
    if limit is not None and limit < 1:
        raise EvaluationError(f"limit {limit}: at least one sample is needed")
    count = total if limit is None else min(limit, total)
    numbers: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return numbers
