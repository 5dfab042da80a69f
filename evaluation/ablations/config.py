"""Configuration of an ablation: variants, seeds, tables, and what they are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from evaluation.ablations.runs import Overrides
from vlp.config import Config, ConfigError, LocalPath
from vlp.data.scenes.negatives import SwapKind
from vlp.data.scenes.sample import FULL, LEAST, LEAST_SIDE
from vlp.process.command_line import nearest
from vlp.tasks.downstream.registry import task_kinds


class CorpusConfig(Config):
    """Sizes of the generated corpus; `twins` are scenes with their swaps, to train on."""

    folder: LocalPath = Field("shards/ablation", description="where its shards are written")
    train: int = Field(20_000, ge=0, description="scenes to train on")
    val: int = Field(256, ge=1, description="scenes held out")
    twins: int = Field(16_000, ge=0, description="scenes with their swaps, to train on")
    swaps: int = Field(900, ge=1, description="scenes with their swaps, to evaluate on")
    image_size: int = Field(64, ge=LEAST_SIDE, description="pixels of a side")
    colours: int = Field(
        FULL.colours, ge=LEAST.colours, le=FULL.colours, description="the first so many colours"
    )
    shapes: int = Field(
        FULL.shapes, ge=LEAST.shapes, le=FULL.shapes, description="the first so many shapes"
    )
    objects: int = Field(
        FULL.objects, ge=LEAST.objects, le=FULL.objects, description="most objects in a scene"
    )
    kinds: tuple[SwapKind, ...] | None = Field(None, description="of swaps and twins")
    vocabulary: int = Field(256, ge=64, description="word pieces of the vocabulary")
    seed: int = Field(0, ge=0, description="of the scenes")


class VariantConfig(Config):
    """One kind of run: overrides of the stage's configuration."""

    backbone: str | None = Field(None, description="whose weights the run starts from")
    overrides: Overrides = Field({}, description="by dotted key")
    seeds: int | None = Field(
        None, ge=2, description="only the first so many; null: all, as main rows have"
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="of training, in place of steps: as many steps as fit, by the seconds a step "
        "took in the first run of the variant with the same overrides and without `minutes`",
    )


class MeasuredConfig(Config):
    """Figures of models pretrained on images of one's own: recall and foils."""

    shards: tuple[str, ...] = Field(min_length=1, description="folders to evaluate on")
    features: str | None = Field(
        None, description="stored features of their images by the frozen tower, for retrieval"
    )
    rerank: int = Field(16, ge=1, description="candidates of a query that are re-ranked")
    rerank_by: Literal["sum", "match"] = Field(
        "sum", description="the match score is added to the similarity, or replaces it"
    )
    limit: int | None = Field(None, ge=1, description="samples in retrieval; null: all")
    foils: int = Field(1000, ge=0, description="images whose captions get foils; 0: no foils")


class FineTunedConfig(Config):
    """Figures of models fine-tuned for a downstream task: those of its evaluation, in percent."""

    task: str = Field(description="kind of downstream task, as in `vlp finetune TASK`")
    shards: tuple[str, ...] = Field(min_length=1, description="folders to evaluate on")
    limit: int | None = Field(None, ge=1, description="items; null: all")

    @model_validator(mode="after")
    def _known(self) -> FineTunedConfig:
        if self.task not in task_kinds():
            raise ValueError(f"task {self.task!r} is unknown; {nearest(self.task, task_kinds())}")
        return self


class FrozenConfig(Config):
    """Protocol for a pretrained ViT: which blocks are trained, and what they are tested on."""

    blocks: int = Field(ge=1, description="the first so many stay as they are")
    sizes: tuple[PositiveInt, ...] = Field(
        min_length=1, description="of the test images, in pixels"
    )
    encoding_rate: float = Field(
        1.0, gt=0, description="learning-rate multiplier of encodings, which start from nothing"
    )


class StageConfig(Config):
    """Settings that all runs of a stage share."""

    config: str = Field(description="training configuration, relative to this file")
    part: Literal["train", "twins"] = Field("train", description="of the corpus, to train on")
    overrides: Overrides = Field({}, description="by dotted key")


class RowConfig(Config):
    """A row of a table: a variant, or another view of one, and the paper's figures beside it."""

    label: str = Field(description="first cell of the row")
    variant: str = Field(description="whose figures it has")
    view: Literal["image", "shuffled", "blank"] = Field(
        "image", description="what the models are shown: images, shuffled ones, or grey"
    )
    paper: tuple[float, ...] = Field((), description="the paper's figures, one for each column")


class TableConfig(Config):
    """A table in the paper's layout; `paper` heads the columns of its figures."""

    title: str = Field(description="heading of the table")
    about: Literal["swaps", "anchors"] = Field(
        "swaps", description="columns and tests, where a corpus is trained on"
    )
    figures: Mapping[str, str] = Field(
        {}, description="column heads to figures of the evaluation, where no corpus is trained on"
    )
    tested: Mapping[str, tuple[str, ...]] = Field(
        {},
        description="heads of differences to figures whose mean is tested, beside `figures`; "
        "none: the first of `figures`",
    )
    paper: tuple[str, ...] = Field((), description="column heads of the paper's figures")
    reference: str = Field(description="variant that the others are compared with, seed by seed")
    decimals: int = Field(1, ge=0, le=6, description="of our figures")
    rows: tuple[RowConfig, ...] = Field(description="from top to bottom")


class GateConfig(Config):
    """A condition under which the split counts as a test: `variant` beats `reference`."""

    variant: str = Field(description="that must be better")
    reference: str = Field(description="than this variant, seed by seed")
    p: float = Field(0.05, gt=0, lt=1, description="largest p value of the paired test")


class AblationConfig(Config):
    """Backbones, variants and tables of one ablation.

    With a `corpus`, cross-modal encoders are pretrained on generated scenes; with `measured`, on
    the data that their own configuration names; with `fine_tuned`, models are fine-tuned for a
    task; with none of them, vision models are trained, with `frozen` only their last blocks.
    """

    output: LocalPath = Field(description="folder of runs, figures and report")
    plugins: tuple[str, ...] = Field(
        (), description="Python files or modules that register encodings, objectives or tasks"
    )
    corpus: CorpusConfig | None = Field(None, description="generated scenes to train on")
    measured: MeasuredConfig | None = Field(
        None, description="what pretraining without a corpus is evaluated on"
    )
    fine_tuned: FineTunedConfig | None = Field(
        None,
        description="the task that variants are fine-tuned for, and what they are evaluated on",
    )
    frozen: FrozenConfig | None = Field(
        None, description="of a pretrained ViT only the last blocks are trained"
    )
    seeds: tuple[NonNegativeInt, ...] = Field(
        (0, 1, 2), min_length=2, description="of each variant's runs"
    )
    jobs: int = Field(2, ge=1, description="runs side by side; they share the cores")
    expected_deviation: float = Field(
        3.0, gt=0, description="points between seeds, of a difference; before anything is run"
    )
    limit: int | None = Field(None, ge=1, description="test samples of vision models")
    pretraining: StageConfig | None = Field(None, description="of backbones")
    backbones: dict[str, VariantConfig] = Field({}, description="models that variants start from")
    training: StageConfig = Field(description="how variants are trained")
    scorer: Literal["match", "words"] = Field(
        "match",
        description="of the swaps: the head of image-text matching, or that of masked words, "
        "which learns places much earlier",
    )
    variants: dict[str, VariantConfig] = Field(description="what is compared, by name")
    gates: tuple[GateConfig, ...] = Field(
        (), description="without which the figures of swaps say nothing"
    )
    tables: tuple[TableConfig, ...] = Field(description="of the report")

    @model_validator(mode="after")
    def _known(self) -> AblationConfig:
        for name, variant in self.variants.items():
            if variant.backbone is not None and variant.backbone not in self.backbones:
                raise ValueError(f"variants.{name}.backbone {variant.backbone!r} is not defined")
            self.timed_by(name)
        if self.backbones and self.pretraining is None:
            raise ValueError("backbones need `pretraining`")
        if self.corpus is None and (self.backbones or self.gates):
            raise ValueError("backbones and gates need a `corpus`")
        if self.corpus and (self.measured or self.fine_tuned):
            raise ValueError("`corpus` has its own evaluation: leave out the others")
        if self.measured and self.fine_tuned:
            raise ValueError("`measured` is of pretraining and `fine_tuned` of a task: give one")
        if self.frozen and (self.corpus or self.measured or self.fine_tuned):
            raise ValueError("`frozen` is of vision models: leave out the other evaluation")
        named = [gate.variant for gate in self.gates] + [gate.reference for gate in self.gates]
        for table in self.tables:
            named += [table.reference, *(row.variant for row in table.rows)]
            if bool(table.figures) == bool(self.corpus):
                raise ValueError(
                    f"{table.title}: `figures` are for ablations without a corpus"
                    if self.corpus
                    else f"{table.title}: no figures"
                )
            for row in table.rows:
                if row.paper and len(row.paper) != len(table.paper):
                    raise ValueError(f"{table.title}: {row.label} has {len(row.paper)} figures")
        if unknown := sorted(set(named) - set(self.variants)):
            raise ValueError(f"unknown variants {', '.join(unknown)}")
        return self

    def timed_by(self, name: str) -> str | None:
        """Return the variant whose first run tells a variant with `minutes` its steps.

        Raises:
            ValueError: no variant without `minutes` has the same overrides.
        """
        variant = self.variants[name]
        if variant.minutes is None:
            return None
        for other, one in self.variants.items():
            same = one.overrides == variant.overrides and one.backbone == variant.backbone
            if same and one.minutes is None:
                return other
        raise ValueError(
            f"variants.{name}.minutes: no variant without `minutes` has the same overrides, whose "
            "first run would tell how long a step takes"
        )

    def runs(self, only: Sequence[str] = ()) -> list[tuple[str, int]]:
        """List (variant, seed): main rows first, then those of fewer seeds, each seed by seed.

        An interrupted ablation then has whole seeds to compare.

        Args:
            only: these variants; none means all.

        Raises:
            ConfigError: `only` names an unknown variant.
        """
        if unknown := sorted(set(only) - set(self.variants)):
            known = ", ".join(self.variants)
            raise ConfigError(f"unknown variants {', '.join(unknown)}; there are {known}")
        seeds = {
            name: self.seeds[: variant.seeds]
            for name, variant in self.variants.items()
            if not only or name in only
        }
        counts = sorted({len(each) for each in seeds.values()}, reverse=True)
        return [
            (name, seed)
            for count in counts
            for seed in self.seeds[:count]
            for name, own in seeds.items()
            if len(own) == count
        ]
