"""Captioning: a causal decoder attends to the image encoder's states.

By default its layers start as copies of the cross-modal encoder's, as these attend to images, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from vlp.data.shards.shard_reader import Items
from vlp.data.stream.loader import OrderedData
from vlp.models.decoder import AnswerDecoderConfig, Memory, answer_likelihood
from vlp.models.folder import Loaded
from vlp.objectives.loss import Loss
from vlp.tasks.caption.data import CaptionBatch, CaptionDataConfig, CaptionDataset, captions_in
from vlp.tasks.downstream.registry import DownstreamTask, TaskCard, register_task
from vlp.tasks.downstream.task import SCORES, DownstreamConfig, WritingTask
from vlp.tasks.task import Precision, StepOutput


class CaptionConfig(DownstreamConfig):
    """Decoder, data, beam search and scoring."""

    kind: Literal["caption"] = Field("caption", description="selects this class")
    data: CaptionDataConfig = Field(description="shards to train on and to validate on")
    decoder: AnswerDecoderConfig = Field(
        AnswerDecoderConfig(), description="sizes and initial weights of the text decoder"
    )
    label_smoothing: float = Field(
        0.1, ge=0, lt=1, description="share of the target spread evenly over the vocabulary"
    )
    beams: int = Field(3, ge=1, description="number of beams of the search for captions")
    penalty: float = Field(0.6, ge=0, description="length penalty; see vlp.models.decoder")
    java: bool = Field(
        True, description="evaluate with the PTB tokeniser and METEOR, which need Java"
    )


class CaptionTask(WritingTask):
    """Next-token cross-entropy of captions."""

    metric: ClassVar[str] = "cider"
    frozen_parts = SCORES | {"text_encoder.layers", "cross_encoder"}
    config: CaptionConfig

    def __init__(
        self, config: CaptionConfig, parts: Loaded, precision: Precision = "float32"
    ) -> None:
        super().__init__(config, parts, precision)
        self.add_decoder(config.decoder, parts, config.data.max_caption)
        if self.decoder.embedding is not None:
            self.model.freeze_modules({"text_encoder.embedding"})

    def dataset(self, folders: Sequence[str | Path], limit: int | None = None) -> CaptionDataset:
        """Return the dataset of shard folders' first `limit` images."""
        items = Items(folders, limit=limit)
        return CaptionDataset(items, self.text, self.prepare, self.config.data)

    def training_dataset(self) -> CaptionDataset:
        """Return the dataset of `data.train`, an item per image or per caption as configured."""
        data = self.config.data
        items = Items(data.train, captions_in if data.captions == "all" else None, data.limit)
        return CaptionDataset(items, self.text, self.prepare, data)

    def forward(self, batch: CaptionBatch, step: int) -> StepOutput:
        """Compute the loss in nats per word piece, and the token accuracy."""
        with self.autocast(batch.pixels.device):
            memory = self.remember(batch.pixels)
            output = answer_likelihood(
                self.decoder,
                memory,
                batch.caption_ids,
                self.model.text_encoder.embedding,
                self.text.pad_id,
                self.config.label_smoothing if self.training else 0.0,
                positions=batch.positions,
            )
        nats = -output.log_probability.where(batch.valid, 0)
        counts = output.correct, output.tokens
        correct, tokens = (count.where(batch.valid, 0).sum() for count in counts)
        return self.step_output(
            {"words": Loss(nats.sum(), tokens)},
            statistics={"token_accuracy": correct / tokens.clamp(min=1)},
        )

    @torch.no_grad()
    def predict(self, batch: CaptionBatch) -> list[str]:
        """Write a caption for each image."""
        return self.write(self.remember(batch.pixels))

    def remember(self, pixels: Tensor) -> Memory:
        """Encode images (B, 3, height, width) as the decoder's memory."""
        return self.decoder.remember(self.model.encode_image(pixels).states)

    @torch.no_grad()
    def write(self, memory: Memory) -> list[str]:
        """Write a caption for each image of `memory`, the result of `remember`, by beam search."""
        return self.write_texts(memory, self.config.beams, self.config.penalty)


def build(
    config: CaptionConfig, parts: Loaded, batch: int, seed: int, precision: Precision
) -> tuple[CaptionTask, OrderedData]:
    """Build the task and its training data."""
    task = CaptionTask(config, parts, precision)
    task.init_decoder(parts)
    return task, task.training_dataset().batches(config.data, batch, seed)


_CARD = TaskCard("image captioning", "image-to-text", text=False)
register_task(DownstreamTask("caption", CaptionConfig, build, CaptionTask.restore, _CARD))
