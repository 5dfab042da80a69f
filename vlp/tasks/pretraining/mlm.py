"""Masked language modelling objective (MLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlp.compute.gpu_form import on_gpu
from vlp.models.config import ModelConfig
from vlp.models.features import ImageFeatures
from vlp.models.towers.text import word_width
from vlp.models.vlp import VLPModel
from vlp.objectives.config import MLMConfig, ObjectivesConfig
from vlp.objectives.mlm import MLMHead, masked_columns, masked_positions, mlm_loss, prediction_slots
from vlp.tasks.pretraining.objective import Objective, Step, Term


class MaskedLanguageModelling(Objective):
    """Predict masked tokens from the rest of the text and the unmasked image.

    Inputs: the masked text with its labels, the image encoder's output; with a teacher, its
    predictions of the same tokens as soft targets. Loss: `mlm`.
    """

    taught: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True
    trains = frozenset({"cross_encoder"})
    settings: MLMConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.head = MLMHead(
            model.text.width, model.text.vocab_size, table_width=word_width(model.text)
        )

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the prediction head."""
        return {"mlm_head": self.head}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over masked tokens."""
        soft, alpha, teacher = None, 0.0, step.teacher
        if teacher and teacher.alpha > 0:
            alpha = teacher.alpha
            with torch.no_grad():
                head = teacher.modules["mlm_head"]
                logits, _ = self._predict(teacher.model, head, teacher.image, step)
                soft = logits.float().softmax(-1)
        logits, labels = self._predict(step.model, self.head, step.image, step)
        return {"mlm": Term(mlm_loss(logits, labels, soft, alpha), self.settings.weight)}

    def _predict(
        self, model: VLPModel, head: nn.Module, image: ImageFeatures, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Return logits (R, vocabulary) and labels (R,) of the R masked tokens.

        On a GPU, which would have to be asked for their number, R is a number of slots.
        """
        batch = step.batch
        masked = model.encode_text(batch.mlm_ids, batch.attention_mask, batch.word_mask)
        labels, slots, keys, wanted = batch.mlm_labels, None, None, None
        if on_gpu(labels):
            slots = prediction_slots(labels.numel(), self.settings.probability)
        elif step.shares:
            keys = step.keys() if model is step.model else None
            wanted, labels = masked_columns(labels)
        crossed = model.cross(image, masked, need_image=False, keys=keys, wanted=wanted)
        states, labels = masked_positions(crossed.text, labels, batch.valid, slots)
        return head(states, model.text_encoder.word_table), labels
