"""Blocks of samples to views: decoded, prepared and augmented, ready for a tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vlp.data.features.header import FeatureHeader
from vlp.data.features.store import BAD, FLIPPED, PLAIN
from vlp.data.image.jpeg import JpegImage, levels_of
from vlp.data.image.transforms import TrainTransform
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_index import ShardIndex
from vlp.data.stream.rng import make_rng


class SampleBlock(NamedTuple):
    """Consecutive samples of one shard."""

    source: int
    shard: int
    samples: range


class Views(NamedTuple):
    """A block's views: levels (good samples, views, 3, side, side) and codes (samples, views)."""

    levels: Tensor
    codes: Tensor


class ViewBlocks(Dataset[Views]):
    """Prepares the views of blocks; augmentation depends on the header's seed and on the place.

    Args:
        header: how many views, and the kinds of bad samples.
        sources: folders of shards.
        blocks: of their samples.
        transform: of the views from the second on.
    """

    def __init__(
        self,
        header: FeatureHeader,
        sources: Sequence[ShardIndex],
        blocks: Sequence[SampleBlock],
        transform: TrainTransform,
    ) -> None:
        self._header, self._sources, self._blocks = header, sources, blocks
        self._transform = transform

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> Views:
        """Return a block's views; a bad sample has codes only."""
        block, views = self._blocks[number], self._header.views
        codes = torch.full((len(block.samples), views), PLAIN, dtype=torch.uint8)
        levels = []
        for row, sample in enumerate(block.samples):
            try:
                found, flipped = self._views(block, sample)
            except BadSample as bad:
                codes[row] = BAD + self._header.kinds.index(bad.kind)
                continue
            levels.append(found)
            codes[row, flipped] = FLIPPED
        side = self._header.image_size
        empty = torch.empty(0, views, 3, side, side, dtype=torch.uint8)
        return Views(torch.stack(levels) if levels else empty, codes)

    def _views(self, block: SampleBlock, sample: int) -> tuple[Tensor, list[int]]:
        """Return (views, 3, side, side) levels of one sample, and its flipped views."""
        index, header = self._sources[block.source], self._header
        raw = index.read(block.shard, sample)
        shard = index.shards[block.shard].name
        image = JpegImage(raw.image, f"{index.folder / shard}, {raw.key}")
        levels = [levels_of(self._transform.preprocessing.squash(image.image()))]
        flipped = []
        name = f"{header.sources[block.source].index}:{shard}:{sample}"
        for view in range(1, header.views):
            rng = make_rng(header.seed, view, name, "features")
            augmented, is_flipped = self._transform.view(image, rng, may_flip=True)
            levels.append(augmented)
            flipped += [view] if is_flipped else []
        return torch.stack(levels), flipped
