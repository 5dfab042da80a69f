"""Token objective of the contrastive anchor loss: words and phrases find their patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vlp.layers.scale import LearnedScale
from vlp.models.config import ModelConfig
from vlp.objectives.config import ContrastiveConfig, ObjectivesConfig
from vlp.objectives.token.phrase_term import phrase_loss
from vlp.objectives.token.token_term import token_losses
from vlp.tasks.pretraining.objective import TOKENS, Objective, Step, Term


class TokenTerms(Objective):
    """Train tokens inside sample groups, beside the contrastive objective and with its weight.

    Inputs: tokens of the unmasked batch. Losses: `token` (captions find images), `word` (single
    words find images), `phrase` (words follow a neighbour that points). Logs `token_scale`.
    """

    on_clean_pairs: ClassVar[bool] = True
    trains = TOKENS
    saves_modules: ClassVar[bool] = False
    in_chunks: ClassVar[bool] = True
    settings: ContrastiveConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.scale = LearnedScale(settings.token.scale)

    @classmethod
    def settings_of(cls, name: str, objectives: ObjectivesConfig) -> ContrastiveConfig | None:
        """Return the contrastive objective's settings where its form has token terms."""
        contrastive = objectives.contrastive
        return contrastive if contrastive and contrastive.has_token_term else None

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the learned scale tau."""
        return {"token_scale": self.scale}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the losses over rows (`token`) and words (the others)."""
        batch, token, weight = step.batch, self.settings.token, self.settings.weight
        captions, words = token_losses(
            step.image.tokens,
            step.text.tokens,
            batch.word_mask,
            batch.text_ids,
            batch.image_ids,
            batch.valid,
            self.scale(),
            token.alpha,
            token.beta,
            token.group,
        )
        terms = {
            "token": Term(captions, weight * token.weight),
            "word": Term(words, weight * token.words),
        }
        if token.phrases:
            phrases = phrase_loss(step.image.tokens, step.text.tokens, batch.word_mask, batch.valid)
            terms["phrase"] = Term(phrases, weight * token.phrases)
        if step.is_logged:
            step.statistics["token_scale"] = self.scale().detach()
        return terms
