"""Images with captions, for a captioning model."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from vlp.data.downstream.dataset import (
    DownstreamDataConfig,
    DownstreamDataset,
    ImagePreparation,
    decode_images,
)
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.shard_reader import Item, Items
from vlp.data.stream.batch import to_device
from vlp.data.stream.loader import RngFactory
from vlp.data.text.tokenizer import TextProcessor, predicted_positions


class CaptionDataConfig(DownstreamDataConfig):
    """Captioned shards."""

    max_caption: int = Field(
        32, ge=3, description="largest number of tokens of a caption, [CLS] and [SEP] included"
    )
    captions: Literal["one", "all"] = Field(
        "all", description="all: every caption once per epoch; one: a drawn caption per image"
    )


class CaptionExample(NamedTuple):
    """One image with its captions."""

    # (3, size, size) float32
    pixels: Tensor
    # Target of training, "" in evaluation.
    caption: str
    # All captions, the references of evaluation.
    captions: tuple[str, ...]


class CaptionBatch(NamedTuple):
    """B images with a caption each; if all samples are bad, one grey row that is not valid."""

    # (B, 3, size, size) float32
    pixels: Tensor
    # (B, L) int64, [CLS] ... [SEP] and padding
    caption_ids: Tensor
    # (B,) bool
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()
    # (R,) int64, `predicted_positions` of `caption_ids`
    positions: Tensor | None = None

    def to(self, device: torch.device | str) -> CaptionBatch:
        """Move every tensor to `device`."""
        return to_device(self, device)


class CaptionDataset(DownstreamDataset[CaptionExample, CaptionBatch]):
    """Images of shard folders; an item is a caption if `captions_in` counts the items' parts."""

    def __init__(
        self,
        items: Items,
        text: TextProcessor,
        prepare: ImagePreparation,
        config: CaptionDataConfig,
    ) -> None:
        super().__init__(items, TextProcessor(text.tokenizer, config.max_caption), prepare)
        self.config = config

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> CaptionExample:
        """Make the example of item `number`; with `rng_for`, augmented and with a target."""
        captions = captions_of(item.raw.annotation)
        caption = ""
        if rng_for is not None:
            if not captions:
                raise BadSample("no text", f"{item.where}: it has no caption")
            index = item.part
            if self.config.captions == "one":
                index = int(rng_for("caption").integers(len(captions)))
            caption = captions[index]
        image = decode_images(item.raw, 1)
        pixels = self.prepare(image, caption, number, rng_for)[0]
        return CaptionExample(pixels, caption, tuple(captions))

    def blank(self) -> CaptionExample:
        """Make a grey image with an empty caption."""
        size = self.prepare.evaluate.image_size
        return CaptionExample(torch.zeros(3, size, size), "", ())

    def batch(
        self, examples: list[CaptionExample], valid: Tensor, skipped: tuple[SkippedSample, ...]
    ) -> CaptionBatch:
        """Stack images with their targets; `valid` is (B,) bool."""
        tokens = self.text([example.caption for example in examples])
        longest = int(tokens.attention_mask.sum(1).max())
        pixels = torch.stack([example.pixels for example in examples])
        ids = tokens.text_ids[:, :longest]
        positions = predicted_positions(ids, self.text.pad_id)
        return CaptionBatch(pixels, ids, valid, skipped, positions)


def captions_in(annotation: Annotation) -> int:
    """Count the captions of a sample, at least 1: without a caption it becomes a bad item."""
    return max(1, len(captions_of(annotation)))
