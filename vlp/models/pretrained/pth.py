"""Checkpoints of other projects: PyTorch files, read without running any code in them."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

KEYS = ("model", "state_dict")
"""Under which other projects store a state dict beside their optimiser, the first one found."""


def read_pth(file: str | Path) -> dict[str, Tensor]:
    """State dict of a `.pth`, under `model` or `state_dict` or bare; no code of the file is run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, needs pickled objects, or holds no state dict.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        # Mapped, the momentum copies and the optimiser are never read from the disk.
        loaded = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # the unpickler lets KeyError, EOFError and others through
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and refused:
            raise ValueError(
                f"{path}: refused, because it holds a pickled {refused[1]} beside its tensors and "
                "reading that may run code; where you trust the file, save its state dict alone: "
                "torch.save(torch.load(FILE, weights_only=False)['model'], NEW_FILE)"
            ) from None
        reason = str(error).partition("\n")[0].partition(". ")[0] or "it ends too early"
        raise ValueError(f"{path}: damaged, or not a checkpoint ({reason})") from error
    state = None
    if isinstance(loaded, Mapping):
        state = next((loaded[key] for key in KEYS if key in loaded), loaded)
    if not isinstance(state, Mapping) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        raise ValueError(
            f"{path}: holds no state dict, neither under {' or '.join(map(repr, KEYS))} nor as "
            "a whole"
        )
    return dict(state)
