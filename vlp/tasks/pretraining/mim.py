"""Masked image modelling objective (MIM), as in SimMIM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from vlp.models.config import ModelConfig
from vlp.objectives.config import MIMConfig, ObjectivesConfig
from vlp.objectives.mim import MIMHead, mim_loss
from vlp.tasks.pretraining.objective import Objective, Step, Term


class MaskedImageModelling(Objective):
    """Predict the pixels of masked patches.

    Inputs: pixels and patch mask; with output `cross` also the unmasked text, which the masked
    image then meets in the cross-modal encoder. Loss: `mim`.
    """

    in_chunks: ClassVar[bool] = True
    settings: MIMConfig

    def __init__(self, settings: Any, objectives: ObjectivesConfig, model: ModelConfig) -> None:
        super().__init__(settings, objectives, model)
        self.head = MIMHead(model.text.width, model.image.patch_size)
        self.trains = frozenset({"cross_encoder"} if settings.output == "cross" else ())

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the prediction head with the mask token."""
        return {"mim_head": self.head}

    def __call__(self, step: Step) -> dict[str, Term]:
        """Compute the loss over masked patches."""
        model, batch = step.model, step.batch

        def mask(patches: Tensor) -> Tensor:
            return self.head.mask_token(patches, batch.mim_mask)

        if self.settings.output == "image":
            states = model.image_encoder.on_grid(model.image_encoder(batch.pixels, mask))
        else:
            crossed = model.cross(model.encode_image(batch.pixels, mask), step.text)
            assert crossed.image is not None
            states = crossed.image
        loss = mim_loss(self.head(states[:, 1:]), batch.pixels, batch.mim_mask, batch.valid)
        return {"mim": Term(loss, self.settings.weight)}
