"""Dataset of a downstream task: numbered items of shard folders, made into examples and batches."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from vlp.data.downstream.config import DownstreamDataConfig
from vlp.data.downstream.images import ImagePreparation
from vlp.data.downstream.items import Item, Items
from vlp.data.features.header import shards_sha256
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.stream.batch import Slots
from vlp.data.stream.loader import OrderedData
from vlp.data.stream.map_dataset import RngFactory, indexed_data
from vlp.data.text.tokenizer import TextProcessor

Example = TypeVar("Example")
Slotted = TypeVar("Slotted", bound=Slots)


class DownstreamDataset(Generic[Example, Slotted]):
    """Base of the tasks' datasets; a subclass adds `make`, `blank` and `batch`.

    Args:
        items: of shard folders.
        text: tokenizer.
        prepare: images to pixels.
    """

    def __init__(self, items: Items, text: TextProcessor, prepare: ImagePreparation) -> None:
        self.items, self.text, self.prepare = items, text, prepare

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> Example:
        """Make an example of the item of that number; `rng_for` augments, in training.

        Raises:
            BadSample: an image or the text cannot be used.
        """
        raise NotImplementedError

    def blank(self) -> Example:
        """Make the example that stands in a batch without a good one."""
        raise NotImplementedError

    def batch(
        self, examples: list[Example], valid: Tensor, skipped: tuple[SkippedSample, ...]
    ) -> Slotted:
        """Stack at least one example; `valid` (B,) bool."""
        raise NotImplementedError

    def require_truth(self, example: Example, item: Item) -> None:
        """Check that an example can be trained on.

        Raises:
            BadSample: it has no label or answer.
        """

    def train(self, number: int, rng_for: RngFactory) -> Example:
        """Make an example to train on.

        Raises:
            BadSample: it cannot be used, or has no label or answer.
        """
        item = self.items.read(number)
        example = self.make(item, number, rng_for)
        self.require_truth(example, item)
        return example

    def collate(self, examples: list[Example], skipped: tuple[SkippedSample, ...] = ()) -> Slotted:
        """Make a batch; without a good example it has one blank row that is not valid."""
        valid = torch.ones(len(examples), dtype=torch.bool)
        if not examples:
            examples, valid = [self.blank()], torch.zeros(1, dtype=torch.bool)
        return self.batch(examples, valid, skipped)

    def batches(self, config: DownstreamDataConfig, batch: int, seed: int) -> OrderedData:
        """Return the training batches of `batch` slots.

        Raises:
            ConfigError: the streams do not divide the batch.
        """
        data = indexed_data(len(self.items), self.train, self.collate, config, batch, seed)
        for number, index in enumerate(self.items.indices):
            data.fingerprint[f"source {number}"] = shards_sha256(index.shards)
        data.fingerprint["vocabulary"] = self.text.sha256()
        return data
