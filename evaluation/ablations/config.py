"""Configuration of an ablation: variants, seeds, tables, and what they are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from evaluation.ablations.runs import Overrides
from vlp.config import Config
from vlp.data.scenes.negatives import SwapKind
from vlp.data.scenes.sample import FULL


class CorpusConfig(Config):
    """Sizes of the generated corpus; `twins` are scenes with their swaps, to train on."""

    folder: str = "shards/ablation"
    train: int = Field(20_000, ge=0)
    val: int = Field(256, ge=1)
    twins: int = Field(16_000, ge=0)
    swaps: int = Field(900, ge=1)
    image_size: int = 64
    colours: int = FULL.colours
    shapes: int = FULL.shapes
    objects: int = FULL.objects
    kinds: tuple[SwapKind, ...] | None = Field(None, description="of swaps and twins")
    vocabulary: int = Field(256, ge=64, description="word pieces")
    seed: int = 0


class VariantConfig(Config):
    """One kind of run: overrides of the stage's configuration."""

    backbone: str | None = Field(None, description="whose weights the run starts from")
    overrides: Overrides = Field({}, description="by dotted key")


class StageConfig(Config):
    """Settings that all runs of a stage share."""

    config: str = Field(description="training configuration, relative to this file")
    part: Literal["train", "twins"] = Field("train", description="of the corpus, to train on")
    overrides: Overrides = Field({}, description="by dotted key")


class RowConfig(Config):
    """A row of a table: a variant, or another view of one, and the paper's figures beside it."""

    label: str
    variant: str
    view: Literal["image", "shuffled", "blank"] = "image"
    paper: tuple[float, ...] = ()


class TableConfig(Config):
    """A table in the paper's layout; `paper` heads the columns of its figures."""

    title: str
    about: Literal["swaps", "anchors"] = Field(
        "swaps", description="columns and tests, where a corpus is trained on"
    )
    figures: Mapping[str, str] = Field(
        {}, description="column heads to figures of the evaluation, where no corpus is trained on"
    )
    paper: tuple[str, ...] = ()
    reference: str = Field(description="variant that the others are compared with, seed by seed")
    decimals: int = Field(1, ge=0, le=6, description="of our figures")
    rows: tuple[RowConfig, ...]


class GateConfig(Config):
    """A condition under which the split counts as a test: `variant` beats `reference`."""

    variant: str
    reference: str
    p: float = Field(0.05, gt=0, lt=1)


class AblationConfig(Config):
    """Backbones, variants and tables of one ablation.

    With a `corpus`, cross-modal encoders are pretrained on generated scenes; without one, vision
    models are trained and evaluated on the data that their own configuration names.
    """

    output: str
    corpus: CorpusConfig | None = None
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=2)
    jobs: int = Field(2, ge=1, description="runs side by side; they share the cores")
    expected_deviation: float = Field(
        3.0, gt=0, description="points between seeds, of a difference; before anything is run"
    )
    limit: int | None = Field(None, ge=1, description="test samples of vision models")
    pretraining: StageConfig | None = Field(None, description="of backbones")
    backbones: dict[str, VariantConfig] = Field({}, description="models that variants start from")
    training: StageConfig
    scorer: Literal["match", "words"] = Field(
        "match",
        description="of the swaps: the head of image-text matching, or that of masked words, "
        "which learns places much earlier",
    )
    variants: dict[str, VariantConfig]
    gates: tuple[GateConfig, ...] = ()
    tables: tuple[TableConfig, ...]

    @model_validator(mode="after")
    def _known(self) -> AblationConfig:
        for name, variant in self.variants.items():
            if variant.backbone is not None and variant.backbone not in self.backbones:
                raise ValueError(f"variants.{name}.backbone {variant.backbone!r} is not defined")
        if self.backbones and self.pretraining is None:
            raise ValueError("backbones need `pretraining`")
        if self.corpus is None and (self.backbones or self.gates):
            raise ValueError("backbones and gates need a `corpus`")
        named = [gate.variant for gate in self.gates] + [gate.reference for gate in self.gates]
        for table in self.tables:
            named += [table.reference, *(row.variant for row in table.rows)]
            if bool(table.figures) == bool(self.corpus):
                raise ValueError(
                    f"{table.title}: `figures` are of vision models alone"
                    if self.corpus
                    else f"{table.title}: no figures"
                )
            for row in table.rows:
                if row.paper and len(row.paper) != len(table.paper):
                    raise ValueError(f"{table.title}: {row.label} has {len(row.paper)} figures")
        if unknown := sorted(set(named) - set(self.variants)):
            raise ValueError(f"unknown variants {', '.join(unknown)}")
        return self
