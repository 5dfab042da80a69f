"""Configuration of the objectives and their weights; the defaults are the design's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, create_model, model_validator

from vlp.config import Config


class TokenTermConfig(Config):
    """Token term of the contrastive anchor loss."""

    weight: float = Field(0.5, ge=0, description="of captions that find their images")
    words: float = Field(0.5, ge=0, description="weight of single words that find images")
    phrases: float = Field(1.0, ge=0, description="of words that follow a neighbour that points")
    group: int = Field(16, ge=2, description="samples of the global batch; one rank holds a group")


class ContrastiveConfig(Config):
    """`itc`, `sigmoid`, or the anchor loss: `anchor`, or `paper` as Eqs 1-2 print it."""

    kind: Literal["itc", "sigmoid", "anchor", "paper"] = Field(
        "anchor",
        description="itc: symmetric InfoNCE over pairs; sigmoid: SigLIP's loss of single pairs, "
        "whose memory does not grow with ranks; anchor: the anchor loss as pair and token terms "
        "with temperature; paper: as printed, Eqs 1-2",
    )
    weight: float = Field(1.0, ge=0, description="weight in the sum of losses")
    scale: float = Field(2.0, gt=0, description="lambda of Eqs 1-2 (kind paper)")
    token: TokenTermConfig = Field(TokenTermConfig(), description="token term (kind anchor)")

    @property
    def is_paper_form(self) -> bool:
        """Return whether Eqs 1-2 are trained as printed: no temperature, no token term."""
        return self.kind == "paper"

    @property
    def has_token_term(self) -> bool:
        """Return whether the token term is trained in addition to the pair term."""
        return self.kind == "anchor"


class ITMConfig(Config):
    """Image-text matching with hard negatives drawn inside `group` samples of the global batch."""

    weight: float = Field(1.0, ge=0, description="weight in the sum of losses")
    listwise: int | None = Field(
        None,
        ge=1,
        description="negatives of a matching pair, among which it is found, as re-ranking asks; "
        "then only differences of log-odds among the candidates of a query mean anything; null: "
        "each pair matches or not, with one wrong text and one wrong image a row, as in ALBEF",
    )
    group: int = Field(
        64,
        ge=2,
        description="samples of the global batch that hard negatives are drawn from; one rank "
        "holds a group",
    )


class MLMConfig(Config):
    """Masked language modelling; probability over real words."""

    probability: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="probability that a word piece is chosen; special tokens never are",
    )


class MIMConfig(Config):
    """Masked image modelling: l1 on raw pixels of masked patches (SimMIM)."""

    output: Literal["image", "cross"] = Field(
        "image",
        description="which encoder's output predicts pixels: the image encoder's, or the "
        "cross-modal encoder's beside the clean text (layout `ace`; papers.md#ace-a30)",
    )


class MomentumConfig(Config):
    """Momentum copy of the student; its predictions are soft targets."""

    momentum: float = Field(
        0.995,
        gt=0,
        lt=1,
        description="of the moving average of the student's weights, at each optimiser step",
    )


class TeacherConfig(MomentumConfig):
    """Momentum teacher with its queue; soft targets for the pair term and MLM."""

    queue: int = Field(65536, ge=0, description="keys; 0 is no queue")
    warmup_steps: int = Field(
        1000, ge=0, description="the share of soft targets rises linearly to 0.4 over these steps"
    )


_registered: dict[str, type[Config]] = {}


def register_settings(name: str, settings: type[Config]) -> None:
    """Add a key to `ObjectivesConfig` for a new objective's settings; ValueError if it exists."""
    if name in _registered or name in ObjectivesConfig.model_fields:
        raise ValueError(f"objectives.{name} is a key already")
    _registered[name] = settings


class ObjectivesConfig(Config):
    """All objectives; `null` leaves one out, and with it its pass."""

    model_config = ConfigDict(extra="allow")

    contrastive: ContrastiveConfig | None = Field(
        ContrastiveConfig(), description="contrastive objective; null leaves it out"
    )
    itm: ITMConfig | None = Field(
        ITMConfig(), description="image-text matching; null leaves it out"
    )
    mlm: MLMConfig | None = Field(
        MLMConfig(), description="masked language modelling; null leaves it out"
    )
    mim: MIMConfig | None = Field(
        MIMConfig(), description="masked image modelling; null leaves it out"
    )
    teacher: TeacherConfig | None = Field(
        TeacherConfig(), description="momentum teacher; null leaves out soft targets and queue"
    )

    @model_validator(mode="before")
    @classmethod
    def _registered_keys(cls, values: Any) -> Any:
        """Validate the keys beyond the fields; unregistered ones are refused."""
        if not isinstance(values, Mapping):
            return values
        optional: dict[str, Any] = {name: (kind | None, None) for name, kind in _registered.items()}
        model = create_model("RegisteredObjectives", __base__=Config, **optional)
        fields = {name: value for name, value in values.items() if name in cls.model_fields}
        registered = {name: value for name, value in values.items() if name not in fields}
        # Registered keys are absent unless the configuration has them.
        return fields | {
            name: getattr(model.model_validate(registered), name) for name in registered
        }

    @model_validator(mode="after")
    def _trains_something(self) -> ObjectivesConfig:
        registered = self.model_extra or {}
        if not (self.contrastive or self.itm or self.mlm or self.mim or any(registered.values())):
            raise ValueError("contrastive, itm, mlm and mim are all null: nothing is trained")
        if self.teacher and self.contrastive and self.contrastive.kind == "sigmoid":
            raise ValueError(
                "contrastive.kind sigmoid compares with the batch, not with a teacher's queue; set "
                "objectives.teacher=null or contrastive.kind=itc"
            )
        return self
