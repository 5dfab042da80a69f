"""Position encodings compared: every variant trained with several seeds, and the paper's tables.

`python -m evaluation positions --config configs/ablation/sape_cifar10.yaml` trains each variant
with `launch/train_vision.py`, evaluates it on the task's test data and prints the tables in the
paper's layout beside the paper's figures. A run that is finished is never done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import Field, model_validator

from evaluation.ablations.runs import Overrides, Results, Run, do_runs, finished, plain, portable
from vlp.config import Config, ConfigError


class VariantConfig(Config):
    """One kind of run: overrides of the shared configuration, by dotted key."""

    overrides: Overrides = Field({}, description="by dotted key")


class TrainingConfig(Config):
    """What all runs share; `config` is relative to this file."""

    config: str
    overrides: Overrides = Field({}, description="by dotted key")


class RowConfig(Config):
    """A row of a table, with the paper's figures beside ours."""

    label: str
    variant: str
    paper: tuple[float, ...] = ()


class TableConfig(Config):
    """A table in the paper's layout; `paper` heads the columns of its figures."""

    title: str
    figures: Mapping[str, str] = Field(description="column heads to figures of the evaluation")
    paper: tuple[str, ...] = ()
    reference: str = Field(description="variant that the others are compared with, seed by seed")
    decimals: int = Field(1, ge=0, le=6, description="of our figures")
    rows: tuple[RowConfig, ...]


class PositionsConfig(Config):
    """Variants and tables of one comparison."""

    output: str
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=2)
    jobs: int = Field(2, ge=1, description="runs side by side; they share the cores")
    expected_deviation: float = Field(
        1.0, gt=0, description="points between seeds, of a difference; before anything is run"
    )
    limit: int | None = Field(None, ge=1, description="test samples")
    training: TrainingConfig
    variants: dict[str, VariantConfig]
    tables: tuple[TableConfig, ...]

    @model_validator(mode="after")
    def _known(self) -> PositionsConfig:
        for table in self.tables:
            asked = [table.reference, *(row.variant for row in table.rows)]
            if unknown := sorted(set(asked) - set(self.variants)):
                raise ValueError(f"{table.title}: unknown variants {', '.join(unknown)}")
            if not table.figures:
                raise ValueError(f"{table.title}: no figures")
            for row in table.rows:
                if row.paper and len(row.paper) != len(table.paper):
                    raise ValueError(f"{table.title}: {row.label} has {len(row.paper)} figures")
        return self


def plan(config: PositionsConfig, source: Path, only: Sequence[str] = ()) -> list[Run]:
    """All runs, seed by seed, so that an interrupted comparison has whole seeds.

    Args:
        config: the comparison.
        source: its file, which the shared configuration is relative to.
        only: these variants; none means all.
    """
    shared = portable(source.parent / config.training.config)
    return [
        Run(
            f"{name}/{seed}",
            Path(config.output) / name / str(seed),
            plain(
                {
                    "config": shared,
                    "overrides": {
                        **config.training.overrides,
                        **variant.overrides,
                        "training.seed": seed,
                    },
                    "limit": config.limit,
                }
            ),
            "train_vision.py",
        )
        for seed in config.seeds
        for name, variant in config.variants.items()
        if not only or name in only
    ]


def run_comparison(
    config: PositionsConfig,
    source: Path,
    only: Sequence[str] = (),
    say: Callable[[str], object] = print,
) -> Results:
    """Do whatever is still to be done; returns the results by (variant, seed).

    Raises:
        ConfigError: `only` names an unknown variant, there is no checkout to train from, a folder
            holds a run of other settings, or a training failed (its log is named).
    """
    if unknown := sorted(set(only) - set(config.variants)):
        known = ", ".join(config.variants)
        raise ConfigError(f"unknown variants {', '.join(unknown)}; there are {known}")
    do_runs(plan(config, source, only), config.jobs, _Judge(config.limit), say)
    return results(config, source)


def results(config: PositionsConfig, source: Path) -> Results:
    """Results of the finished runs."""
    found: Results = {}
    for run in plan(config, source):
        result = finished(run)
        if result is not None:
            name, _, seed = run.name.rpartition("/")
            found[name, int(seed)] = result
    return found


class _Judge:
    """Evaluates a trained folder; a class, so that another process can have it."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit

    def __call__(self, model: Path, threads: int) -> dict[str, float]:
        import torch

        from evaluation.vision import evaluate_folder

        torch.set_num_threads(threads)
        return evaluate_folder(model, self._limit)
