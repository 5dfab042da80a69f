"""Safetensors files that rank 0 writes and every rank receives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vlp import distributed


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a file and make sure that they are on the disk.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def broadcast_tensors(path: Path | None) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors one by one, on the CPU of every rank; only rank 0 has a path.

    So a run folder may lie on the first node's own disk.
    """
    file = safe_open(path, framework="pt") if path is not None else None
    described: list[tuple[str, list[int], str]] = []
    if file is not None:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            tensor = file.get_slice(name)
            described.append((name, tensor.get_shape(), tensor.get_dtype()))
    described = distributed.from_rank_0(described)
    for name, shape, kind in described:
        if file is not None:
            tensor = file.get_tensor(name)
        else:
            tensor = torch.empty(shape, dtype=_DTYPES[kind])
        yield name, distributed.tensor_from_rank_0(tensor)


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
