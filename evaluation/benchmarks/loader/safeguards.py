"""Cost of what keeps a run safe: limits on images, the lock of a folder, fingerprints of the data.

    OMP_NUM_THREADS=1 python -m evaluation.benchmarks.loader.safeguards

Loader: two loaders in this process make the same batches by turns, one with the checks of
`vlp.data.limits` and one with nothing in their place. The share is that of CPU seconds, paired by
batches. The checks also find out how a JPEG is turned; that counts as theirs.

Step: one pretraining task takes steps in turns with a lock on a folder and without. The lock's
thread beats a hundred times as often as it does in a run; the share is divided by that again.

Start: the seconds to take a lock and to compute the fingerprint of the shards, once a run, and what
they are of 1,000 such steps.

Prints a table and, last, one JSON line per figure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import vlp.lock
from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from evaluation.benchmarks.loader.__main__ import Settings, our_batches
from evaluation.benchmarks.loader.shards import make_shards, save_vocabulary
from evaluation.benchmarks.overhead import added_share
from evaluation.benchmarks.pretrain_step import WARM_UP, Trainee, random_batch
from vlp.data.config import AugmentConfig
from vlp.data.features.header import shards_sha256
from vlp.data.image.header import JpegParts
from vlp.data.shards.shard_index import ShardIndex
from vlp.lock import FolderLock

WITH, WITHOUT = "with safeguards", "without"
TARGET = 1.0
"""Percent that they may cost."""

FASTER = 100
"""Factor by which the lock beats more often while steps are timed."""

BATCHES = 20
"""Of a loader for each step that is timed: small ones, so that compared ones are near."""

STEPS_OF_A_RUN = 1000
_TEXT_TOKENS = 32


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave images unchecked in this process, and in those forked from it meanwhile."""
    plain = JpegParts(may_be_turned=False)

    def nothing(*_: object, **__: object) -> None:
        """Check nothing. A mock would keep the bytes of every image."""

    def no_parts(*_: object) -> JpegParts:
        return plain

    replaced = {
        "vlp.data.image.decode.check_parts": nothing,
        "vlp.data.image.decode.check_size": nothing,
        "vlp.data.image.jpeg.check_size": nothing,
        "vlp.data.image.jpeg.jpeg_parts": no_parts,
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(patch(name, function))
        yield


def loader_share(settings: Settings, rounds: int) -> tuple[float, tuple[float, float]]:
    """Measure by turns what the checks add to a loader's CPU seconds: the share, its interval."""
    checked, plain = (our_batches(settings, AugmentConfig(), False) for _ in range(2))

    def batch(batches: Iterator[Any]) -> float:
        started = time.process_time()
        next(batches)
        return time.process_time() - started

    def without() -> float:
        with unchecked():
            return batch(plain)

    taken = harness.interleave({WITH: lambda: batch(checked), WITHOUT: without}, rounds, WARM_UP)
    return added_share(np.array(taken[WITH]), np.array(taken[WITHOUT]))


def step_share(trainee: Trainee, batch: Any, folder: Path, rounds: int) -> tuple[float, float]:
    """Measure what a lock that is held adds to a step: the share, and seconds of a step."""

    def locked() -> float:
        with (
            patch("vlp.lock.BEAT_SECONDS", vlp.lock.BEAT_SECONDS / FASTER),
            FolderLock(folder),
        ):
            return trainee.step(batch)["step"]

    taken = harness.interleave(
        {WITH: locked, WITHOUT: lambda: trainee.step(batch)["step"]}, rounds, WARM_UP
    )
    share, _ = added_share(np.array(taken[WITH]), np.array(taken[WITHOUT]))
    return share / FASTER, statistics.median(taken[WITHOUT])


def start_seconds(shards: Path, folder: Path) -> float:
    """Measure the time to lock a folder and to compute the fingerprint of shards."""

    def start() -> None:
        with FolderLock(folder):
            shards_sha256(ShardIndex.open(shards).shards)

    timed = [harness.seconds(start, torch.device("cpu")) for _ in range(5)]
    return statistics.median(timed)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration of the step, and how much is timed."""
    harness.add_config(parser, required=False, help="of the step that is timed")
    parser.add_argument("--samples", type=int, default=1024, help="of the shards that are made")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each side")
    parser.add_argument("--rows", type=int, default=16, help="pairs of a step")
    parser.set_defaults(config="configs/pretrain/scenes_tiny.yaml")


def run(options: argparse.Namespace, device: torch.device) -> Iterator[Measurement]:
    """Measure loader, step and start, print the table, yield the figures."""
    with tempfile.TemporaryDirectory() as scratch:
        shards, vocabulary = Path(scratch, "shards"), Path(scratch, "vocabulary")
        shards.mkdir()
        make_shards(shards, options.samples)
        save_vocabulary(shards, vocabulary, _TEXT_TOKENS)
        settings = Settings(shards, vocabulary, size=224, batch=8, workers=0)
        loader, (low, high) = loader_share(settings, BATCHES * options.rounds)
        config = harness.load_pretraining(options)
        trainee = Trainee(config, device)
        batch = random_batch(config.inputs, options.rows, _TEXT_TOKENS).to(device)
        lock, step = step_share(trainee, batch, Path(scratch, "run"), options.rounds)
        start = start_seconds(shards, Path(scratch, "run"))
    started = start / (STEPS_OF_A_RUN * step)
    rows: Sequence[Sequence[str]] = [
        ["loader: limits", f"{loader:+.2%}", f"95 % {low:+.2%} to {high:+.2%}"],
        ["step: lock", f"{lock:+.3%}", f"of {1000 * step:.0f} ms"],
        [f"start, of {STEPS_OF_A_RUN} steps", f"{started:+.3%}", f"{1000 * start:.1f} ms"],
    ]
    print(harness.table(["safeguard", "added", ""], rows))
    for end, value in (("", loader), ("_low", low), ("_high", high)):
        yield Measurement(f"safeguards/loader{end}", 100 * value, "%", TARGET)
    yield Measurement("safeguards/step", 100 * (lock + started), "%", TARGET)


main = partial(harness.run_benchmark, __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(main())
