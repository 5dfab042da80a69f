"""Pair classification of a text and one or two images: SNLI-VE and NLVR2.

The text stream's [CLS] goes through a two-layer perceptron (ACE-RPE, section 4.2, after UNITER).
Two images are read in one pass, each with a learned tag on its tokens and ACE-RPE within each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from vlp.precision import full_precision
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
    """Base of the configurations of this module's kinds."""

    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of the target spread evenly over all classes"
    )

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes, in order."""
        raise NotImplementedError

    @property
    def shown(self) -> int:
        """Return the number of images that are read for a sample."""
        raise NotImplementedError


class SnliVeConfig(PairClassificationConfig):
    """SNLI-VE: an image and a hypothesis."""

    kind: Literal["snli_ve"] = Field("snli_ve", description="selects this class")

    @property
    def classes(self) -> tuple[str, ...]:
        """Return SNLI's names."""
        return tuple(str(name) for name in SNLI_VE_LABELS.labels)

    @property
    def shown(self) -> int:
        """Return 1."""
        return 1


class Nlvr2Config(PairClassificationConfig):
    """NLVR2: a statement about two images, or NLVR v1's about one that shows three boxes."""

    kind: Literal["nlvr2"] = Field("nlvr2", description="selects this class")
    images: Literal[1, 2] = Field(2, description="images of a sample: 2 of NLVR2, 1 of NLVR v1")
    panels: int = Field(
        1,
        ge=1,
        le=16,
        description="number of parts of one width, from left to right, that an image is cut into; "
        "each is read as an image of its own, with its own tag",
    )

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names that NLVR2's submissions use."""
        return "False", "True"

    @property
    def shown(self) -> int:
        """Return the number of panels of all images."""
        return self.images * self.panels


class Nlvr2AssignmentConfig(PairClassificationConfig):
    """Text assignment, which prepares for NLVR2: the image of a caption among two."""

    kind: Literal["nlvr2_assignment"] = Field("nlvr2_assignment", description="selects this class")

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the images that a caption may belong to."""
        return "first", "second", "neither"

    @property
    def shown(self) -> int:
        """Return 2."""
        return 2


class PairClassification(Distilled):
    """Cross-entropy of one class a sample, and to a teacher's classes where there is one."""

    metric: ClassVar[str] = "accuracy"
    untrained = SCORES
    config: PairClassificationConfig

    def __init__(
        self, config: PairClassificationConfig, parts: Loaded, precision: Precision = "float32"
    ) -> None:
        super().__init__(config, parts, precision)
        width = self.model.config.text.width
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, len(config.classes))
        )
        if config.shown > 1:
            self.tags = nn.Parameter(torch.zeros(config.shown, width))
            nn.init.normal_(self.tags, std=0.02)
            take_tags(self.tags, parts.heads)

    def dataset(self, folders: Sequence[str | Path], limit: int | None = None) -> PairDataset:
        """Return the samples of shard folders."""
        items = Items(folders, limit=limit)
        if isinstance(self.config, Nlvr2AssignmentConfig):
            return AssignmentDataset(items, self.text, self.prepare)
        if isinstance(self.config, Nlvr2Config):
            shown = self.config.images, self.config.panels
            return PairDataset(items, NLVR2_LABELS, *shown, self.text, self.prepare)
        return PairDataset(items, SNLI_VE_LABELS, 1, 1, self.text, self.prepare)

    def logits(self, batch: PairBatch) -> Tensor:
        """Compute (B, classes) logits in the compute type."""
        text = self.model.encode_text(batch.text_ids, batch.attention_mask, batch.word_mask)
        images = [self.model.encode_image(pixels) for pixels in batch.pixels.unbind(1)]
        features = (
            self.model.cross(images[0], text, need_image=False)
            if len(images) == 1
            else self.model.cross_multi_image(images, text, self.tags)
        )
        logits: Tensor = self.head(features.text[:, 0])
        return logits

    def forward(self, batch: PairBatch, step: int) -> StepOutput:
        """Compute the loss and the accuracy."""
        with self.autocast(batch.pixels.device):
            logits = self.logits(batch)
            target = self.soft_target(step, logits.device, lambda task: task.logits(batch))
        (logits,) = full_precision(logits)
        nats = functional.cross_entropy(
            logits, batch.labels, reduction="none", label_smoothing=self.config.label_smoothing
        )
        if target is not None:
            soft = functional.cross_entropy(logits, target.soft, reduction="none")
            nats = (1 - target.alpha) * nats + target.alpha * soft
        losses = {"classes": Loss(torch.where(batch.valid, nats, 0).sum(), batch.valid.sum())}
        correct = (logits.argmax(-1) == batch.labels).float().mean()
        return self.step_output(losses, statistics={"accuracy": correct})

    @torch.no_grad()
    def predict(self, batch: PairBatch) -> list[str]:
        """Return the name of the likeliest class of each sample."""
        classes = self.config.classes
        return [classes[best] for best in self.logits(batch).float().argmax(-1).tolist()]


@torch.no_grad()
def take_tags(tags: nn.Parameter, heads: Mapping[str, Tensor]) -> None:
    """Copy the tags (images, width) of a model that was trained on image pairs before."""
    pretrained = heads.get("tags")
    if pretrained is not None and pretrained.shape == tags.shape:
        tags.copy_(pretrained)


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
