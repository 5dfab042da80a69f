"""Conversion of a sharded checkpoint to the full form: the script of `vlp convert-checkpoint`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from vlp.io import atomic_folder, sha256_of, write_tensors
from vlp.training.checkpoint_places import METADATA, STATE, SUMS, verify
from vlp.training.checkpoint_shards import read_full


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vlp convert-checkpoint`; returns the exit code (2: wrong input)."""
    from launch.cli.main import run_script

    return run_script("convert-checkpoint", arguments)


def convert(old: Path, new: Path) -> None:
    """Write a checkpoint's files in the form that every engine reads; the old one is only read.

    Tensors are the same bit for bit. One file's tensors are in memory at a time.

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
        for file, tensors in read_full(old):
            write_tensors(partial / file, tensors)
        shutil.copyfile(old / STATE, partial / STATE)
        lines = [f"{sha256_of(path)}  {path.name}\n" for path in sorted(partial.iterdir())]
        (partial / SUMS).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
