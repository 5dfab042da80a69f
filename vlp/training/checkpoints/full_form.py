"""Conversion of a sharded checkpoint to the full form, which every engine reads."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor

from vlp.io import atomic_folder, sha256_of, write_tensors
from vlp.training.checkpoints.places import EXTRA, METADATA, STATE, LocalPlace, verify, write_sums
from vlp.training.checkpoints.shards import PlaceReader, empty, shapes
from vlp.training.engines.base import OPTIMISER, WEIGHTS


def convert(old: Path, new: Path) -> None:
    """Write a sharded checkpoint's tensors as a full one, bit for bit; the old one is only read.

    One file's tensors are in memory at a time.

    Raises:
        OSError: `new` exists, or the disk is full. Nothing of a failed conversion is left.
        ValueError: `old` is no sharded checkpoint, or is damaged.
    """
    if new.exists():
        raise FileExistsError(f"{new} exists; name a new folder")
    if (problem := verify(old)) is not None:
        raise ValueError(f"{old} is not a whole checkpoint: {problem}")
    if not (old / METADATA).exists():
        raise ValueError(f"{old} is in the full form already")
    with atomic_folder(new) as partial:
        partial.mkdir(parents=True)
        for file, tensors in _read(old):
            write_tensors(partial / file, tensors)
        shutil.copyfile(old / STATE, partial / STATE)
        write_sums(partial, {path.name: sha256_of(path) for path in partial.iterdir()})


def _read(folder: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    reader = PlaceReader(LocalPlace(folder.parent), folder.name)
    known = shapes(reader)
    for file in (WEIGHTS, OPTIMISER, EXTRA):
        tensors = {
            name: empty(shape) for name, shape in known.items() if name.startswith(f"{file}/")
        }
        with warnings.catch_warnings(action="ignore"):  # of no process group
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        yield file, {name.partition("/")[2]: tensor for name, tensor in tensors.items()}
