"""Image-text matching objective (ITM) with hard negatives."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import PairIndices
from vlp.objectives.config import ITMConfig, ObjectivesConfig
from vlp.objectives.itm import hard_negatives, itm_loss, listwise_itm_loss
from vlp.tasks.pretraining.contrastive import pair_temperature
from vlp.tasks.pretraining.objective import TOKENS, Objective, Step, Term


class ImageTextMatching(Objective):
    """Tell matching pairs from each image with a wrong text and each text with a wrong image.

    Inputs: both encoders' outputs on the unmasked batch; `uniform` draws the negatives. Loss:
    `itm`, of pairs or of lists. Logs `itm_accuracy`. Leaves the anchor paths of the matching pairs
    in `step.anchors`.
    """

    on_clean_pairs: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True
    settings: ITMConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        tokens = TOKENS if model.cross.token_score else frozenset()
        self.trains = tokens | {"cross_encoder", "match_head"}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over matching pairs and those negatives that were found."""
        batch, image, text = step.batch, step.image, step.text
        with torch.no_grad(), torch.autocast(batch.pixels.device.type, enabled=False):
            temperature = pair_temperature(step.model, self.objectives)
            similarity = image.feature @ text.feature.T / temperature
        settings = self.settings
        negatives = hard_negatives(
            similarity,
            batch.image_ids,
            batch.valid,
            batch.uniform,
            settings.group,
            settings.negatives,
        )
        rows = torch.arange(len(batch.valid), device=batch.valid.device)
        own = rows.repeat_interleave(settings.negatives)
        pairs = PairIndices(
            texts=torch.cat([rows, negatives.text_for_image, own]),
            images=torch.cat([rows, own, negatives.image_for_text]),
        )
        keys, wanted = step.keys(), None
        if keys is not None and step.model.config.cross.pooling == "cls":
            wanted = torch.zeros_like(pairs.texts)[:, None]
        crossed = step.model.cross(image, text, pairs, need_image=False, keys=keys, wanted=wanted)
        logits = step.model.match_logits(crossed)
        if crossed.anchors is not None:
            step.anchors = crossed.anchors.each(lambda part: part[: len(rows)].detach())
        if settings.form == "pairs":
            wrong_labels = torch.zeros_like(own)
            labels = torch.cat([torch.ones_like(rows), wrong_labels, wrong_labels])
            counted = torch.cat([batch.valid, negatives.has_text, negatives.has_image])
            right = (logits.detach().argmax(-1) == labels) & counted
            step.statistics["itm_accuracy"] = right.sum() / counted.sum().clamp(min=1)
            return {"itm": Term(itm_loss(logits, labels, counted), settings.weight)}
        # Two lists a row: its image with wrong texts, its text with wrong images.
        odds = (logits[:, 1] - logits[:, 0]).split([len(rows), 2 * len(own)])
        matched, wrong = odds[0].repeat(2), odds[1].unflatten(0, (-1, settings.negatives))
        has = torch.cat([negatives.has_text, negatives.has_image])[:: settings.negatives]
        has = has & batch.valid.repeat(2)
        won = (matched > wrong.amax(1)).detach() & has
        step.statistics["itm_accuracy"] = won.sum() / has.sum().clamp(min=1)
        return {"itm": Term(listwise_itm_loss(matched, wrong, has), settings.weight)}
