"""Commands whose results must not depend on what happens to them: four, on tiny data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ranks
from launch_lab import STEPS
from raw_images import files_of, raw_image

from data_tools.__main__ import main as data_tools

FOREIGN = "thesis"
"""In the name of what belongs to somebody else."""

TOOLS = ranks.ROOT / "data_tools" / "__main__.py"
EVALUATION = ranks.ROOT / "evaluation" / "__main__.py"
PRETRAIN = ranks.ROOT / "launch" / "pretrain.py"


@dataclass(frozen=True)
class Job:
    """A command that writes `out` on some ranks, and goes on when it is started again."""

    name: str
    ranks: int
    command: Sequence[str | Path]
    without: frozenset[str] = frozenset()
    """Faults that it does not promise to survive."""
    shards: Sequence[str] = ()
    results: Callable[[Path], dict[str, bytes]] = field(default=files_of)
    checked: Callable[[Path], bool] = lambda path: False
    """Whether it finds damage of one of its files by itself."""


def pretrain(lab, out, url, shards):
    """Two ranks that read from a store."""
    arguments = [
        *lab.arguments(out.name, f"output={out}", f"data.sources=[{{path: {url}}}]"),
        f"data.cache={{folder: {out.parent / 'cache'}, limit: 100MB}}",
        "data.outages={seconds: 4, policy: pause}",
        "data.workers=1",
        "--resume",
    ]
    return Job(
        "pretrain",
        2,
        [PRETRAIN, *arguments],
        shards=shards,
        results=_weights,
        checked=lambda path: path.parent.name.startswith("step_"),
    )


def convert(listed, images, out):
    places = ["--annotations", listed, "--images", images, "--out", out, "--processes", "2"]
    size = ["--samples-per-shard", "8", "--max-side", "220"]
    return Job(
        "convert", 1, [TOOLS, "flickr8k", *places, *size], frozenset({"store", "corrupt file"})
    )


def reshard(source, out):
    size = ["--samples-per-shard", "20", "--shuffle", "3", "--processes", "2"]
    command = [TOOLS, "reshard", source, "--out", out, *size]
    return Job("reshard", 1, command, frozenset({"store", "corrupt file"}))


def evaluate(model, shards, out):
    """Two ranks; its files are small, and it has no owner."""
    command = [EVALUATION, "retrieval", "--model", model, "--shards", shards, "--out", out]
    return Job("evaluate", 2, command, frozenset({"store", "second owner", "corrupt file"}))


def originals(folder, count=80):
    """A list in the form of Flickr8k's, and its images."""
    import json

    folder.mkdir()
    rows = []
    for number in range(count):
        (folder / f"{number}.jpg").write_bytes(raw_image(number, (240, 180)))
        sentence = {"raw": f"image {number}"}
        rows.append({"filename": f"{number}.jpg", "split": "train", "sentences": [sentence]})
    listed = folder / "toy.json"
    listed.write_text(json.dumps({"dataset": "toy", "images": rows}))
    return listed, folder


def small_shards(source, out):
    """The same samples in shards of 25."""
    assert data_tools(["reshard", str(source), "--out", str(out), "--samples-per-shard", "25"]) == 0
    return out


def _weights(out):
    places = [out / "checkpoints" / f"step_{STEPS}" / f"{name}.safetensors" for name in _STATES]
    places.append(out / "model" / "model.safetensors")
    return {path.name: path.read_bytes() for path in places}


_STATES = ("weights", "optimiser", "extra")
