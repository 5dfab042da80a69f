"""What a text is to one or two pictures: SNLI-VE (three classes) and NLVR2 (true or false).

The joint representation, the text stream's [CLS], goes through a two-layer perceptron (ACE-RPE,
section 4.2, after UNITER). Two pictures are read in one pass, each with a tag of its own added to
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
from vlp.data.downstream.pair_classification import HYPOTHESES, STATEMENTS, ClaimBatch, ClaimSet
from vlp.data.pretrain.loader import OrderedData
from vlp.models.folder import Loaded
from vlp.objectives.loss import Loss
from vlp.objectives.precision import full_precision
from vlp.tasks.downstream.task import Downstream, DownstreamConfig, read_config
from vlp.tasks.plain import Precision
from vlp.tasks.task import StepOutput


class ClaimsConfig(DownstreamConfig):
    """Of every kind in this module."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names in order."""
        raise NotImplementedError

    @property
    def shown(self) -> int:
        """Pictures that are read for a sample."""
        raise NotImplementedError


class EntailmentConfig(ClaimsConfig):
    """SNLI-VE: a picture and a hypothesis."""

    kind: Literal["entailment"] = "entailment"

    @property
    def classes(self) -> tuple[str, ...]:
        """SNLI's names."""
        return tuple(str(name) for name in HYPOTHESES.labels)

    @property
    def shown(self) -> int:
        """One picture."""
        return 1


class StatementsConfig(ClaimsConfig):
    """NLVR2: a statement about two pictures, or NLVR v1's about one that shows three boxes."""

    kind: Literal["statements"] = "statements"
    pictures: Literal[1, 2] = 2
    panels: int = Field(
        1,
        ge=1,
        le=16,
        description="each picture is cut into so many parts of one width, from left to right, and "
        "each is read as a picture of its own, with its own tag",
    )

    @property
    def classes(self) -> tuple[str, ...]:
        """As NLVR2's submissions write them."""
        return "False", "True"

    @property
    def shown(self) -> int:
        """As configured."""
        return self.pictures * self.panels


class AssignmentConfig(ClaimsConfig):
    """Text assignment, which prepares for NLVR2: which of two pictures a caption tells of."""

    kind: Literal["assignment"] = "assignment"

    @property
    def classes(self) -> tuple[str, ...]:
        """Where the caption belongs."""
        return "first", "second", "neither"

    @property
    def shown(self) -> int:
        """Two pictures."""
        return 2


class Claims(Downstream):
    """Cross-entropy of one class a sample."""

    metric: ClassVar[str] = "accuracy"
    config: ClaimsConfig

    def __init__(
        self, config: ClaimsConfig, parts: Loaded, precision: Precision = "float32"
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

    def claims(self, folders: Sequence[str | Path], limit: int | None = None) -> ClaimSet:
        """The samples of shard folders as this task reads them.

        Raises:
            ConfigError: a folder cannot be read.
        """
        items = Items(folders, limit=limit)
        if isinstance(self.config, AssignmentConfig):
            return AssignmentSet(items, self.text, self.prepare)
        if isinstance(self.config, StatementsConfig):
            shown = self.config.pictures, self.config.panels
            return ClaimSet(items, STATEMENTS, *shown, self.text, self.prepare)
        return ClaimSet(items, HYPOTHESES, 1, 1, self.text, self.prepare)

    def logits(self, batch: ClaimBatch) -> Tensor:
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

    def forward(self, batch: ClaimBatch, step: int) -> StepOutput:
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
    """Start from the tags of a folder that was trained on pairs of pictures before."""
    found = heads.get("tags")
    if found is not None and found.shape == tags.shape:
        tags.copy_(found)


def build(
    config: ClaimsConfig, parts: Loaded, batch: int, seed: int, precision: Precision
) -> tuple[Claims, OrderedData]:
    """The task and its training data.

    Raises:
        ConfigError: shards and batch cannot be used.
    """
    task = Claims(config, parts, precision)
    claims = task.claims(config.data.train, config.data.limit)
    return task, claims.batches(config.data, batch, seed)


def load(config: dict[str, Any], known: Mapping[str, Any], parts: Loaded) -> Claims:
    """The task that a model folder describes, with a fresh head."""
    kinds: dict[str, type[ClaimsConfig]] = {
        "entailment": EntailmentConfig,
        "statements": StatementsConfig,
        "assignment": AssignmentConfig,
    }
    return Claims(read_config(config, kinds[config["kind"]], parts), parts)
