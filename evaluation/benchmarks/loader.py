"""How many samples a second one core feeds to training: this loader's beside open_clip's.

    pip install open_clip_torch pandas
    python -m evaluation.benchmarks.loader
    python -m evaluation.benchmarks.loader --shards DIR --size 224

Both sides read the same WebDataset shards (`KEY.jpg`, `KEY.txt`, and the `index.json` that
`python -m data_tools index DIR` writes); without `--shards` some are made, of pictures of 500 x 375
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
import gc
import inspect
import multiprocessing
import os
import signal
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from evaluation.benchmarks.figures import Figure, print_figures
from vlp.config import ConfigError
from vlp.data.config import AugmentConfig, DataConfig, SourceConfig
from vlp.data.inputs import Inputs
from vlp.data.loader import PretrainData
from vlp.data.schema import captions_of
from vlp.data.shards import ShardIndex, index_folder
from vlp.data.tar import append_member, close_tar
from vlp.data.text import TextProcessor, train_wordpiece
from vlp.training.memory import keep_freed_memory

OURS, THEIRS, RANDAUGMENT = "ours", "open_clip", "ours, RandAugment"
MEAN = STD = (0.5, 0.5, 0.5)
TOKENS = 32
STREAMS = 8
CROP = (0.9, 1.0)

# Samples per CPU second over open_clip's: what must be reached, and what to be proud of.
PROMISED = {"equal": (1.1, 1.5), "best": (2.0, 3.0)}


class Settings(NamedTuple):
    """What all sides of one comparison share. size: pixels; batch: samples."""

    shards: Path
    vocabulary: Path
    size: int
    batch: int
    workers: int


def our_batches(settings: Settings, augment: AugmentConfig, normalised: bool) -> Iterator[Any]:
    """Batches of this project's loader, without masks.

    Its pictures are 8-bit levels, which training normalises on its device; with `normalised` the
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
    """What starts each side of one comparison."""
    from open_clip import get_tokenizer
    from open_clip.transform import image_transform

    text = TextProcessor.load(settings.vocabulary, TOKENS)
    plain = AugmentConfig(
        randaugment=False, mirror=False, crop_scale=CROP, quick_decode=row == "best"
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


class Turn(NamedTuple):
    """Some batches in a row: seconds of the clock, and CPU seconds of all processes."""

    seconds: float
    cpu: float


class Stream:
    """One side, whose loader processes run in its own turns alone.

    Args:
        start: makes the endless iterator of batches.
    """

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        others = set(multiprocessing.active_children())
        started = time.perf_counter()
        self._batches = start()
        next(self._batches)
        self.startup = time.perf_counter() - started
        """Seconds to the first batch."""
        self._workers = set(multiprocessing.active_children()) - others
        self._signal(signal.SIGSTOP)

    def turn(self, batches: int) -> Turn:
        """Receive some batches."""
        self._signal(signal.SIGCONT)
        started, cpu = time.perf_counter(), self._cpu()
        for _ in range(batches):
            next(self._batches)
        turn = Turn(time.perf_counter() - started, self._cpu() - cpu)
        self._signal(signal.SIGSTOP)
        return turn

    def close(self) -> None:
        """End the loader processes."""
        self._signal(signal.SIGCONT)
        self._batches.close()  # type: ignore[attr-defined]  # both are generators
        del self._batches
        gc.collect()  # open_clip's processes end with the last reference to their loader
        for worker in self._workers:
            worker.join(timeout=10)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            os.kill(worker.pid, number)  # type: ignore[arg-type]  # it was started

    def _cpu(self) -> float:
        used = time.process_time()
        for worker in self._workers:
            # After the name in brackets: state, ..., user and system time as numbers 14 and 15.
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return used


class Measured(NamedTuple):
    """One side: samples of a turn, its start-up in seconds, and its turns."""

    samples: int
    startup: float
    turns: list[Turn]

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / statistics.median(turn.seconds for turn in self.turns)


def measure(row: str, settings: Settings, rounds: int) -> dict[str, Measured]:
    """All sides of one comparison, taking turns of one pass over the shards."""
    batches = len(ShardIndex.open(settings.shards)) // settings.batch
    cores = sorted(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, cores[: settings.workers])
    torch.set_num_threads(1)
    streams: dict[str, Stream] = {}
    try:
        for name, start in sides(row, settings).items():
            streams[name] = Stream(start)
        turns: dict[str, list[Turn]] = {name: [] for name in streams}
        for number in range(1 + rounds):
            for name in list(streams)[:: 1 if number % 2 else -1]:
                turns[name].append(streams[name].turn(batches))
    finally:
        for stream in streams.values():
            stream.close()
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
    return {
        name: Measured(batches * settings.batch, streams[name].startup, turns[name][1:])
        for name in streams
    }


def ratios(found: dict[str, Measured], name: str) -> list[float]:
    """By rounds, samples per CPU second of a side over open_clip's."""
    pairs = zip(found[THEIRS].turns, found[name].turns)
    return [theirs.cpu / own.cpu for theirs, own in pairs]


def table(row: str, found: dict[str, Measured], workers: int) -> str:
    """One line for each side."""
    lines = []
    for name, own in found.items():
        low, middle, high = np.quantile(ratios(found, name), (0.25, 0.5, 0.75))
        milliseconds = 1000 * statistics.median(turn.cpu for turn in own.turns) / own.samples
        lines.append(
            f"{row:<8}{name:<20}{workers:>7}{own.rate / workers:>12.1f}{milliseconds:>14.2f}"
            f"{middle:>8.2f}  {low:.2f}..{high:.2f}{own.startup:>10.1f}"
        )
    return "\n".join(lines)


def figures(row: str, found: dict[str, Measured], settings: Settings) -> Iterator[Figure]:
    """Of one comparison."""
    for name, own in found.items():
        place = f"loader/{row}/{settings.size}px/{settings.workers}_workers/{name}"
        yield Figure(f"{place}/rate", own.rate / settings.workers, "samples/s/core")
        yield Figure(f"{place}/startup", own.startup, "s")
        if name != THEIRS:
            promised = PROMISED.get(row, (None, None)) if name == OURS else (None, None)
            yield Figure(f"{place}/ratio", statistics.median(ratios(found, name)), "x", *promised)


def make_shards(folder: Path, samples: int, pictures: int = 64, per_shard: int = 128) -> None:
    """Shards as img2dataset writes them, of `pictures` different pictures again and again."""
    rng = np.random.default_rng(0)
    words = np.array([f"{first}{last}" for first in "bdfgklmnprst" for last in ("a", "en", "ito")])
    encoded = [_photograph(rng, 500, 375) for _ in range(pictures)]
    for first in range(0, samples, per_shard):
        with open(folder / f"{first // per_shard:05d}.tar", "wb") as file:
            for number in range(first, min(first + per_shard, samples)):
                caption = " ".join(rng.choice(words, rng.integers(6, 16)))
                append_member(file, f"{number:09d}.jpg", encoded[number % pictures])
                append_member(file, f"{number:09d}.txt", caption.encode())
            close_tar(file)
    index_folder(folder)


def _photograph(rng: np.random.Generator, width: int, height: int) -> bytes:
    """Noise whose amplitude falls as 1/frequency, as in photographs; its channels are alike."""
    across, down = np.fft.rfftfreq(width), np.fft.fftfreq(height)[:, None]
    frequency = np.maximum(np.hypot(across, down), 1 / width)
    noise = np.fft.rfft2(rng.normal(size=(4, height, width))) / frequency
    grey, *colours = np.fft.irfft2(noise, s=(height, width))
    levels = np.stack([grey + 0.4 * colour for colour in colours], axis=-1)
    levels = 128 + 50 * (levels - levels.mean()) / levels.std()
    stream = BytesIO()
    Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(stream, "jpeg", quality=90)
    return stream.getvalue()


def check_shards(settings: Settings) -> None:
    """Raises ConfigError where one of the loaders would never give a batch."""
    index = ShardIndex.open(settings.shards)
    paths = sorted(settings.shards.glob("*.tar"))
    if len(paths) < settings.workers:
        raise ConfigError(f"{settings.shards}: {settings.workers} workers need as many shards")
    if len(index) < 2 * settings.batch * settings.workers:
        raise ConfigError(
            f"{settings.shards}: {len(index)} samples are too few for batches of {settings.batch}"
        )
    with tarfile.open(paths[0]) as archive:
        if not any(name.endswith(".txt") for name in archive.getnames()):
            raise ConfigError(f"{paths[0]}: open_clip reads captions from KEY.txt, there is none")


def save_vocabulary(shards: Path, folder: Path) -> None:
    """Train a WordPiece vocabulary on the captions of the first shard."""
    index = ShardIndex.open(shards)
    captions = [
        caption
        for number in range(index.shards[0].samples)
        for caption in captions_of(index.read_annotation(0, number))
    ]
    TextProcessor(train_wordpiece(captions, 30_000), TOKENS).save(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=Path, metavar="DIR")
    parser.add_argument("--samples", type=int, default=1024, help="made without --shards")
    parser.add_argument("--size", type=int, default=256, metavar="PX")
    parser.add_argument("--batch", type=int, default=64, help=f"a multiple of {STREAMS}")
    parser.add_argument("--workers", default="1,2", metavar="N,…", help="loader processes")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each side")
    parser.add_argument("--rows", default="pillow,equal,best", metavar="ROW,…")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return _run(chosen, Path(scratch))
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
        except ImportError as error:
            print(f"error: {error}; pip install open_clip_torch pandas", file=sys.stderr)
        return 2


def _run(chosen: argparse.Namespace, scratch: Path) -> int:
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
        check_shards(settings)
    save_vocabulary(shards, scratch / "vocabulary")
    keep_freed_memory()  # as training does in its main process; what is forked inherits it
    bytes_each = sum(path.stat().st_size for path in shards.glob("*.tar")) / len(
        ShardIndex.open(shards)
    )
    print(f"{bytes_each / 1000:.0f} kB a sample, {chosen.size} px, batches of {chosen.batch}\n")
    print(
        f"{'':<28}{'workers':>7}{'samples/s':>12}{'CPU ms':>14}{'ratio':>8}  "
        f"{'quartiles':<10}{'start s':>10}\n{'':<35}{'per core':>12}{'per sample':>14}"
    )
    found: list[Figure] = []
    for row in chosen.rows.split(","):
        for settings in every:
            measured = measure(row, settings, chosen.rounds)
            print(table(row, measured, settings.workers), flush=True)
            found.extend(figures(row, measured, settings))
    print()
    print_figures(found, torch.device("cpu"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
