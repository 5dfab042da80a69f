"""What a text is to one or two images: SNLI-VE (three classes) and NLVR2 (true or false).

The joint representation, the text stream's [CLS], goes through a two-layer perceptron (ACE-RPE,
section 4.2, after UNITER). Two images are read in one pass, each with a tag of its own added to
its tokens and ACE-RPE within each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vlp.data.downstream.items import Items
from vlp.data.downstream.nlvr2_assignment import AssignmentSet
from vlp.data.downstream.pair_classification import HYPOTHESES, STATEMENTS, PairBatch, PairDataset
from vlp.data.pretrain.loader import OrderedData
from vlp.models.folder import Loaded
from vlp.objectives.loss import Loss
from vlp.objectives.precision import full_precision
from vlp.tasks.downstream.task import Downstream, DownstreamConfig, read_config
from vlp.tasks.plain import Precision
from vlp.tasks.task import StepOutput


class PairClassificationConfig(DownstreamConfig):
    """Of every kind in this module."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names in order."""
        raise NotImplementedError

    @property
    def shown(self) -> int:
        """Images that are read for a sample."""
        raise NotImplementedError


class SnliVeConfig(PairClassificationConfig):
    """SNLI-VE: an image and a hypothesis."""

    kind: Literal["snli_ve"] = "snli_ve"

    @property
    def classes(self) -> tuple[str, ...]:
        """SNLI's names."""
        return tuple(str(name) for name in HYPOTHESES.labels)

    @property
    def shown(self) -> int:
        """One image."""
        return 1


class Nlvr2Config(PairClassificationConfig):
    """NLVR2: a statement about two images, or NLVR v1's about one that shows three boxes."""

    kind: Literal["nlvr2"] = "nlvr2"
    images: Literal[1, 2] = 2
    panels: int = Field(
        1,
        ge=1,
        le=16,
        description="each image is cut into so many parts of one width, from left to right, and "
        "each is read as a picture of its own, with its own tag",
    )

    @property
    def classes(self) -> tuple[str, ...]:
        """As NLVR2's submissions write them."""
        return "False", "True"

    @property
    def shown(self) -> int:
        """As configured."""
        return self.images * self.panels


class Nlvr2AssignmentConfig(PairClassificationConfig):
    """Text assignment, which prepares for NLVR2: which of two images a caption tells of."""

    kind: Literal["nlvr2_assignment"] = "nlvr2_assignment"

    @property
    def classes(self) -> tuple[str, ...]:
        """Where the caption belongs."""
        return "first", "second", "neither"

    @property
    def shown(self) -> int:
        """Two images."""
        return 2


class PairClassification(Downstream):
    """Cross-entropy of one class a sample."""

    metric: ClassVar[str] = "accuracy"
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

    def claims(self, folders: Sequence[str | Path], limit: int | None = None) -> PairDataset:
        """The samples of shard folders as this task reads them.

        Raises:
            ConfigError: a folder cannot be read.
        """
        items = Items(folders, limit=limit)
        if isinstance(self.config, Nlvr2AssignmentConfig):
            return AssignmentSet(items, self.text, self.prepare)
        if isinstance(self.config, Nlvr2Config):
            shown = self.config.images, self.config.panels
            return PairDataset(items, STATEMENTS, *shown, self.text, self.prepare)
        return PairDataset(items, HYPOTHESES, 1, 1, self.text, self.prepare)

    def logits(self, batch: PairBatch) -> Tensor:
        """(B, classes), in the compute type."""
        text = self.model.encode_text(batch.text_ids, batch.attention_mask, batch.word_mask)
        images = [self.model.encode_image(pixels) for pixels in batch.pixels.unbind(1)]
        crossed = (
            self.model.cross(images[0], text, need_image=False)
            if len(images) == 1
            else self.model.cross_several(images, text, self.tags)
        )
        logits: Tensor = self.head(crossed.text[:, 0])
        return logits

    def forward(self, batch: PairBatch, step: int) -> StepOutput:
        """Loss, and the share of right answers."""
        with self.autocast(batch.pixels.device):
            logits = self.logits(batch)
        (logits,) = full_precision(logits)
        each = functional.cross_entropy(
            logits, batch.labels, reduction="none", label_smoothing=self.config.label_smoothing
        )
        losses = {"classes": Loss(torch.where(batch.valid, each, 0).sum(), batch.valid.sum())}
        right = (logits.argmax(-1) == batch.labels).float().mean()
        return self.step_output(losses, statistics={"accuracy": right})


@torch.no_grad()
def take_tags(tags: nn.Parameter, heads: Mapping[str, Tensor]) -> None:
    """Start from the tags of a folder that was trained on pairs of images before."""
    found = heads.get("tags")
    if found is not None and found.shape == tags.shape:
        tags.copy_(found)


def build(
    config: PairClassificationConfig, parts: Loaded, batch: int, seed: int, precision: Precision
) -> tuple[PairClassification, OrderedData]:
    """The task and its training data.

    Raises:
        ConfigError: shards and batch cannot be used.
    """
    task = PairClassification(config, parts, precision)
    claims = task.claims(config.data.train, config.data.limit)
    return task, claims.batches(config.data, batch, seed)


def load(config: dict[str, Any], known: Mapping[str, Any], parts: Loaded) -> PairClassification:
    """The task that a model folder describes, with a fresh head."""
    kinds: dict[str, type[PairClassificationConfig]] = {
        "snli_ve": SnliVeConfig,
        "nlvr2": Nlvr2Config,
        "nlvr2_assignment": Nlvr2AssignmentConfig,
    }
    return PairClassification(read_config(config, kinds[config["kind"]], parts), parts)
