"""Sharded checkpoints by torch.distributed.checkpoint: every rank writes and reads its own part.

A parameter that is sharded is written as it is, shard by shard; what all ranks hold whole is
divided among them. Whatever number of ranks reads it takes of each tensor what it holds. Names are
`FILE/NAME`, with the files and names of full checkpoints.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from heapq import heapreplace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from vlp import distributed
from vlp.config import ConfigError
from vlp.distributed import host_copy
from vlp.training.checkpoints.places import METADATA, Place
from vlp.training.engines.base import OPTIMISER, WEIGHTS, ShardedEngine
from vlp.training.engines.loss_scale import LOSS_SCALE

# All that the metadata of tensors is made of.
_KNOWN = {
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata"),
            *("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
}


class Shards:
    """Copies, writes and reads the parts of this rank; made and used by all ranks together.

    Writing has a group of ranks of its own, so that it goes on in a thread beside the training.

    Args:
        timeout: after which writing fails where another rank does not come.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group: Any = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._rank, self._ranks = distributed.rank(), distributed.world_size()

    def copy(
        self, files: Mapping[str, Mapping[str, Tensor]], alone: Collection[str]
    ) -> dict[str, Tensor]:
        """Return copies, in the CPU's memory, of what this rank writes.

        Args:
            files: tensors by file and name, sharded or the same on every rank.
            alone: names of weights that ranks keep by themselves; those of rank 0 count.
        """
        named = {
            f"{file}/{name}": t for file, tensors in files.items() for name, t in tensors.items()
        }
        first = {f"{WEIGHTS}/{name}" for name in alone}
        loads = [(0, rank) for rank in range(self._ranks)]  # bytes so far, as a heap
        copies = {}
        # The largest first, each to the rank with the least so far; buffers are small.
        for name in sorted(named, key=lambda name: -named[name].nbytes):
            tensor = named[name].detach()
            if hasattr(tensor, "full_tensor"):
                copies[name] = self._sharded_copy(tensor)
                continue
            owner = 0
            if name not in first:
                load, owner = loads[0]
                heapreplace(loads, (load + tensor.nbytes, owner))
            if owner == self._rank:
                copies[name] = host_copy(tensor)
        return copies

    @cached_property
    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self._group, "cpu")

    def _sharded_copy(self, tensor: Any) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            host_copy(tensor.to_local()),
            self._mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def write(self, copies: dict[str, Tensor], folder: Path) -> list[str]:
        """Write all ranks' copies; return the names of this rank's files.

        Raises:
            OSError: on every rank, where one cannot write.
        """
        try:
            dcp.save(
                copies,
                # It has nothing to bring from a GPU, and would wait for one that is not its own.
                storage_writer=dcp.FileSystemWriter(folder, per_thread_copy_ahead=0),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except dcp.CheckpointException as error:
            problems = [str(problem) for problem, _ in error.failures.values()]
            raise OSError("; ".join(dict.fromkeys(problems))) from error
        return [path.name for path in folder.glob(f"__{self._rank}_*")]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable value, in rank order; in the thread that writes."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def read(self, engine: ShardedEngine, place: Place, name: str) -> dict[str, Tensor]:
        """Give the engine what was written on any number of ranks; return the task's own state.

        Raises:
            KeyError: a tensor is missing or unknown: the checkpoint is of another model.
            ValueError: a tensor has another size, or the metadata cannot be read.
        """
        held = {f"{f}/{n}": t for f, tensors in engine.held().items() for n, t in tensors.items()}
        reader = PlaceReader(place, name)
        written = shapes(reader)
        scale = f"{OPTIMISER}/{LOSS_SCALE}"
        if scale not in written or scale not in held:  # of another precision
            written.pop(scale, None)
            held.pop(scale, None)
        prefixes = f"{WEIGHTS}/", f"{OPTIMISER}/"
        if unknown := [n for n in written if n.startswith(prefixes) and n not in held]:
            raise KeyError(f"the model has no {sorted(unknown)}")
        if missing := held.keys() - written.keys():
            raise KeyError(f"the checkpoint lacks {sorted(missing)}")
        extra = {n: empty(shape) for n, shape in written.items() if not n.startswith(prefixes)}
        try:
            with torch.no_grad():
                dcp.load(
                    held | extra,
                    storage_reader=reader,
                    process_group=self._group,
                    no_dist=self._group is None,
                )
        except dcp.CheckpointException as error:
            problem, _ = next(iter(error.failures.values()))
            if isinstance(problem, OSError | ConfigError):
                raise problem from error
            raise ValueError(str(problem)) from error
        engine.settle(
            {
                name.removeprefix(f"{OPTIMISER}/"): tensor
                for name, tensor in held.items()
                if name.startswith(f"{OPTIMISER}/")
            }
        )
        return {name.partition("/")[2]: tensor for name, tensor in extra.items()}


class PlaceReader(dcp.FileSystemReader):
    """Reads from a place of checkpoints, and makes nothing of its metadata but descriptions."""

    def __init__(self, place: Place, name: str) -> None:
        super().__init__(name)
        self.fs = _Files(place)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return shapes and places of all tensors.

        Raises:
            ValueError: it is no metadata of tensors.
        """
        with self.fs.create_stream(Path(self.path) / METADATA, "rb") as file:
            try:
                metadata = _Descriptions(file).load()
            except Exception as error:  # whatever a damaged pickle leads to
                raise ValueError(f"{METADATA}: not that of a checkpoint ({error})") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{METADATA}: not that of a checkpoint")
        return metadata


class _Files(FileSystem):
    """The files of a place, as torch.distributed.checkpoint asks for them."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._place.open(Path(path).parent.name, Path(path).name) as file:
            yield file


class _Descriptions(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _KNOWN or isinstance(kind, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


def shapes(reader: PlaceReader) -> dict[str, TensorStorageMetadata]:
    """Return what is known of each tensor by `FILE/NAME`.

    Raises:
        ValueError: the metadata cannot be read.
    """
    found = reader.read_metadata().state_dict_metadata
    return {name: kind for name, kind in found.items() if isinstance(kind, TensorStorageMetadata)}


def empty(shape: TensorStorageMetadata) -> Tensor:
    """Return a tensor to be read into."""
    return torch.empty(shape.size, dtype=shape.properties.dtype)
