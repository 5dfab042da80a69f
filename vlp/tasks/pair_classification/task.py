"""Pair classification of a text and one or several images: SNLI-VE and NLVR2.

A two-layer perceptron reads the text stream's [CLS] (ACE-RPE, section 4.2, after UNITER). Several
images enter one pass, each with a learned embedding added to its tokens (`tags`, ViLT's image-type
embedding), and its own anchor paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vlp.data.shards.shard_reader import Items
from vlp.data.stream.loader import OrderedData
from vlp.models.folder import Loaded
from vlp.objectives.loss import Loss
from vlp.precision import full_precision, require_finite
from vlp.tasks.downstream.registry import DownstreamTask, TaskCard, register_task
from vlp.tasks.downstream.task import SCORES
from vlp.tasks.pair_classification.data import (
    NLVR2_LABELS,
    SNLI_VE_LABELS,
    AssignmentDataset,
    PairBatch,
    PairDataset,
)
from vlp.tasks.task import Precision, StepOutput
from vlp.tasks.teacher import Distilled, DistilledConfig


class PairClassificationConfig(DistilledConfig):
    """Base of the configurations of SNLI-VE, NLVR2 and text assignment."""

    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of the target spread evenly over all classes"
    )

    # Names of the classes, in order.
    classes: ClassVar[tuple[str, ...]]

    @property
    def num_images(self) -> int:
        """Return the number of images that the model reads for a text, panels counted."""
        return 1


class SnliVeConfig(PairClassificationConfig):
    """SNLI-VE: an image and a hypothesis."""

    kind: Literal["snli_ve"] = Field("snli_ve", description="selects this class")

    classes: ClassVar = tuple(map(str, SNLI_VE_LABELS.labels))


class Nlvr2Config(PairClassificationConfig):
    """NLVR2: a statement about two images; NLVR v1: about one image of three panels."""

    kind: Literal["nlvr2"] = Field("nlvr2", description="selects this class")
    images: Literal[1, 2] = Field(2, description="images of a sample: 2 in NLVR2, 1 in NLVR v1")
    panels: int = Field(
        1, ge=1, le=16, description="panels of an image, from left to right, to read as images"
    )

    # As in NLVR2's submissions.
    classes: ClassVar = ("False", "True")

    @property
    def num_images(self) -> int:
        """Return the number of panels of all images."""
        return self.images * self.panels


class Nlvr2AssignmentConfig(PairClassificationConfig):
    """Text assignment, pretraining for NLVR2: which of two images is the caption's."""

    kind: Literal["nlvr2_assignment"] = Field("nlvr2_assignment", description="selects this class")

    # Position of the caption's image in the pair.
    classes: ClassVar = ("first", "second", "neither")

    @property
    def num_images(self) -> int:
        """Return 2, the number of images of a caption."""
        return 2


class PairClassification(Distilled):
    """Cross-entropy of one class per sample, mixed with a teacher's soft targets."""

    metric: ClassVar[str] = "accuracy"
    frozen_parts = SCORES
    config: PairClassificationConfig

    def __init__(
        self, config: PairClassificationConfig, parts: Loaded, precision: Precision = "float32"
    ) -> None:
        super().__init__(config, parts, precision)
        width = self.model.config.text.width
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, len(config.classes))
        )
        if config.num_images > 1:
            self.tags = nn.Parameter(torch.zeros(config.num_images, width))
            nn.init.normal_(self.tags, std=0.02)
            # The head of text assignment differs from NLVR2's, but its tags have the same meaning.
            pretrained = parts.heads.get("tags")
            if pretrained is not None and pretrained.shape == self.tags.shape:
                self.tags.data.copy_(pretrained)

    def dataset(self, folders: Sequence[str | Path], limit: int | None = None) -> PairDataset:
        """Return the dataset of shard folders' first `limit` samples."""
        items = Items(folders, limit=limit)
        if isinstance(self.config, Nlvr2AssignmentConfig):
            return AssignmentDataset(items, self.text, self.prepare)
        if isinstance(self.config, Nlvr2Config):
            images, panels = self.config.images, self.config.panels
            return PairDataset(items, NLVR2_LABELS, images, panels, self.text, self.prepare)
        return PairDataset(items, SNLI_VE_LABELS, 1, 1, self.text, self.prepare)

    def logits(self, batch: PairBatch) -> Tensor:
        """Compute (B, classes) logits, in autocast's dtype within autocast."""
        text = self.model.encode_text(batch.text_ids, batch.attention_mask, batch.word_mask)
        images = [self.model.encode_image(pixels) for pixels in batch.pixels.unbind(1)]
        features = (
            self.model.cross(images[0], text, need_image=False)
            if len(images) == 1
            else self.model.cross_multi_image(images, text, self.tags)
        )
        return self.head(features.text[:, 0])

    def forward(self, batch: PairBatch, step: int) -> StepOutput:
        """Compute the loss in nats per sample, and the accuracy."""
        with self.autocast(batch.pixels.device):
            logits = self.logits(batch)
            target = self.soft_target(step, logits.device, lambda task: task.logits(batch))
        (logits,) = full_precision(logits)
        nats = functional.cross_entropy(
            logits, batch.labels, reduction="none", label_smoothing=self.config.label_smoothing
        )
        if target is not None:
            probabilities, alpha = target
            soft = functional.cross_entropy(logits, probabilities, reduction="none")
            nats = (1 - alpha) * nats + alpha * soft
        losses = {"classes": Loss(torch.where(batch.valid, nats, 0).sum(), batch.valid.sum())}
        correct = (logits.argmax(-1) == batch.labels).float().mean()
        return self.step_output(losses, statistics={"accuracy": correct})

    @torch.no_grad()
    def predict(self, batch: PairBatch) -> list[str]:
        """Return the likeliest class of each sample."""
        logits = require_finite(self.logits(batch).float())
        return [self.config.classes[index] for index in logits.argmax(-1).tolist()]


def build(
    config: PairClassificationConfig, parts: Loaded, batch: int, seed: int, precision: Precision
) -> tuple[PairClassification, OrderedData]:
    """Build the task and its training data."""
    task = PairClassification(config, parts, precision)
    dataset = task.dataset(config.data.train, config.data.limit)
    return task, dataset.batches(config.data, batch, seed)


_CARDS: dict[type[PairClassificationConfig], TaskCard] = {
    SnliVeConfig: TaskCard(
        "visual entailment (a hypothesis about an image is true, false, or neither)"
    ),
    Nlvr2Config: TaskCard("statements about images, true or false", images=2),
    Nlvr2AssignmentConfig: TaskCard(
        "text assignment (which of two images a caption tells of)", images=2, official=False
    ),
}
for _config, _card in _CARDS.items():
    _kind = _config.model_fields["kind"].default
    register_task(DownstreamTask(_kind, _config, build, PairClassification.restore, _card))
