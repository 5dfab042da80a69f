"""Throughput of data loading (samples/s and core): this loader's beside open_clip's.

    pip install open_clip_torch pandas
    python -m evaluation.benchmarks.loader
    python -m evaluation.benchmarks.loader --shards DIR --size 224

Both sides read the same WebDataset shards (`KEY.jpg`, `KEY.txt`, and the `index.npz` that
`python -m data_tools index DIR` writes); without `--shards` some are made, of images of 500 x 375
with the spectrum of photographs. open_clip's side is its own training code
(`open_clip_train.data.get_wds_dataset` with `open_clip.transform.image_transform`), unchanged; with
webdataset 1 or newer, which it was not written for, the end-of-shard marks that it trips over are
turned off. Three comparisons:

  pillow   both sides make the very same Pillow calls: decode, squash bicubic, normalise
  equal    the same operations, each side by its own code: decode, random crop of 0.9..1 of the
           area, bicubic, normalise; the same tokenizer
  best     each side as it ships: open_clip with its own tokenizer; ours with quick decoding and
           8-bit levels, which training normalises on its device; and once more with
           RandAugment(2, 7), which open_clip's side never does

Processes are pinned to as many cores as there are loader processes. All sides are started, warmed
up by one pass over the shards and then take turns of one pass each; the processes of a side whose
turn it is not are stopped. A rate is that of whole batches received, per second and core. As other
work on the machine takes its part of a second, each side's CPU time (loader processes and its share
of the main one) is measured as well: the ratio is that of samples per CPU second, the median over
rounds. The time from the start to the first batch is printed apart.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from evaluation.benchmarks.loader.shards import check_shards, make_shards, save_vocabulary
from evaluation.benchmarks.loader.turns import LoaderTurns, take_turns
from vlp.config import ConfigError
from vlp.data.config import AugmentConfig, DataConfig, SourceConfig
from vlp.data.pretrain.loader import PretrainData
from vlp.data.shards.shard_index import ShardIndex
from vlp.data.stream.input_spec import Inputs
from vlp.data.text.tokenizer import TextProcessor
from vlp.training.engines.environment import keep_freed_memory

OURS, THEIRS, RANDAUGMENT = "ours", "open_clip", "ours, RandAugment"
MEAN = STD = (0.5, 0.5, 0.5)
TOKENS = 32
STREAMS = 8
CROP = (0.9, 1.0)

# Samples per CPU second over open_clip's: what must be reached, and what to be proud of.
PROMISED = {"equal": (1.1, 1.5), "best": (2.0, 3.0)}


class Settings(NamedTuple):
    """Settings that all sides of one comparison share. size: pixels; batch: samples."""

    shards: Path
    vocabulary: Path
    size: int
    batch: int
    workers: int


def our_batches(settings: Settings, augment: AugmentConfig, normalised: bool) -> Iterator[Any]:
    """Batches of this project's loader, without masks.

    Its images are 8-bit levels, which training normalises on its device; with `normalised` the
    main process does it here, so that they end as open_clip's do.
    """
    config = DataConfig(
        sources=(SourceConfig(path=str(settings.shards)),),
        vocabulary=str(settings.vocabulary),
        canonical_streams=STREAMS,
        augment=augment,
        workers=settings.workers,
    )
    side = settings.size // 16
    inputs = Inputs(settings.size, (side, side), TOKENS, vocab_size=1 << 20)
    data = PretrainData(config, inputs, settings.batch, seed=0)
    return (batch.to("cpu") if normalised else batch for batch, _ in data.batches())


def open_clip_batches(settings: Settings, transform: Any, tokenizer: Any) -> Iterator[Any]:
    """Batches of open_clip's loader."""
    from open_clip_train import data

    expander = data.tar_file_expander
    if "eof_value" in inspect.signature(expander).parameters:
        data.tar_file_expander = partial(expander, eof_value=None)
    arguments = SimpleNamespace(
        train_data="::".join(map(str, sorted(settings.shards.glob("*.tar")))),
        train_num_samples=1 << 40,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        batch_size=settings.batch,
        workers=settings.workers,
        world_size=1,
        seed=0,
    )
    return iter(data.get_wds_dataset(arguments, transform, True, tokenizer=tokenizer).dataloader)


def sides(row: str, settings: Settings) -> dict[str, Callable[[], Iterator[Any]]]:
    """Return the functions that start each side of one comparison."""
    from open_clip import get_tokenizer
    from open_clip.transform import image_transform

    text = TextProcessor.load(settings.vocabulary, TOKENS)
    plain = AugmentConfig(
        randaugment=False, hflip=False, crop_scale=CROP, quick_decode=row == "best"
    )

    def ours(**changes: Any) -> Callable[[], Iterator[Any]]:
        augment = plain.model_copy(update=changes)
        return partial(our_batches, settings, augment, row != "best")

    def theirs(train: bool, tokenizer: Any) -> Callable[[], Iterator[Any]]:
        mode = None if train else "squash"
        transform = image_transform(settings.size, train, mean=MEAN, std=STD, resize_mode=mode)
        return partial(open_clip_batches, settings, transform, tokenizer)

    def same_tokenizer(caption: str) -> torch.Tensor:
        return text([caption]).text_ids

    if row == "pillow":
        return {THEIRS: theirs(False, same_tokenizer), OURS: ours(crop_scale=(1.0, 1.0))}
    if row == "equal":
        return {THEIRS: theirs(True, same_tokenizer), OURS: ours()}
    return {
        THEIRS: theirs(True, get_tokenizer("ViT-B-32")),
        OURS: ours(),
        RANDAUGMENT: ours(randaugment=True),
    }


def measure(row: str, settings: Settings, rounds: int) -> dict[str, LoaderTurns]:
    """All sides of one comparison, taking turns of one pass over the shards."""
    batches = len(ShardIndex.open(settings.shards)) // settings.batch
    started = sides(row, settings)
    return take_turns(started, batches, batches * settings.batch, rounds, settings.workers)


def ratios(found: dict[str, LoaderTurns], name: str) -> list[float]:
    """By rounds, samples per CPU second of a side over open_clip's."""
    pairs = zip(found[THEIRS].turns, found[name].turns)
    return [theirs.cpu / own.cpu for theirs, own in pairs]


def table_rows(row: str, found: dict[str, LoaderTurns], workers: int) -> Iterator[list[str]]:
    """Yield one line for each side."""
    for name, own in found.items():
        low, middle, high = np.quantile(ratios(found, name), (0.25, 0.5, 0.75))
        milliseconds = 1000 * statistics.median(turn.cpu for turn in own.turns) / own.samples
        rates = [str(workers), f"{own.rate / workers:.1f}", f"{milliseconds:.2f}"]
        yield [f"{row}: {name}", *rates, f"{middle:.2f}", f"{low:.2f}..{high:.2f}",
               f"{own.startup:.1f}"]  # fmt: skip


def figures(row: str, found: dict[str, LoaderTurns], settings: Settings) -> Iterator[Measurement]:
    """Yield the figures of one comparison."""
    for name, own in found.items():
        prefix = f"loader/{row}/{settings.size}px/{settings.workers}_workers/{name}"
        yield Measurement(f"{prefix}/rate", own.rate / settings.workers, "samples/s/core")
        yield Measurement(f"{prefix}/startup", own.startup, "s")
        if name != THEIRS:
            targets = PROMISED.get(row, (None, None)) if name == OURS else (None, None)
            yield Measurement(
                f"{prefix}/ratio", statistics.median(ratios(found, name)), "x", *targets
            )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare shards and sizes."""
    parser.add_argument("--shards", type=Path, metavar="DIR")
    parser.add_argument("--samples", type=int, default=1024, help="made without --shards")
    parser.add_argument("--size", type=int, default=256, metavar="PX")
    parser.add_argument("--batch", type=int, default=64, help=f"a multiple of {STREAMS}")
    parser.add_argument("--workers", default="1,2", metavar="N,…", help="loader processes")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each side")
    parser.add_argument("--rows", default="pillow,equal,best", metavar="ROW,…")


def run(options: argparse.Namespace, _: torch.device) -> Iterator[Measurement]:
    """Measure every comparison, print its lines, yield the figures."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            yield from _run(options, Path(scratch))
        except ImportError as error:
            raise ConfigError(f"{error}; pip install open_clip_torch pandas") from error


def _run(chosen: argparse.Namespace, scratch: Path) -> Iterator[Measurement]:
    if not hasattr(os, "sched_setaffinity") or not Path("/proc/self/stat").exists():
        raise ConfigError("this benchmark pins processes to cores and reads /proc: it needs Linux")
    if unknown := sorted(set(chosen.rows.split(",")) - {"pillow", "equal", "best"}):
        raise ConfigError(f"--rows: unknown {', '.join(unknown)}")
    workers = [int(number) for number in chosen.workers.split(",")]
    if max(workers) > len(os.sched_getaffinity(0)):
        raise ConfigError(f"--workers {max(workers)}: there are fewer cores")
    shards = chosen.shards
    if shards is None:
        shards = scratch / "shards"
        shards.mkdir()
        make_shards(shards, chosen.samples)
    every = [
        Settings(shards, scratch / "vocabulary", chosen.size, chosen.batch, number)
        for number in workers
    ]
    for settings in every:
        check_shards(shards, settings.batch, settings.workers)
    save_vocabulary(shards, scratch / "vocabulary", TOKENS)
    keep_freed_memory()  # as training does in its main process; what is forked inherits it
    bytes_each = sum(path.stat().st_size for path in shards.glob("*.tar")) / len(
        ShardIndex.open(shards)
    )
    print(f"{bytes_each / 1000:.0f} kB a sample, {chosen.size} px, batches of {chosen.batch}\n")
    head = [
        "",
        "workers",
        "samples/s/core",
        "CPU ms/sample",
        "ratio",
        "quartiles",
        "start s",
    ]
    for row in chosen.rows.split(","):
        lines: list[list[str]] = []
        for settings in every:
            measured = measure(row, settings, chosen.rounds)
            lines += table_rows(row, measured, settings.workers)
            yield from figures(row, measured, settings)
        print(harness.table(head, lines), end="\n\n", flush=True)


main = partial(harness.run_benchmark, __doc__, add_options, run, cpu_only=True)


if __name__ == "__main__":
    sys.exit(main())
