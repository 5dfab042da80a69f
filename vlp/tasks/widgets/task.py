"""Widget captioning: cross-entropy of captions, and the regulariser of Fourier features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from vlp.config import Config
from vlp.data.stream.loader import OrderedData, indexed_data
from vlp.objectives.loss import Loss
from vlp.objectives.mlm import mlm_loss
from vlp.positions.fourier import FourierPosition
from vlp.tasks.task import Precision, StepOutput
from vlp.tasks.vision_only import VisionTask
from vlp.tasks.widgets.data import (
    Collate,
    WidgetBatch,
    WidgetDataConfig,
    WidgetSamples,
    WidgetText,
    open_screens,
    read_tokenizer,
    widget_text,
)
from vlp.tasks.widgets.model import WidgetCaptioner, WidgetModelConfig


class WidgetsConfig(Config):
    """Model, screens, generation and scoring of captions."""

    kind: Literal["widgets"] = Field("widgets", description="selects this class")
    model: WidgetModelConfig = Field(
        WidgetModelConfig(), description="sizes and encodings of boxes"
    )
    data: WidgetDataConfig = Field(WidgetDataConfig(), description="screens and their captions")
    # The paper does not give its value (papers.md#fourier-f10).
    regulariser: float = Field(
        0.0, ge=0, description="lambda of Eq. 11, for Fourier encodings with `regularised`"
    )
    beams: int = Field(1, ge=1, description="number of beams; the public code has 4")
    java: bool = Field(
        True, description="evaluate with the PTB tokeniser and METEOR, which need Java"
    )


class Widgets(VisionTask):
    """Next-token cross-entropy of widgets' captions."""

    config_class = WidgetsConfig

    def __init__(
        self, config: WidgetsConfig, text: WidgetText, precision: Precision = "float32"
    ) -> None:
        super().__init__(config, precision)
        self.text = text
        self.model = WidgetCaptioner(
            config.model, text.vocab_size, text.special_ids, text.pad_id, text.cls_id, text.sep_id
        )

    def forward(self, batch: WidgetBatch, step: int) -> StepOutput:
        """Compute the loss in nats per word piece, and the token accuracy."""
        with self.autocast(batch.boxes.device):
            logits = self.model(batch)
        labels = batch.captions[:, 1:]
        mask = labels != self.text.pad_id
        # Padding-only rows stay in the batch so that all ranks run the same shapes.
        words = mlm_loss(logits.flatten(0, 1), labels.masked_fill(~mask, -100).flatten())
        losses = {"words": words}
        if self.config.regulariser:
            losses["regulariser"] = self._regulariser(words.total)
        statistics = {}
        if bool(mask.any()):
            correct = (logits.argmax(-1) == labels)[mask]
            statistics["accuracy"] = correct.float().mean()
        return self.step_output(losses, {"regulariser": self.config.regulariser}, statistics)

    def metadata(self) -> dict[str, Any]:
        """Return the tokenizer as JSON."""
        return {"tokenizer": self.text.to_json()}

    @classmethod
    def restore(cls, config: WidgetsConfig, metadata: Mapping[str, Any]) -> Self:
        """Create the task of a model folder with initial weights."""
        data, tokenizer = config.data, read_tokenizer(metadata["tokenizer"])
        return cls(config, WidgetText(tokenizer, data.max_words, data.max_caption))

    def _regulariser(self, total: Tensor) -> Loss:
        """Sum the KL terms of regularised encodings (Eq. 10), on the device of a loss `total`."""
        terms = [
            encoding("regulariser")
            for encoding in self.model.modules()
            if isinstance(encoding, FourierPosition) and encoding.log_variance is not None
        ]
        kl = torch.stack(terms).sum() if terms else total.new_zeros(())
        return Loss(kl, torch.ones((), dtype=torch.int64, device=total.device))


def build(
    config: WidgetsConfig, batch: int, seed: int, precision: Precision
) -> tuple[Widgets, OrderedData]:
    """Build the task and its training data."""
    data = config.data
    screens = open_screens(data.screens, "train")
    open_screens(data.screens, "test")  # so that its errors come before training
    text = widget_text(
        screens, data.vocabulary, data.vocabulary_size, data.max_words, data.max_caption
    )
    samples = WidgetSamples(screens, text, data)
    task = Widgets(config, text, precision)
    return task, indexed_data(len(screens), samples, Collate(text), data, batch, seed)
