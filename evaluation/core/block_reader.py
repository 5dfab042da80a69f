"""Blocks of an evaluation's inputs, read and prepared by worker processes ahead of their turn.

A block is read in one piece by one process, and its value is the same whichever process that is.
Values cross as one tensor each: workers hand over every tensor by a file descriptor, of which a
block of single examples would need hundreds.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vlp.data.stream.workers import running, worker_settings
from vlp.training.engines.environment import cores_of_rank

Value = TypeVar("Value")

MOST_WORKERS = 8
_ALIGNED = 64
"""Bytes; a multiple of every element's size."""


def workers_for(device: torch.device, workers: int | None) -> int:
    """Return how many processes read: as asked, else this rank's cores up to 8, on a CPU none.

    A CPU that computes is busy anyway.
    """
    if workers is not None:
        return workers
    return 0 if device.type == "cpu" else min(MOST_WORKERS, cores_of_rank())


class BlockReader(Generic[Value]):
    """Values of blocks by number: `reader[block]`.

    Inside `ahead` blocks are read by worker processes, each a block ahead, and their tensors come
    in pinned memory where a GPU computes; else, and where a block is not the next one, nothing but
    time differs.

    Args:
        read: reads and prepares a block; it goes to the workers, as far as possible without a
            model, and its values come from there: tensors are on the CPU.
        device: where to compute.
        workers: processes; None is as `workers_for` says.
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
        """Read these blocks, of which most are wanted, and in rising order, ahead of their turn."""
        self._ahead = blocks if self._workers else range(0)
        try:
            yield
        finally:
            self._ahead = range(0)
            self._stop()

    def __getitem__(self, block: int) -> Value:
        """Return a block's value; what `read` raises comes as it is from any process."""
        if block not in self._ahead:
            return self._read(block)
        if self._values is None or block != self._next:
            self._stop()
            self._values = self._from_workers(range(block, self._ahead.stop))
        self._next = -1  # after an error the next one starts afresh
        value = next(self._values)
        self._next = block + 1
        if self._next == self._ahead.stop:
            self._stop()
        return value

    def _from_workers(self, blocks: range) -> Generator[Value, None, None]:
        loader: DataLoader[_Parcel] = DataLoader(
            _Blocks(self._read, blocks),
            batch_size=None,
            collate_fn=_as_it_is,  # with no batches to make, it gets each parcel
            pin_memory=self._pin,
            generator=torch.Generator(),  # the global one stays as it is
            **worker_settings(min(self._workers, len(blocks)), prefetch=1),
        )
        with running(loader) as parcels:
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

    def persistent_id(self, found: Any) -> tuple[int, torch.dtype, torch.Size] | None:
        if type(found) is not Tensor:
            return None
        start, self.size = self.size, self.size + -(-found.nbytes // _ALIGNED) * _ALIGNED
        self.tensors.append((start, found))
        return start, found.dtype, found.shape


class _Unpacker(pickle.Unpickler):
    """Puts the tensors back, as views."""

    def __init__(self, file: io.BytesIO, tensors: Tensor) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: tuple[int, torch.dtype, torch.Size]) -> Tensor:
        start, dtype, shape = place
        return self._tensors[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class _FailedRead(NamedTuple):
    error: Exception


class _Blocks(Dataset[_Parcel]):
    def __init__(self, read: Callable[[int], Any], blocks: range) -> None:
        self._read, self._blocks = read, blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, place: int) -> _Parcel:
        try:
            return _Parcel.of(self._read(self._blocks[place]))
        except Exception as error:
            error.add_note(f"In a process that reads:\n{traceback.format_exc()}")
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                raise error from None  # PyTorch has words for one that cannot be sent
            return _Parcel.of(_FailedRead(error))


def _as_it_is(parcel: Any) -> Any:
    return parcel
