"""Writing of features: shard by shard, each under its name only once it is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from data_tools.features.view_blocks import SampleBlock, ViewBlocks, Views
from vlp import distributed
from vlp.config import ConfigError
from vlp.data.features.header import HEADER_NAME, FeatureHeader, TowerKey
from vlp.data.features.store import BAD, CODE_DTYPE, FILE_DTYPES, array_start, file_paths, is_whole
from vlp.data.image.transforms import TrainTransform
from vlp.data.shards.shard_index import ShardIndex
from vlp.data.stream.workers import running, worker_settings
from vlp.io import atomic_write
from vlp.lock import FolderLock, is_lock

_AHEAD = 2
"""Batches that each process has ready or in work."""

Tower = Callable[[Tensor], Tensor]
"""Pixels (B, 3, side, side), normalised, to (B, tokens, width)."""


ShardPlace = tuple[int, int]
"""Numbers of the source, and of the shard in it."""


class Written(NamedTuple):
    """Samples whose features one command wrote, and those among them that have no image."""

    samples: int
    bad: int


class FeatureWriter:
    """Writes what is missing of a folder of features.

    Args:
        folder: made if missing.
        header: of the folder.
        tower: of the header, on `device`.
        device: where it is.
        sources: of the header.
        transform: of the views from the second on.
    """

    def __init__(
        self,
        folder: Path,
        header: FeatureHeader,
        tower: Tower,
        device: torch.device,
        sources: Sequence[ShardIndex],
        transform: TrainTransform,
    ) -> None:
        self.folder, self.header, self.tower, self.device = folder, header, tower, device
        self.sources, self.transform = sources, transform

    def write(self, batch: int, workers: int) -> Written:
        """Write this rank's share of the shards that are missing; every rank must call it.

        Args:
            batch: views held at once; a pass of the tower takes one view of each of their images.
            workers: processes that decode.

        Raises:
            ConfigError: the folder holds something else, or cannot be written; or a feature has no
                place in the header's dtype.
        """
        with ExitStack() as held:
            begun: tuple[str | None, list[ShardPlace]] = distributed.from_rank_0(
                self._begin(held) if distributed.rank() == 0 else None
            )
            problem, missing = begun
            if problem:
                raise ConfigError(problem)
            return self._write(missing, batch, workers)

    def _write(self, missing: Sequence[ShardPlace], batch: int, workers: int) -> Written:
        mine = missing[distributed.rank() :: distributed.world_size()]
        step = max(1, batch // self.header.views)
        shards = [self._blocks(*place, step) for place in mine]
        blocks = [block for shard in shards for block in shard]
        loader = DataLoader(
            ViewBlocks(self.header, self.sources, blocks, self.transform),
            batch_size=None,
            **worker_settings(workers, _AHEAD),
        )
        bad, total = 0, sum(len(block.samples) for block in blocks)
        with (
            running(loader) as views,
            tqdm(
                total=total, unit="image", disable=None if distributed.rank() == 0 else True
            ) as bar,
        ):
            for place, shard in zip(mine, shards):
                bad += self._write_shard(*place, islice(views, len(shard)), bar)
        found = distributed.gather_to_all(Written(total, bad))
        return Written(*map(sum, zip(*found)))

    def _begin(self, held: ExitStack) -> tuple[str | None, list[ShardPlace]]:
        """Lock the folder; return what is wrong with it, or the (source, shard) that it lacks."""
        try:
            held.enter_context(FolderLock(self.folder))
            if (self.folder / HEADER_NAME).exists():
                there = FeatureHeader.read(self.folder)
                there.require_tower(self.folder, TowerKey(self.header.tower, self.header.weights))
                wanted = self.header.model_dump(mode="json", exclude={"tower"})
                there.require(self.folder, wanted)
            elif not all(map(is_lock, self.folder.iterdir())):
                return f"--out {self.folder}: holds something else; name another folder", []
            else:
                self.header.write(self.folder)
        except (ConfigError, OSError) as error:
            return str(error), []
        return None, [
            (source, shard)
            for source, index in enumerate(self.sources)
            for shard, entry in enumerate(index.shards)
            if not is_whole(self.header, self._paths(source, shard), entry.samples)
        ]

    def _blocks(self, source: int, shard: int, step: int) -> list[SampleBlock]:
        samples = range(self.sources[source].shards[shard].samples)
        starts = samples[::step]
        return [SampleBlock(source, shard, samples[start : start + step]) for start in starts]

    def _paths(self, source: int, shard: int) -> tuple[Path, Path]:
        return file_paths(self.folder, source, self.sources[source].shards[shard].name)

    def _write_shard(self, source: int, shard: int, blocks: islice[Views], bar: tqdm) -> int:
        """Write both files of a shard, the features last; returns how many samples are bad."""
        header, bad = self.header, 0
        shape = self.sources[source].shards[shard].samples, header.views
        features, codes = self._paths(source, shard)
        with (
            atomic_write(features, durable=True, error=ConfigError) as rows,
            atomic_write(codes, durable=True, error=ConfigError) as views,
        ):
            rows.write(
                array_start(FILE_DTYPES[header.dtype], (*shape, header.tokens, header.width))
            )
            views.write(array_start(CODE_DTYPE, shape))
            for block in blocks:
                rows.write(self._rows(block).numpy())
                views.write(block.codes.numpy())
                bad += int((block.codes[:, 0] >= BAD).sum())
                bar.update(len(block.codes))
        return bad

    def _rows(self, block: Views) -> Tensor:
        """Return the bits of (samples, views, tokens, width) features, zeros of bad samples."""
        header = self.header
        rows = torch.zeros(*block.codes.shape, header.tokens, header.width, dtype=torch.int16)
        good = block.codes[:, 0] < BAD
        if not good.any():
            return rows
        pixels = self.transform.preprocessing.normalise(block.levels.to(self.device))
        use_bf16 = header.precision == "bf16"
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, use_bf16):
            states = self.tower(pixels)
        stored = states.to(getattr(torch, header.dtype)).cpu()
        if not stored.isfinite().all():
            raise ConfigError(
                f"a feature is {float(states.abs().max()):.3g}, which {header.dtype} cannot hold; "
                "use --dtype bfloat16"
            )
        rows[good] = stored.view(torch.int16)
        return rows
