"""Writer of features of a frozen image tower, one file of features and one of codes per shard."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from vlp import distributed
from vlp.config import ConfigError
from vlp.data.features.store import (
    BAD,
    CHECKSUM_DTYPE,
    FLIPPED,
    HEADER_NAME,
    PLAIN,
    FeatureHeader,
    FeatureSource,
    TowerKey,
    file_paths,
    is_complete,
    layouts,
    shards_sha256,
)
from vlp.data.image.decode import EncodedImage, pil_to_tensor
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.shards.index import npy_header
from vlp.data.shards.remote import ShardCache, is_url
from vlp.data.shards.sample_files import KINDS, BadSample, RawSample
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.stream.loader import open_loader, worker_settings
from vlp.data.stream.rng import make_rng
from vlp.io import atomic_write
from vlp.lock import FolderLock, is_lock
from vlp.models.folder import load_start, tower_key
from vlp.models.vlp import VLPModel
from vlp.training.config import PretrainConfig


def feature_writer(
    config: PretrainConfig,
    out: Path,
    views: int = 1,
    dtype: Literal["float16", "bfloat16"] = "float16",
    precision: Literal["float32", "bf16"] = "float32",
) -> FeatureWriter:
    """Return the writer of a pretraining configuration's features; see `vlp data features`."""
    settings = config.data.cache
    cache = None if settings is None else ShardCache(settings.folder, settings.limit)
    sources = [
        ShardIndex.open(entry.path, cache, config.data.outages) for entry in config.data.sources
    ]
    device = distributed.default_device()
    # A tower without `init_from` gets the random weights of the pretraining.
    torch.manual_seed(config.training.seed)
    model = VLPModel(config.model)
    load_start(model, config.init_from)
    model.eval().to(device)
    encoder = model.image_encoder
    preprocessing = Preprocessing(config.model.image.image_size, *config.model.image.statistics)
    side = preprocessing.image_size

    average_hflip = config.model.image.average_hflip
    plain_tower = encoder.hflip_averaged_tower if average_hflip else encoder.tower

    def tower(pixels: Tensor) -> Tensor:  # (B, views, 3, S, S) to (B, views, tokens, width)
        states = [plain_tower(pixels[:, 0]), *map(encoder.tower, pixels[:, 1:].unbind(1))]
        return torch.stack([encoder.pool_patches(state) for state in states], dim=1)

    with torch.no_grad():
        tokens, width = tower(torch.zeros(1, 1, 3, side, side, device=device)).shape[2:]
    key = tower_key(model)
    header = FeatureHeader(
        tower=key.settings,
        weights=key.weights,
        image_size=side,
        mean=preprocessing.mean,
        std=preprocessing.std,
        augment=config.data.augment if views > 1 else None,
        views=views,
        seed=config.training.seed,
        precision=precision,
        dtype=dtype,
        tokens=tokens,
        width=width,
        kinds=KINDS,
        sources=tuple(
            FeatureSource(
                # A URL's query may hold a secret.
                name=Path(urlsplit(entry.path).path if is_url(entry.path) else entry.path).name,
                shards=len(index.shards),
                samples=index.shards.total,
                index=shards_sha256(index.shards),
            )
            for entry, index in zip(config.data.sources, sources)
        ),
    )
    transform = TrainTransform(config.data.augment, preprocessing)
    return FeatureWriter(out, header, tower, device, sources, transform)


class SampleBlock(NamedTuple):
    """Consecutive samples of one shard."""

    source: int
    shard: int
    samples: range


class Views(NamedTuple):
    """Views of a block's samples; good samples are those that can be read."""

    pixels: Tensor  # (good samples, views, 3, side, side), uint8
    codes: Tensor  # (samples, views): PLAIN, FLIPPED, or BAD plus the kind of fault
    checksums: Tensor  # (samples,): CRC-32 of the encoded images, 0 where they cannot be read


@dataclass(frozen=True)
class ViewBlocks(Dataset[Views]):
    """Map-style dataset of views by block; augmentation depends on the seed and the sample."""

    header: FeatureHeader
    sources: Sequence[ShardIndex]
    blocks: Sequence[SampleBlock]
    transform: TrainTransform

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> Views:
        """Return the views of a block."""
        block, views = self.blocks[number], self.header.views
        codes = torch.full((len(block.samples), views), PLAIN, dtype=torch.uint8)
        checksums = torch.zeros(len(block.samples), dtype=torch.int64)
        pixels = []
        for row, sample in enumerate(block.samples):
            try:
                raw = self.sources[block.source].read(block.shard, sample)
                checksums[row] = zlib.crc32(raw.image)
                view_pixels, flipped = self._views(block, sample, raw)
            except BadSample as bad:
                codes[row] = BAD + self.header.kinds.index(bad.kind)
                continue
            pixels.append(view_pixels)
            codes[row, flipped] = FLIPPED
        side = self.header.image_size
        empty = torch.empty(0, views, 3, side, side, dtype=torch.uint8)
        return Views(torch.stack(pixels) if pixels else empty, codes, checksums)

    def _views(self, block: SampleBlock, sample: int, raw: RawSample) -> tuple[Tensor, list[int]]:
        """Return a sample's pixels (views, 3, side, side), and the indices of flipped views."""
        header, shard = self.header, self.sources[block.source].shards[block.shard].name
        image = EncodedImage(raw.image, raw.where)
        pixels = [pil_to_tensor(self.transform.preprocessing.squash(image.image()))]
        flipped = []
        name = f"{header.sources[block.source].index}:{shard}:{sample}"
        for view in range(1, header.views):
            rng = make_rng(header.seed, view, name, "features")
            augmented, is_flipped = self.transform.view(image, rng, may_flip=True)
            pixels.append(augmented)
            flipped += [view] if is_flipped else []
        return torch.stack(pixels), flipped


_PREFETCH = 2  # blocks per process
Tower = Callable[[Tensor], Tensor]  # normalised (B, views, 3, S, S) to (B, views, tokens, width)
ShardId = tuple[int, int]  # (source, shard)


@dataclass(frozen=True)
class FeatureWriter:
    """Writer of a feature folder's missing shards; the tower is on `device`."""

    folder: Path
    header: FeatureHeader
    tower: Tower
    device: torch.device
    sources: Sequence[ShardIndex]
    transform: TrainTransform

    def write(self, batch: int, workers: int) -> tuple[int, int]:
        """Write the missing shards with all ranks; return their samples, and the bad among them.

        batch: maximum views in memory.
        """
        with ExitStack() as stack:
            # Rank 0 holds the lock while all ranks write.
            problem, missing = distributed.broadcast_object(
                self._open_folder(stack) if distributed.rank() == 0 else None
            )
            if problem:
                raise ConfigError(problem)
            return self._write(missing, batch, workers)

    def _write(self, missing: Sequence[ShardId], batch: int, workers: int) -> tuple[int, int]:
        shards = missing[distributed.rank() :: distributed.world_size()]
        block_size = max(1, batch // self.header.views)
        blocks_by_shard = [self._blocks(*shard, block_size) for shard in shards]
        blocks = [block for shard_blocks in blocks_by_shard for block in shard_blocks]
        loader = DataLoader(
            ViewBlocks(self.header, self.sources, blocks, self.transform),
            batch_size=None,
            **worker_settings(workers, _PREFETCH),
        )
        bad, total = 0, sum(len(block.samples) for block in blocks)
        # None: no bar if the output is not a terminal.
        quiet = None if distributed.rank() == 0 else True
        with open_loader(loader) as views, tqdm(total=total, unit="image", disable=quiet) as bar:
            for shard, shard_blocks in zip(shards, blocks_by_shard):
                bad += self._write_shard(*shard, islice(views, len(shard_blocks)), bar)
        totals, bad_counts = zip(*distributed.all_gather_object((total, bad)))
        return sum(totals), sum(bad_counts)

    def _open_folder(self, stack: ExitStack) -> tuple[str | None, list[ShardId]]:
        """Lock the folder; return an error message or None, and the missing shards."""
        try:
            stack.enter_context(FolderLock(self.folder))
            if (self.folder / HEADER_NAME).exists():
                header = FeatureHeader.read(self.folder)
                header.require_tower(self.folder, TowerKey(self.header.tower, self.header.weights))
                settings = self.header.model_dump(mode="json", exclude={"tower"})
                header.require(self.folder, settings)
            elif not all(map(is_lock, self.folder.iterdir())):
                return f"--out {self.folder}: holds files of another kind; name another folder", []
            else:
                self.header.write(self.folder)
        except (ConfigError, OSError) as error:
            return str(error), []
        return None, [
            (source, shard)
            for source, index in enumerate(self.sources)
            for shard, entry in enumerate(index.shards)
            if not is_complete(self.header, self._paths(source, shard), entry.samples)
        ]

    def _blocks(self, source: int, shard: int, size: int) -> list[SampleBlock]:
        samples = range(self.sources[source].shards[shard].samples)
        starts = samples[::size]
        return [SampleBlock(source, shard, samples[start : start + size]) for start in starts]

    def _paths(self, source: int, shard: int) -> list[Path]:
        return file_paths(self.folder, source, self.sources[source].shards[shard].name)

    def _write_shard(self, source: int, shard: int, blocks: islice[Views], bar: tqdm) -> int:
        """Write the files of a shard; returns the number of bad samples."""
        bad, samples = 0, self.sources[source].shards[shard].samples
        with ExitStack() as stack:
            # The first file is committed last: it exists only if the shard is complete.
            features, codes, checksums = files = [
                stack.enter_context(atomic_write(path, durable=True, error=ConfigError))
                for path in self._paths(source, shard)
            ]
            for file, layout in zip(files, layouts(self.header, samples), strict=True):
                file.write(npy_header(*layout))
            for block in blocks:
                features.write(self._encode(block).numpy())
                codes.write(block.codes.numpy())
                checksums.write(block.checksums.numpy().astype(CHECKSUM_DTYPE))
                bad += int((block.codes[:, 0] >= BAD).sum())
                bar.update(len(block.codes))
        return bad

    def _encode(self, block: Views) -> Tensor:
        """Return features (samples, views, tokens, width) as int16 bits; 0 for bad samples."""
        header = self.header
        bits = torch.zeros(*block.codes.shape, header.tokens, header.width, dtype=torch.int16)
        good = block.codes[:, 0] < BAD
        if not good.any():
            return bits
        pixels = self.transform.preprocessing.normalise(block.pixels.to(self.device))
        use_bf16 = header.precision == "bf16"
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, use_bf16):
            states = self.tower(pixels)
        features = states.to(getattr(torch, header.dtype)).cpu()
        if not features.isfinite().all():
            raise ConfigError(
                f"a feature is {float(states.abs().max()):.3g}, which {header.dtype} cannot hold; "
                "use --dtype bfloat16"
            )
        bits[good] = features.view(torch.int16)
        return bits
