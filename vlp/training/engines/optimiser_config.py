"""How a training updates its weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vlp.config import Config

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimiserConfig(Config):
    """AdamW with a cosine schedule; steps are optimiser steps."""

    learning_rate: float = Field(1e-4, gt=0, description="peak, at the end of the warm-up")
    final_learning_rate: float = Field(1e-6, ge=0, description="at the end of the cosine schedule")
    warmup_steps: int = Field(1000, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(
        0.02, ge=0, description="decoupled weight decay of AdamW; biases and norms are exempt"
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), description="decay rates of AdamW's first and second moments"
    )
    epsilon: float = Field(1e-8, gt=0, description="added to AdamW's denominator")
    clip: float | None = Field(1.0, gt=0, description="global gradient norm; null is no clipping")
    lr_multipliers: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="learning-rate factors by parameter prefix, as `model.text_encoder: 0.1`; "
        "the longest that fits counts",
    )
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="factor of the learning rate from each block of the text and the image encoder "
        "to the one below; the last block has it once, embeddings most often",
    )
