"""Throughput of this loader beside webdataset, litdata and MosaicML Streaming (samples/s and core).

    pip install webdataset litdata mosaicml-streaming
    python -m evaluation.benchmarks.loader.peers

All sides read the same samples, JPEGs of 500 x 375, in the order each one shuffles: webdataset the
tars of this loader, the others their own files of the same bytes. All have the same transforms:
decode, random crop of 0.9..1 of the area, bicubic to `--size`, tokens, and end with the same uint8
batches. Ours also draws by (seed, epoch, sample, purpose), parses annotations, and gives ids and
numbers of samples. Peers are given functions; `--transforms` says by whose code these work:

  ours         this loader's, so that only what surrounds the transforms differs
  pillow       Pillow's decoding and `torchvision.transforms.v2` on its image
  torchvision  torchvision's decoding and `torchvision.transforms.v2` on the tensor

One loader process each on one core, by turns of one pass, as in `evaluation.benchmarks.loader`: the
ratio is that of samples per CPU second, paired by rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from evaluation.benchmarks import harness
from evaluation.benchmarks.harness import Measurement
from evaluation.benchmarks.loader.__main__ import CROP, TOKENS, Settings, our_batches
from evaluation.benchmarks.loader.shards import check_shards, make_shards, save_vocabulary
from evaluation.benchmarks.loader.turns import LoaderTurns, take_turns
from vlp.config import ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.image.jpeg import JpegImage
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.schema import captions_of
from vlp.data.shards.shard_index import ShardIndex
from vlp.data.text.tokenizer import TextProcessor
from vlp.training.engines.environment import keep_freed_memory

OURS = "ours"
TARGET = 1.15
_CHUNK = 1 << 24

AUGMENT = AugmentConfig(randaugment=False, hflip=False, crop_scale=CROP)

ImageTransform = Callable[[bytes], Tensor]


def _own_image(size: int) -> ImageTransform:
    transform, rng = TrainTransform(AUGMENT, Preprocessing(size)), np.random.default_rng(0)
    return lambda data: transform.levels(JpegImage(data, "a sample"), rng, "")


def _pillow_image(size: int) -> ImageTransform:
    transform = v2.Compose([_resized_crop(size), v2.PILToTensor()])
    return lambda data: transform(Image.open(BytesIO(data)).convert("RGB"))


def _torchvision_image(size: int) -> ImageTransform:
    transform = _resized_crop(size)

    def prepared(data: bytes) -> Tensor:
        coded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return transform(decode_jpeg(coded, ImageReadMode.RGB))

    return prepared


def _resized_crop(size: int) -> v2.RandomResizedCrop:
    return v2.RandomResizedCrop(size, scale=CROP, interpolation=v2.InterpolationMode.BICUBIC)


TRANSFORMS = {OURS: _own_image, "pillow": _pillow_image, "torchvision": _torchvision_image}


class Prepare:
    """A sample's transforms, for the sides that take a function.

    Args:
        settings: its vocabulary and size are taken.
        transforms: a key of `TRANSFORMS`, by whose code `image` makes levels (3, size, size) uint8
            of a JPEG's bytes.
    """

    def __init__(self, settings: Settings, transforms: str) -> None:
        self._text = TextProcessor.load(settings.vocabulary, TOKENS)
        self.image = TRANSFORMS[transforms](settings.size)

    def text(self, caption: str) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask, (tokens,) each."""
        tokens = self._text([caption])
        return tokens.text_ids[0], tokens.attention_mask[0]

    def __call__(self, sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Prepare `jpg` and `txt`."""
        return (self.image(sample["jpg"]), *self.text(sample["txt"]))


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _batches(loader: Any, data: Any, settings: Settings) -> Iterator[Any]:
    """Batches of a DataLoader class, without end."""
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


def webdataset_batches(prepare: Prepare, settings: Settings) -> Iterator[Any]:
    """Batches of webdataset, which shuffles the shards and 1,000 samples."""
    import webdataset

    def prepared(sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        return prepare({"jpg": sample["jpg"], "txt": sample["txt"].decode()})

    shards = sorted(map(str, settings.shards.glob("*.tar")))
    data = webdataset.WebDataset(shards, shardshuffle=100, empty_check=False).shuffle(1000)
    data = data.map(prepared).batched(settings.batch, partial=False)
    return _endless(
        webdataset.WebLoader(
            data,
            batch_size=None,
            num_workers=settings.workers,
            prefetch_factor=4,
            persistent_workers=True,
        )
    )


def litdata_batches(folder: Path, prepare: Prepare, settings: Settings) -> Iterator[Any]:
    """Batches of litdata, shuffled."""
    import litdata

    class LitdataSamples(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[Tensor, Tensor, Tensor]:
            return prepare(super().__getitem__(index))

    data = LitdataSamples(str(folder / "litdata"), shuffle=True, drop_last=True)
    return _batches(litdata.StreamingDataLoader, data, settings)


def streaming_batches(folder: Path, prepare: Prepare, settings: Settings) -> Iterator[Any]:
    """Batches of MosaicML Streaming, shuffled by py1e."""
    import streaming

    class StreamingSamples(streaming.StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[Tensor, Tensor, Tensor]:
            return prepare(super().__getitem__(index))

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
    """Write the samples of tars in the forms of litdata and of MosaicML Streaming."""
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


def sides(
    folder: Path, transforms: str, settings: Settings
) -> dict[str, Callable[[], Iterator[Any]]]:
    """Return the functions that start each side."""
    prepare = Prepare(settings, transforms)
    return {
        OURS: partial(our_batches, settings, AUGMENT, False),
        "webdataset": partial(webdataset_batches, prepare, settings),
        "litdata": partial(litdata_batches, folder, prepare, settings),
        "streaming": partial(streaming_batches, folder, prepare, settings),
    }


def ratios(found: dict[str, LoaderTurns], name: str) -> list[float]:
    """By rounds, our samples per CPU second over a side's."""
    return [other.cpu / own.cpu for other, own in zip(found[name].turns, found[OURS].turns)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare sizes."""
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--size", type=int, default=256, metavar="PX")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each side")
    parser.add_argument("--transforms", choices=list(TRANSFORMS), default=OURS, help="of peers")


def run(options: argparse.Namespace, _: torch.device) -> Iterator[Measurement]:
    """Measure all sides by turns, print the table, yield the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = folder / "shards"
        shards.mkdir()
        make_shards(shards, options.samples)
        settings = Settings(shards, folder / "vocabulary", options.size, options.batch, 1)
        check_shards(shards, settings.batch, settings.workers)
        save_vocabulary(shards, settings.vocabulary, TOKENS)
        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = name  # of litdata
        try:
            convert(shards, folder)
        except ImportError as error:
            install = "pip install webdataset litdata mosaicml-streaming"
            raise ConfigError(f"{error}; {install}") from error
        keep_freed_memory()
        batches = options.samples // options.batch
        samples = batches * options.batch
        found = take_turns(
            sides(folder, options.transforms, settings), batches, samples, options.rounds, 1
        )
    rows = []
    for side, own in found.items():
        low, middle, high = np.quantile(ratios(found, side), (0.25, 0.5, 0.75))
        milliseconds = 1000 * statistics.median(turn.cpu for turn in own.turns) / own.samples
        rows.append([side, f"{own.rate:.1f}", f"{milliseconds:.2f}", f"{middle:.2f}",
                     f"{low:.2f}..{high:.2f}"])  # fmt: skip
    print(harness.table(["", "samples/s", "CPU ms/sample", "ours is x", "quartiles"], rows))
    for side in list(found)[1:]:
        value = statistics.median(ratios(found, side))
        place = f"loader/peers/{options.transforms}/{side}/ratio"
        yield Measurement(place, value, "x", TARGET)


main = partial(harness.run_benchmark, __doc__, add_options, run, cpu_only=True)


if __name__ == "__main__":
    sys.exit(main())
