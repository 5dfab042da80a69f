"""Configuration of the objectives and their weights; the defaults are the design's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, create_model, model_validator

from vlp.config import Config


class TokenTermConfig(Config):
    """Token term of the contrastive anchor loss, within groups of samples."""

    weight: float = Field(0.5, ge=0, description="weight of the loss of whole captions")
    words: float = Field(0.5, ge=0, description="weight of the loss of single words")
    phrases: float = Field(1.0, ge=0, description="weight of the phrase loss between near words")
    group: int = Field(
        16, ge=2, description="samples of the global batch in a group, which one rank holds"
    )


class ContrastiveConfig(Config):
    """Contrastive objective: ITC, SigLIP's loss, or the anchor loss."""

    kind: Literal["itc", "sigmoid", "anchor", "paper"] = Field(
        "anchor",
        description="itc: symmetric InfoNCE over pairs; sigmoid: SigLIP's loss of single pairs, "
        "whose memory does not grow with ranks; anchor: the anchor loss as pair and token terms "
        "with learned temperatures; paper: the anchor loss as printed (Eqs 1-2), without "
        "temperatures",
    )
    weight: float = Field(1.0, ge=0, description="weight in the sum of losses")
    scale: float = Field(
        2.0,
        gt=0,
        description="kind paper: lambda of Eqs 1-2, and the inverse temperature by which negatives "
        "of image-text matching are drawn; no effect on other kinds",
    )
    token: TokenTermConfig = Field(TokenTermConfig(), description="token term (kind anchor)")


class ITMConfig(Config):
    """Image-text matching with hard negatives drawn inside `group` samples of the global batch."""

    weight: float = Field(1.0, ge=0, description="weight in the sum of losses")
    listwise: int | None = Field(
        None,
        ge=1,
        description="number of negatives of a matching pair in a softmax over their log-odds, as "
        "re-ranking needs; log-odds are then comparable only among the candidates of a query. "
        "null: binary classification with one negative text and one negative image per row, as in "
        "ALBEF",
    )
    group: int = Field(
        64,
        ge=2,
        description="samples of the global batch in a group, which one rank holds; hard negatives "
        "come from the same group",
    )


class MLMConfig(Config):
    """Masked language modelling."""

    probability: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="probability that a word piece is predicted; special tokens never are",
    )


class MIMConfig(Config):
    """Masked image modelling: l1 on raw pixels of masked patches (SimMIM)."""

    output: Literal["image", "cross"] = Field(
        "image",
        description="states that predict pixels: the output of the image encoder, or of the "
        "cross-modal encoder with the unmasked text (layout `ace`; papers.md#ace-a30)",
    )


class MomentumConfig(Config):
    """Momentum teacher: a moving average of the student that predicts soft targets."""

    momentum: float = Field(
        0.995,
        gt=0,
        lt=1,
        description="momentum of the moving average of weights, at each optimiser step",
    )


class TeacherConfig(MomentumConfig):
    """Momentum teacher with its queue; soft targets for the pair term and MLM."""

    queue: int = Field(65536, ge=0, description="number of keys in the queue; 0: no queue")
    warmup_steps: int = Field(
        1000, ge=0, description="the share of soft targets rises linearly to 0.4 over these steps"
    )


_registered_settings: dict[str, type[Config]] = {}


def register_settings(name: str, settings: type[Config]) -> None:
    """Add a key `name` to `ObjectivesConfig` for the settings of a new objective.

    Raises:
        ValueError: the key exists.
    """
    if name in _registered_settings or name in ObjectivesConfig.model_fields:
        raise ValueError(f"objectives.{name} is a key already")
    _registered_settings[name] = settings


class ObjectivesConfig(Config):
    """All objectives; `null` removes an objective and its forward pass."""

    model_config = ConfigDict(extra="allow")

    contrastive: ContrastiveConfig | None = Field(
        ContrastiveConfig(), description="contrastive objective; null: none"
    )
    itm: ITMConfig | None = Field(ITMConfig(), description="image-text matching; null: none")
    mlm: MLMConfig | None = Field(MLMConfig(), description="masked language modelling; null: none")
    mim: MIMConfig | None = Field(MIMConfig(), description="masked image modelling; null: none")
    teacher: TeacherConfig | None = Field(
        TeacherConfig(), description="momentum teacher; null: no soft targets and no queue"
    )

    @model_validator(mode="before")
    @classmethod
    def _validate_registered(cls, values: Any) -> Any:
        """Validate the settings of registered objectives, and refuse unknown keys."""
        if not isinstance(values, Mapping):
            return values
        optional_fields: dict[str, Any] = {
            name: (settings | None, None) for name, settings in _registered_settings.items()
        }
        model = create_model("RegisteredObjectives", __base__=Config, **optional_fields)
        field_values = {name: value for name, value in values.items() if name in cls.model_fields}
        extra_values = {name: value for name, value in values.items() if name not in field_values}
        extra = model.model_validate(extra_values)
        return field_values | {name: getattr(extra, name) for name in extra_values}

    @model_validator(mode="after")
    def _require_consistent(self) -> ObjectivesConfig:
        extra = self.model_extra or {}
        if not (self.contrastive or self.itm or self.mlm or self.mim or any(extra.values())):
            raise ValueError("contrastive, itm, mlm and mim are all null: nothing is trained")
        if self.teacher and self.contrastive and self.contrastive.kind == "sigmoid":
            raise ValueError(
                "contrastive.kind sigmoid has no soft targets and no queue of a teacher; set "
                "objectives.teacher=null or contrastive.kind=itc"
            )
        return self
