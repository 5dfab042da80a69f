"""Throughput of data loading (samples/s/core) compared with open_clip's loader and others.

All loaders read the same samples; without `--shards`, generated images of 500 x 375 px with the
spectrum of photographs.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import signal
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from benchmarks import harness
from benchmarks.harness import Figure
from vlp.config import ConfigError
from vlp.data.config import AugmentConfig, DataConfig, SourceConfig
from vlp.data.image.decode import EncodedImage
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.pretrain import PretrainData
from vlp.data.schema import captions_of
from vlp.data.shards.shard_reader import ShardIndex, index_folder
from vlp.data.shards.tar import append_member, close_tar
from vlp.data.stream.batch import Inputs
from vlp.data.text.tokenizer import TextProcessor, train_wordpiece
from vlp.training.engines.environment import keep_freed_memory

OURS, OPEN_CLIP, RANDAUGMENT = "ours", "open_clip", "ours, RandAugment"
MEAN = STD = (0.5, 0.5, 0.5)
TOKENS = 32
STREAMS = 8
CROP = (0.9, 1.0)
_CHUNK = 1 << 24

PLAIN = AugmentConfig(randaugment=False, hflip=False, crop_scale=CROP)
# Starts a loader and returns its batches, without end.
StartLoader = Callable[[], Iterator[Any]]


class Settings(NamedTuple):
    """Settings of all loaders of a comparison; `size` in pixels, `batch` in samples."""

    shards: Path
    vocabulary: Path
    size: int
    batch: int
    workers: int


def our_batches(settings: Settings, augment: AugmentConfig, normalise: bool) -> Iterator[Any]:
    """Yield batches of this project's loader, without masks, with uint8 images.

    normalise: normalise images on the CPU, as open_clip's workers do; trainings do on the device.
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
    return (batch.to("cpu") if normalise else batch for batch, _ in data.batches())


def open_clip_batches(settings: Settings, transform: Any, tokenizer: Any) -> Iterator[Any]:
    """Yield batches of open_clip's loader."""
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


def open_clip_loaders(row: str, settings: Settings) -> dict[str, StartLoader]:
    """Return the loaders of open_clip and of this project for the comparison `row`."""
    from open_clip import get_tokenizer
    from open_clip.transform import image_transform

    text = TextProcessor.load(settings.vocabulary, TOKENS)
    best = row == "best"

    def our_loader(**changes: Any) -> StartLoader:
        augment = PLAIN.model_copy(update={"quick_decode": best} | changes)
        return partial(our_batches, settings, augment, not best)

    def open_clip_loader(train: bool, tokenizer: Any) -> StartLoader:
        mode = None if train else "squash"
        transform = image_transform(settings.size, train, mean=MEAN, std=STD, resize_mode=mode)
        return partial(open_clip_batches, settings, transform, tokenizer)

    def tokenize(caption: str) -> Tensor:
        return text([caption]).text_ids

    if row == "pillow":
        return {
            OPEN_CLIP: open_clip_loader(False, tokenize),
            OURS: our_loader(crop_scale=(1.0, 1.0)),
        }
    if row == "equal":
        return {OPEN_CLIP: open_clip_loader(True, tokenize), OURS: our_loader()}
    return {
        OPEN_CLIP: open_clip_loader(True, get_tokenizer("ViT-B-32")),
        OURS: our_loader(),
        RANDAUGMENT: our_loader(randaugment=True),
    }


ImageTransform = Callable[[bytes], Tensor]


def _our_image(size: int) -> ImageTransform:
    transform, rng = TrainTransform(PLAIN, Preprocessing(size)), np.random.default_rng(0)
    return lambda data: transform.prepare(EncodedImage(data, "a sample"), rng, "")()


def _pillow_image(size: int) -> ImageTransform:
    transform = v2.Compose([_resized_crop(size), v2.PILToTensor()])
    return lambda data: transform(Image.open(BytesIO(data)).convert("RGB"))


def _torchvision_image(size: int) -> ImageTransform:
    transform = _resized_crop(size)

    def prepare_image(data: bytes) -> Tensor:
        jpeg = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return transform(decode_jpeg(jpeg, ImageReadMode.RGB))

    return prepare_image


def _resized_crop(size: int) -> v2.RandomResizedCrop:
    return v2.RandomResizedCrop(size, scale=CROP, interpolation=v2.InterpolationMode.BICUBIC)


TRANSFORMS = {OURS: _our_image, "pillow": _pillow_image, "torchvision": _torchvision_image}


class SampleTransform:
    """Transforms of a sample, for loaders that take a function."""

    def __init__(self, settings: Settings, transforms: str) -> None:
        self._text = TextProcessor.load(settings.vocabulary, TOKENS)
        # JPEG bytes to uint8 pixels (3, size, size).
        self.image = TRANSFORMS[transforms](settings.size)

    def text(self, caption: str) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask, (tokens,) each."""
        tokens = self._text([caption])
        return tokens.text_ids[0], tokens.attention_mask[0]

    def __call__(self, sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return image, ids and attention mask from `jpg` bytes and `txt`."""
        return (self.image(sample["jpg"]), *self.text(sample["txt"]))


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _batches(loader: Any, data: Any, settings: Settings) -> Iterator[Any]:
    """Yield endless batches of a DataLoader class."""
    return _endless(
        loader(
            data,
            batch_size=settings.batch,
            num_workers=settings.workers,
            prefetch_factor=4,
            drop_last=True,
            persistent_workers=True,
        )
    )


def webdataset_batches(transform: SampleTransform, settings: Settings) -> Iterator[Any]:
    """Yield batches of webdataset, with shuffled shards and a shuffle buffer of 1,000 samples."""
    import webdataset

    def prepare_sample(sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        return transform({"jpg": sample["jpg"], "txt": sample["txt"].decode()})

    shards = sorted(map(str, settings.shards.glob("*.tar")))
    data = webdataset.WebDataset(shards, shardshuffle=100, empty_check=False).shuffle(1000)
    data = data.map(prepare_sample).batched(settings.batch, partial=False)
    return _endless(
        webdataset.WebLoader(
            data,
            batch_size=None,
            num_workers=settings.workers,
            prefetch_factor=4,
            persistent_workers=True,
        )
    )


def litdata_batches(folder: Path, transform: SampleTransform, settings: Settings) -> Iterator[Any]:
    """Yield batches of litdata, shuffled."""
    import litdata

    class LitdataSamples(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[Tensor, Tensor, Tensor]:
            return transform(super().__getitem__(index))

    data = LitdataSamples(str(folder / "litdata"), shuffle=True, drop_last=True)
    return _batches(litdata.StreamingDataLoader, data, settings)


def streaming_batches(
    folder: Path, transform: SampleTransform, settings: Settings
) -> Iterator[Any]:
    """Yield batches of MosaicML Streaming, shuffled by its default algorithm."""
    import streaming

    class StreamingSamples(streaming.StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[Tensor, Tensor, Tensor]:
            return transform(super().__getitem__(index))

    data = StreamingSamples(local=str(folder / "mds"), shuffle=True, batch_size=settings.batch)
    return _batches(DataLoader, data, settings)


def samples_of(shards: Path) -> Iterator[dict[str, Any]]:
    """Yield every sample's `jpg` bytes and `txt`."""
    index = ShardIndex.open(shards)
    for number, shard in enumerate(index.shards):
        for sample in range(shard.samples):
            raw = index.read(number, sample)
            yield {"jpg": raw.image, "txt": captions_of(raw.annotation)[0]}


def convert(shards: Path, folder: Path) -> None:
    """Write the samples of shards in the formats of litdata and MosaicML Streaming."""
    import streaming
    from litdata.streaming.writer import BinaryWriter

    (folder / "litdata").mkdir()
    writer = BinaryWriter(str(folder / "litdata"), chunk_bytes=_CHUNK)
    for number, sample in enumerate(samples_of(shards)):
        writer[number] = sample
    writer.done()
    writer.merge()
    columns = {"jpg": "bytes", "txt": "str"}
    with streaming.MDSWriter(
        out=str(folder / "mds"), columns=columns, size_limit=_CHUNK, exist_ok=True
    ) as mds:
        for sample in samples_of(shards):
            mds.write(sample)


class Turn(NamedTuple):
    """Wall seconds of some batches, and CPU seconds of all processes."""

    seconds: float
    cpu: float


class Stream:
    """A running loader with its processes, which stop between turns."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        others = set(multiprocessing.active_children())
        self._batches = start()
        next(self._batches)
        self._workers = set(multiprocessing.active_children()) - others
        self._signal(signal.SIGSTOP)

    def turn(self, batches: int) -> Turn:
        """Receive some batches and measure the time."""
        self._signal(signal.SIGCONT)
        start, cpu = time.perf_counter(), self._cpu()
        for _ in range(batches):
            next(self._batches)
        turn = Turn(time.perf_counter() - start, self._cpu() - cpu)
        self._signal(signal.SIGSTOP)
        return turn

    def close(self) -> None:
        """End the loader processes."""
        self._signal(signal.SIGCONT)
        self._batches.close()  # type: ignore[attr-defined]
        del self._batches
        # open_clip's processes end when their loader is freed.
        gc.collect()
        for worker in self._workers:
            worker.join(timeout=10)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            os.kill(worker.pid, number)  # type: ignore[arg-type]  # it was started

    def _cpu(self) -> float:
        seconds = time.process_time()
        for worker in self._workers:
            # User and system time: fields 14 and 15 of the file, 11 and 12 after pid and name.
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds


class LoaderTurns(NamedTuple):
    """Turns of a loader, and samples per turn."""

    samples: int
    turns: list[Turn]

    @property
    def rate(self) -> float:
        """Return the median samples/s."""
        return self.samples / statistics.median(turn.seconds for turn in self.turns)


def take_turns(
    loaders: Mapping[str, StartLoader], batches: int, samples: int, rounds: int, cores: int
) -> dict[str, LoaderTurns]:
    """Start all loaders and measure them by turns, after a round of warm-up."""
    # Loaders share as many cores as each has processes; a process has one thread.
    all_cores = sorted(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, all_cores[:cores])
    torch.set_num_threads(1)
    streams: dict[str, Stream] = {}
    try:
        for name, start in loaders.items():
            streams[name] = Stream(start)
        turns = {name: partial(stream.turn, batches) for name, stream in streams.items()}
        results = harness.interleave(turns, rounds, warm_up=1)
    finally:
        for stream in streams.values():
            stream.close()
        os.sched_setaffinity(0, all_cores)
        torch.set_num_threads(threads)
    return {name: LoaderTurns(samples, results[name]) for name in streams}


def make_shards(folder: Path, samples: int, images: int = 64, per_shard: int = 128) -> None:
    """Write shards as img2dataset does, repeating `images` different images."""
    rng = np.random.default_rng(0)
    words = np.array([f"{first}{last}" for first in "bdfgklmnprst" for last in ("a", "en", "ito")])
    jpegs = [_photograph(rng, 500, 375) for _ in range(images)]
    for first in range(0, samples, per_shard):
        with open(folder / f"{first // per_shard:05d}.tar", "wb") as file:
            for number in range(first, min(first + per_shard, samples)):
                caption = " ".join(rng.choice(words, rng.integers(6, 16)))
                append_member(file, f"{number:09d}.jpg", jpegs[number % images])
                append_member(file, f"{number:09d}.txt", caption.encode())
            close_tar(file)
    index_folder(folder)


def _photograph(rng: np.random.Generator, width: int, height: int) -> bytes:
    """Return a JPEG of noise with amplitude 1/frequency and similar channels, as photographs."""
    horizontal, vertical = np.fft.rfftfreq(width), np.fft.fftfreq(height)[:, None]
    frequency = np.maximum(np.hypot(horizontal, vertical), 1 / width)
    noise = np.fft.rfft2(rng.normal(size=(4, height, width))) / frequency
    grey, *colours = np.fft.irfft2(noise, s=(height, width))
    levels = np.stack([grey + 0.4 * colour for colour in colours], axis=-1)
    levels = 128 + 50 * (levels - levels.mean()) / levels.std()
    stream = BytesIO()
    Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(stream, "jpeg", quality=90)
    return stream.getvalue()


def check_shards(shards: Path, batch: int, workers: int) -> None:
    """Raise ConfigError unless every loader can yield a batch of these shards."""
    index = ShardIndex.open(shards)
    paths = sorted(shards.glob("*.tar"))
    if len(paths) < workers:
        raise ConfigError(f"{shards}: {len(paths)} shards are too few for {workers} workers")
    if len(index) < 2 * batch * workers:
        raise ConfigError(f"{shards}: {len(index)} samples are too few for batches of {batch}")
    with tarfile.open(paths[0]) as archive:
        if not any(name.endswith(".txt") for name in archive.getnames()):
            raise ConfigError(f"{paths[0]}: no KEY.txt, from which open_clip reads captions")


def save_vocabulary(shards: Path, folder: Path, max_tokens: int) -> None:
    """Train a WordPiece vocabulary on the captions of the first shard."""
    index = ShardIndex.open(shards)
    captions = [
        caption
        for number in range(index.shards[0].samples)
        for caption in captions_of(index.read_annotation(0, number))
    ]
    TextProcessor(train_wordpiece(captions, 30_000), max_tokens).save(folder)


def peer_loaders(folder: Path, transforms: str, settings: Settings) -> dict[str, StartLoader]:
    """Return the loaders of this project and of libraries that take a function."""
    transform = SampleTransform(settings, transforms)
    return {
        OURS: partial(our_batches, settings, PLAIN, False),
        "webdataset": partial(webdataset_batches, transform, settings),
        "litdata": partial(litdata_batches, folder, transform, settings),
        "streaming": partial(streaming_batches, folder, transform, settings),
    }


def ratios(turns: dict[str, LoaderTurns], name: str, reference: str) -> list[float]:
    """Return for each round a loader's samples per CPU second relative to the reference's."""
    return [base.cpu / turn.cpu for base, turn in zip(turns[reference].turns, turns[name].turns)]


def measure(
    loaders: dict[str, StartLoader], settings: Settings, rounds: int
) -> dict[str, LoaderTurns]:
    """Measure all loaders by turns; a turn is a pass over the shards."""
    batches = len(ShardIndex.open(settings.shards)) // settings.batch
    return take_turns(loaders, batches, batches * settings.batch, rounds, settings.workers)


def report(title: str, turns: dict[str, LoaderTurns], workers: int) -> None:
    """Print a table with a row per loader, then the figures; ratios are to the first loader."""
    rows, figures, first = [], [], next(iter(turns))
    for name, loader_turns in turns.items():
        loader_ratios = ratios(turns, name, first)
        low, middle, high = np.quantile(loader_ratios, (0.25, 0.5, 0.75))
        cpu_seconds = statistics.median(turn.cpu for turn in loader_turns.turns)
        rate, milliseconds = loader_turns.rate / workers, 1000 * cpu_seconds / loader_turns.samples
        numbers = [rate, milliseconds, middle, low, high]
        rows.append([name, str(workers), *(f"{number:.2f}" for number in numbers)])
        prefix = f"loader/{title}/{workers}_workers/{name}"
        figures.append(Figure(f"{prefix}/rate", rate, "samples/s/core"))
        figures.append(Figure(f"{prefix}/ratio", statistics.median(loader_ratios), "x"))
    head = [title, "workers", "samples/s/core", "CPU ms/sample", f"times {first}"]
    print(harness.table([*head, "quartiles", ""], rows), end="\n\n", flush=True)
    harness.print_figures(figures, torch.device("cpu"))


@contextmanager
def prepare_settings(
    shards: Path | None, samples: int, size: int, batch: int, workers: int
) -> Iterator[tuple[Settings, Path]]:
    """Yield settings with shards and a vocabulary, and a temporary folder."""
    if not hasattr(os, "sched_setaffinity") or not Path("/proc/self/stat").exists():
        raise ConfigError("this benchmark pins processes to cores and reads /proc: it needs Linux")
    if workers > (cores := len(os.sched_getaffinity(0))):
        raise ConfigError(f"--workers {workers}: the machine has {cores} cores")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if shards is None:
            shards = folder / "shards"
            shards.mkdir()
            make_shards(shards, samples)
        check_shards(shards, batch, workers)
        save_vocabulary(shards, folder / "vocabulary", TOKENS)
        # As training does in its main process; forks inherit it.
        keep_freed_memory()
        try:
            yield Settings(shards, folder / "vocabulary", size, batch, workers), folder
        except ImportError as error:
            install = "pip install 'vlp[benchmark]' litdata mosaicml-streaming"
            raise ConfigError(f"{error}; {install}") from error


def loader(
    shards: Path | None = None,
    samples: int = 1024,
    size: int = 256,
    batch: int = 64,
    workers: int = 1,
    rounds: int = 7,
    row: Literal["pillow", "equal", "best"] = "equal",
) -> None:
    """Time this loader and open_clip's training code, unchanged, on the same shards.

    --row pillow: both make the same Pillow calls (decode, resize to a square, bicubic, normalise).
    equal: both do the same operations by their own code (decode, random crop of 0.9..1 of the area,
    bicubic, normalise), with the same tokenizer. best: both as shipped, ours with quick decoding
    and uint8 images, without and with RandAugment(2, 7). --batch is a multiple of 8.
    """
    with prepare_settings(shards, samples, size, batch, workers) as (settings, _):
        report(row, measure(open_clip_loaders(row, settings), settings, rounds), workers)


def loader_peers(
    shards: Path | None = None,
    samples: int = 1024,
    size: int = 256,
    batch: int = 64,
    rounds: int = 7,
    transforms: Literal["ours", "pillow", "torchvision"] = "ours",
) -> None:
    """Time this loader, webdataset, litdata and MosaicML Streaming.

    All have the same transforms (decode, random crop of 0.9..1 of the area, bicubic, tokens) and
    yield the same uint8 batches. --transforms is the code that the peers' transforms use. Ratios
    are of a peer to ours.
    """
    with prepare_settings(shards, samples, size, batch, 1) as (settings, folder):
        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(folder)  # of litdata
        convert(settings.shards, folder)
        loaders = peer_loaders(folder, transforms, settings)
        report(f"peers_{transforms}", measure(loaders, settings, rounds), 1)


COMMANDS = (loader, loader_peers)
