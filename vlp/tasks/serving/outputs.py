"""Named outputs of `VlpModel` and `VlpForQuestionAnswering`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class VlpOutput(ModelOutput):
    """What was asked for, of I images and T texts; the rest is None.

    Attributes:
        loss: contrastive cross-entropy, the mean of both directions, with `return_loss=True`.
        logits_per_image: (I, T) cosines over the learned temperature; softmax over texts.
        logits_per_text: (T, I), the same for each text.
        text_embeds: (T, d) of unit length.
        image_embeds: (I, d) of unit length.
        itm_logits: (B, 2), not matched and matched, of the B pairs, with `match=True`.
        similarity: (B, M, N, G) cosines of patches and tokens by channel group (Eq. 3), with
            `output_anchors=True`, of a model that has ACE-RPE.
        anchors: (B, M, N, G) bool, where a patch is an anchor of a word.
        path: (B, M, N, G) anchor paths (Eq. 7), 0 where there is none.
    """

    loss: Tensor | None = None
    logits_per_image: Tensor | None = None
    logits_per_text: Tensor | None = None
    text_embeds: Tensor | None = None
    image_embeds: Tensor | None = None
    itm_logits: Tensor | None = None
    similarity: Tensor | None = None
    anchors: Tensor | None = None
    path: Tensor | None = None


@dataclass
class VlpAnswers(ModelOutput):
    """Scores of the listed answers.

    Attributes:
        logits: (B, answers); its sigmoid is the likelihood of an answer.
    """

    logits: Tensor | None = None
