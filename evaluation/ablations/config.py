"""Configuration of an ablation: preparation, variants, seeds, evaluation and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt, model_validator

from evaluation.jobs import View
from evaluation.vision.frozen import FrozenConfig
from vlp.config import Config, LocalPath


def _check_nesting(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse a key together with a part of it, such as `training.steps` and `training`."""
    # Both set the same value, so that the order of the keys would decide.
    for key in overrides:
        for outer in overrides:
            if key.startswith(f"{outer}."):
                raise ValueError(
                    f"{key} and {outer} set the same value: remove one (on the command line, write "
                    f"overrides='{{{key}: ...}}' for {key})"
                )
    return overrides


Overrides = Annotated[Mapping[str, Any], AfterValidator(_check_nesting)]


class StepConfig(Config):
    """A `vlp` command that prepares inputs of the trainings."""

    run: str = Field(description="the command line after `vlp`")
    makes: str | None = Field(
        None, description="path that it writes; where it exists the command is skipped"
    )


class TrainingConfig(Config):
    """Configuration that all variants share."""

    config: str = Field(description="training configuration, relative to this file")
    overrides: Overrides = Field({}, description="by dotted key")


class VariantConfig(Config):
    """One row of the grid: overrides of the training configuration."""

    overrides: Overrides = Field({}, description="by dotted key; {seed} is the run's seed")
    seeds: int | None = Field(None, ge=2, description="number of seeds, the first ones; null: all")


class MeasuredConfig(Config):
    """Evaluation of pretrained models on given images: recall and foils."""

    shards: tuple[str, ...] = Field(min_length=1, description="folders to evaluate on")
    features: str | None = Field(
        None, description="stored features of their images by the frozen tower, for retrieval"
    )
    rerank: int = Field(
        16,
        ge=1,
        description="candidates of a query that are ranked again: by the match score (figures "
        "`match/...`), and by similarity and match score (`rerank/...`)",
    )
    limit: int | None = Field(None, ge=1, description="samples in retrieval; null: all")
    foils: int = Field(1000, ge=0, description="images whose captions get foils; 0: no foils")


class FineTunedConfig(Config):
    """Evaluation of models fine-tuned for the task of their configuration, in percent."""

    shards: tuple[str, ...] = Field(min_length=1, description="folders to evaluate on")
    limit: int | None = Field(None, ge=1, description="items; null: all")


class RowConfig(Config):
    """A row of a table: a variant, and the paper's figures for it."""

    label: str = Field(description="first cell of the row")
    variant: str = Field(description="variant whose figures the row has")
    view: View = Field("image", description="what {view} in `figures` stands for in this row")
    paper: tuple[float, ...] = Field((), description="the paper's figures, one for each column")


class TableConfig(Config):
    """A table of means over seeds; `paper` heads the columns of the paper's figures."""

    title: str = Field(description="heading of the table")
    figures: Mapping[str, str] = Field(
        min_length=1, description="column heads to figures of the evaluation"
    )
    tested: Mapping[str, tuple[str, ...]] = Field(
        {}, description="heads of differences to figures whose mean is tested; none: the first of "
        "`figures`",
    )  # fmt: skip
    paper: tuple[str, ...] = Field((), description="column heads of the paper's figures")
    reference: str = Field(description="variant that the others are compared with, seed by seed")
    decimals: int = Field(1, ge=0, le=6, description="of our figures")
    rows: tuple[RowConfig, ...] = Field(description="from top to bottom")


class AblationConfig(Config):
    """A grid of variants and seeds, the evaluation of its models, and tables.

    `scenes`, `measured` or `fine_tuned` sets the evaluation of image-text models; without them,
    models are vision models, of which `frozen` trains only the last blocks.
    """

    output: LocalPath = Field(description="folder of runs, figures and report")
    plugins: tuple[str, ...] = Field(
        (), description="Python files or modules that register encodings, objectives or tasks"
    )
    prepare: tuple[StepConfig, ...] = Field((), description="commands before the first training")
    scenes: LocalPath | None = Field(
        None, description="generated scenes that models are evaluated on: parts `val` and `swaps`"
    )
    measured: MeasuredConfig | None = Field(None, description="evaluation of pretrained models")
    fine_tuned: FineTunedConfig | None = Field(
        None, description="evaluation of models that are fine-tuned for a downstream task"
    )
    frozen: FrozenConfig | None = Field(
        None, description="of a pretrained ViT only the last blocks are trained"
    )
    limit: int | None = Field(None, ge=1, description="test samples of vision models")
    seeds: tuple[NonNegativeInt, ...] = Field(
        (0, 1, 2), min_length=2, description="of each variant's runs"
    )
    jobs: int = Field(2, ge=1, description="runs side by side; they share the cores")
    training: TrainingConfig = Field(description="how variants are trained")
    variants: dict[str, VariantConfig] = Field(description="what is compared, by name")
    tables: tuple[TableConfig, ...] = Field(description="of the report")

    @model_validator(mode="after")
    def _check_names(self) -> AblationConfig:
        evaluations = ("scenes", "measured", "fine_tuned", "frozen")
        if len(selected := [key for key in evaluations if getattr(self, key) is not None]) > 1:
            raise ValueError(f"{' and '.join(selected)} are mutually exclusive: set one")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("a seed is named twice: its run would count as two")
        variants = set()
        for table in self.tables:
            variants |= {table.reference, *(row.variant for row in table.rows)}
            for row in table.rows:
                # Rows that the paper lacks have no figures of the paper.
                if row.paper and len(row.paper) != len(table.paper):
                    counts = f"{len(row.paper)} figures, the table {len(table.paper)}"
                    raise ValueError(f"{table.title}: {row.label} has {counts}")
        if unknown := sorted(variants - set(self.variants)):
            raise ValueError(f"unknown variants {', '.join(unknown)}")
        return self

    def evaluation(self) -> dict[str, Any]:
        """Return the settings of the evaluation, as plain JSON values.

        `result.json` stores them: a run is evaluated again if they differ.
        """
        keys = {"scenes", "measured", "fine_tuned", "frozen", "limit"}
        return self.model_dump(mode="json", include=keys, exclude_none=True)


class ResultConfig(Config):
    """A result of docs/results: the ablation or the command that reproduces it."""

    about: str = Field(description="what was measured, and what the paper measured")
    ablation: str | None = Field(None, description="configuration, in the folder above this file")
    overrides: tuple[str, ...] = Field((), description="changes to the configuration")
    variants: tuple[str, ...] = Field((), description="that are trained; none means all")
    command: str = Field("", description="arguments of `vlp`, where no ablation makes it")


class ResultsConfig(Config):
    """All results by the names that `vlp reproduce` takes; NAME.csv holds the figures by seed."""

    tables: Mapping[str, ResultConfig] = Field(description="in the order of the list")
