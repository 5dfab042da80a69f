"""Statistics of a step that are logged and change no loss."""

from __future__ import annotations

import torch
from torch import Tensor

from vlp.data.text.word_boxes import OTHER, OWN
from vlp.distributed import global_sum
from vlp.objectives.monitors import anchor_statistics, feature_spread, token_cosine
from vlp.positions.anchor_field import AnchorField
from vlp.tasks.pretraining.registry import Step


def anchor_shares(step: Step, anchors: AnchorField) -> dict[str, Tensor]:
    """Measure how selective anchors are, as means and by channel group, and the threshold."""
    threshold = step.model.anchor_threshold
    shares = anchor_statistics(
        anchors.similarity,
        threshold.clamp(min=1e-3),
        anchors.path[:, 1:],
        anchors.reachable,
        step.batch.word_mask,
        step.batch.valid,
    )
    statistics = {}
    for name, groups in zip(shares._fields, shares):
        statistics[f"anchor_{name}"] = groups.mean()
        statistics |= {f"anchor_{name}/{g}": groups[g] for g in range(len(groups))}
    return statistics | {"anchor_threshold": threshold.clone()}


def collapse(step: Step) -> dict[str, Tensor]:
    """Measure how alike tokens and features are, and the temperature."""
    image, text, valid = step.image, step.text, step.batch.valid
    return {
        "image_token_cosine": token_cosine(image.tokens, valid=valid),
        "text_token_cosine": token_cosine(text.tokens, step.batch.word_mask, valid),
        "image_spread": feature_spread(image.feature, valid),
        "text_spread": feature_spread(text.feature, valid),
        "temperature": step.model.temperature().detach(),
    }


@torch.no_grad()
def word_cosines(step: Step) -> dict[str, Tensor]:
    """Measure a word's cosine with patches of its own object and of others (scenes only)."""
    patches = step.batch.word_patches
    if patches is None:
        return {}
    with torch.autocast(patches.device.type, enabled=False):
        cosine = step.text.tokens @ step.image.tokens.transpose(1, 2)  # (B, N, M)
    shown = torch.stack([patches == which for which in (OWN, OTHER)])
    sums = global_sum((cosine * shown).sum((1, 2, 3)))
    counts = global_sum(shown.sum((1, 2, 3)))
    own, other = sums / counts.clamp(min=1)
    return {"word_own_box": own, "word_other_box": other}
