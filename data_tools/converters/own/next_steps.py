"""Commands that follow an import, to be copied."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

VOCABULARY = 4000
"""Word pieces of configs/pretrain/flickr8k_small.yaml."""


def next_steps(out: Path, splits: Sequence[str]) -> str:
    """Return the commands that train on the shards and evaluate the model.

    Args:
        out: folder of the splits.
        splits: that were written.
    """
    train = out / "train"
    aligned, run = Path("runs") / f"{out.name}_aligned", Path("runs") / out.name
    sources = _quoted(f"data.sources=[{{path: {train}}}]")
    vocabulary = _quoted(f"{out / 'vocabulary'}")
    held_out = next((split for split in ("val", "test") if split in splits), "train")
    align = f"vlp align --config configs/pretrain/from_towers.yaml --out {_quoted(aligned)}"
    config = "--config configs/pretrain/flickr8k_small.yaml"
    options = f"data.vocabulary={vocabulary} output={_quoted(run)}"
    evaluate = f"vlp evaluate retrieval --shards {_quoted(out / held_out)} --model"
    return (
        "next, from public towers:\n"
        f"  {align} {sources}\n"
        f"  {evaluate} {_quoted(aligned)}\n"
        "or from nothing:\n"
        f"  vlp data vocabulary --shards {_quoted(train)} --size {VOCABULARY} --out {vocabulary}\n"
        f"  vlp train {config} {sources} {options}\n"
        f"  {evaluate} {_quoted(run / 'model')}"
    )


def _quoted(value: object) -> str:
    return shlex.quote(str(value))
