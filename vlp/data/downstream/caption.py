"""Images with captions, for a model that writes them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from vlp.data.downstream.config import DownstreamDataConfig
from vlp.data.downstream.images import ImagePreparation, decoded
from vlp.data.downstream.items import Item, Items
from vlp.data.pretrain.loader import OrderedData
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.shards.sample_files import BadSample
from vlp.data.stream.batch import moved
from vlp.data.stream.map_dataset import RngFactory, indexed_data
from vlp.data.text.tokenizer import TextProcessor


class CaptionDataConfig(DownstreamDataConfig):
    """Captioned shards."""

    max_caption: int = Field(
        32, ge=3, description="tokens of a padded caption, [CLS] and [SEP] in; longer ones are cut"
    )
    captions: Literal["one", "all"] = Field(
        "all", description="every caption once an epoch, or one drawn per image"
    )


class CaptionExample(NamedTuple):
    """pixels (3, size, size); the caption to write, "" in evaluation; all captions there are."""

    pixels: Tensor
    caption: str
    captions: tuple[str, ...]


class CaptionBatch(NamedTuple):
    """pixels (B, 3, size, size) float32; caption_ids (B, L) int64, [CLS] ... [SEP] and padding.

    valid (B,) bool. A batch without a good sample has one that is not valid.
    """

    pixels: Tensor
    caption_ids: Tensor
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> CaptionBatch:
        """Move every tensor to `device`."""
        return moved(self, device)


class CaptionSet:
    """The images of some shard folders, or each of their captions.

    Args:
        items: samples, or with `captions_in` their captions.
        text: tokenizer.
        prepare: images to pixels.
        config: see there.
    """

    def __init__(
        self,
        items: Items,
        text: TextProcessor,
        prepare: ImagePreparation,
        config: CaptionDataConfig,
    ) -> None:
        self.items, self.prepare, self.config = items, prepare, config
        self.text = TextProcessor(text.tokenizer, config.max_caption)

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> CaptionExample:
        """The image of an item of that number; with `rng_for`, those of training, and a caption.

        Raises:
            BadSample: the image cannot be used, or there is no caption to train on.
        """
        captions = captions_of(item.raw.annotation)
        caption = ""
        if rng_for is not None:
            if not captions:
                raise BadSample("no text", f"{item.where}: it has no caption")
            part = item.part
            if self.config.captions == "one":
                part = int(rng_for("caption").integers(len(captions)))
            caption = captions[part]
        image = decoded(item.raw, 1, item.where)
        pixels = self.prepare(image, caption, number, rng_for)[0]
        return CaptionExample(pixels, caption, tuple(captions))

    def train(self, number: int, rng_for: RngFactory) -> CaptionExample:
        """An image with a caption to train on."""
        return self.make(self.items.read(number), number, rng_for)

    def collate(
        self, samples: list[CaptionExample], skipped: tuple[SkippedSample, ...] = ()
    ) -> CaptionBatch:
        """A batch of images with one caption each."""
        valid = torch.ones(len(samples), dtype=torch.bool)
        if not samples:  # models want a row; it counts nowhere
            size = self.prepare.evaluate.image_size
            samples = [CaptionExample(torch.zeros(3, size, size), "", ())]
            valid = torch.zeros(1, dtype=torch.bool)
        tokens = self.text([sample.caption for sample in samples])
        longest = int(tokens.attention_mask.sum(1).max())
        return CaptionBatch(
            torch.stack([sample.pixels for sample in samples]),
            tokens.text_ids[:, :longest],
            valid,
            skipped,
        )

    def batches(self, batch: int, seed: int) -> OrderedData:
        """Training batches.

        Raises:
            ConfigError: the streams do not divide the batch.
        """
        return indexed_data(len(self.items), self.train, self.collate, self.config, batch, seed)


def captions_in(annotation: Annotation) -> int:
    """How many captions a sample holds; at least one item, so that a sample without is counted."""
    return max(1, len(captions_of(annotation)))
