"""Ablations: every variant trained with several seeds, resumable, and judged where place counts.

`python -m evaluation ablation --config configs/ablation/cross_position.yaml` generates the corpus,
pretrains the backbones if there are any, trains each variant, from nothing or from its backbone,
evaluates all of them, and prints the tables. A run that is finished is never done again, one that
was cut off goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from data_tools.generate.scenes import CORPUS_VERSION
from evaluation.ablations.runs import Overrides, Results, Run, do_runs, finished, plain, portable
from vlp.config import Config, ConfigError
from vlp.data.scenes.negatives import SwapKind
from vlp.data.scenes.sample import FULL, Variety


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
    """What all runs of a stage share."""

    config: str = Field(description="pretraining configuration, relative to this file")
    part: Literal["train", "twins"] = Field(description="part of the corpus that is trained on")
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
        "swaps", description="what its columns show and its tests look at"
    )
    paper: tuple[str, ...] = ()
    reference: str = Field(description="variant that the others are compared with, seed by seed")
    rows: tuple[RowConfig, ...]


class GateConfig(Config):
    """What must hold before the split counts as a test: `variant` beats `reference`."""

    variant: str
    reference: str
    p: float = Field(0.05, gt=0, lt=1)


class AblationConfig(Config):
    """Backbones, variants and tables of one ablation."""

    output: str
    corpus: CorpusConfig = CorpusConfig()
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=2)
    jobs: int = Field(2, ge=1, description="runs side by side; they share the cores")
    expected_deviation: float = Field(
        3.0, gt=0, description="points between seeds, of a difference; before anything is run"
    )
    pretraining: StageConfig | None = Field(None, description="of backbones")
    backbones: dict[str, VariantConfig] = Field({}, description="models that variants start from")
    training: StageConfig
    scorer: Literal["match", "words"] = Field(
        "match",
        description="who judges the swaps: the head of image-text matching, or that of masked "
        "words, which learns places much earlier",
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
        asked = [gate.variant for gate in self.gates] + [gate.reference for gate in self.gates]
        for table in self.tables:
            asked += [table.reference, *(row.variant for row in table.rows)]
            for row in table.rows:
                if row.paper and len(row.paper) != len(table.paper):
                    raise ValueError(f"{table.title}: {row.label} has {len(row.paper)} figures")
        if unknown := sorted(set(asked) - set(self.variants)):
            raise ValueError(f"unknown variants {', '.join(unknown)}")
        return self


def plan(
    config: AblationConfig, source: Path, only: Sequence[str] = ()
) -> tuple[list[Run], list[Run]]:
    """All runs: the backbones, then the variants that start from them.

    Args:
        config: the ablation.
        source: its file, which stage configurations are relative to.
        only: these variants; none means all.
    """
    chosen = {name: v for name, v in config.variants.items() if not only or name in only}
    used = {variant.backbone for variant in chosen.values()}
    backbones = [
        _run(config, source, config.pretraining, "backbone", name, backbone, seed)
        for name, backbone in config.backbones.items()
        if name in used and config.pretraining is not None
        for seed in config.seeds
    ]
    # Seed by seed, so that an interrupted ablation has whole seeds to compare.
    variants = [
        _run(config, source, config.training, "variant", name, variant, seed)
        for seed in config.seeds
        for name, variant in chosen.items()
    ]
    return backbones, variants


def run_ablation(
    config: AblationConfig,
    source: Path,
    only: Sequence[str] = (),
    say: Callable[[str], object] = print,
) -> Results:
    """Do whatever is still to be done; returns the results by (variant, seed).

    Args:
        config: the ablation.
        source: its file, which stage configurations are relative to.
        only: variants to train now; none means all.
        say: gets a line for each run.

    Raises:
        ConfigError: there is no checkout to train from, `only` names an unknown variant, a folder
            holds a run of other settings, or a training failed (its log is named).
    """
    if unknown := sorted(set(only) - set(config.variants)):
        known = ", ".join(config.variants)
        raise ConfigError(f"unknown variants {', '.join(unknown)}; there are {known}")
    _make_corpus(config.corpus, say)
    backbones, variants = plan(config, source, only)
    if backbones:
        do_runs(backbones, config.jobs, None, say)
    do_runs(variants, config.jobs, partial(judge, corpus=Path(config.corpus.folder)), say)
    return results(config, source)


def results(config: AblationConfig, source: Path) -> Results:
    """Results of the variants' finished runs."""
    found: Results = {}
    for run in plan(config, source)[1]:
        result = finished(run)
        if result is not None:
            name, _, seed = run.name.rpartition("/")
            found[name.removeprefix("variant/"), int(seed)] = result
    return found


def _run(
    config: AblationConfig,
    source: Path,
    stage: StageConfig,
    kind: str,
    name: str,
    variant: VariantConfig,
    seed: int,
) -> Run:
    folder = Path(config.output) / kind / name / str(seed)
    corpus = Path(config.corpus.folder)
    overrides = {
        **stage.overrides,
        **variant.overrides,
        "data.sources": [{"path": str(corpus / stage.part)}],
        "data.vocabulary": str(corpus / "vocabulary"),
        "training.seed": seed,
    }
    if variant.backbone is not None:
        overrides["init_from"] = str(
            Path(config.output) / "backbone" / variant.backbone / str(seed) / "model"
        )
    settings = {
        "config": portable(source.parent / stage.config),
        "overrides": overrides,
        "corpus": config.corpus.model_dump(exclude_none=True),
    }
    return Run(f"{kind}/{name}/{seed}", folder, plain(settings))


def judge(model: Path, threads: int, corpus: Path) -> dict[str, float]:
    """Figures in percent: swaps in three views, recall at 1, pointing and paths on held-out scenes.

    Of paths the spread is no share, but in patches and tokens.
    """
    import torch

    import vlp
    from evaluation.probes.pointing import evaluate_pointing
    from evaluation.probes.winoground import evaluate_swaps
    from evaluation.retrieval.retrieval import evaluate_retrieval

    torch.set_num_threads(threads)
    loaded = vlp.load(model)
    figures: dict[str, float] = {}
    views: tuple[Literal["image", "shuffled", "blank"], ...] = ("image", "shuffled", "blank")
    for view in views:
        swaps = evaluate_swaps(loaded, [corpus / "swaps"], view=view, resamples=1)
        for (scorer, kind, score), figure in swaps.figures.items():
            figures[f"swaps/{view}/{scorer}/{kind}/{score}"] = 100 * figure.value
    recall = evaluate_retrieval(loaded, [corpus / "val"], rerank=8)
    for key in recall.figures:
        if key[2] == "R@1":
            figures["/".join(key)] = 100 * recall.figures[key].value
    pointing = evaluate_pointing(loaded, [corpus / "val"], resamples=1)
    for kind, words in pointing.kinds.items():
        figures[f"pointing/{kind}"] = 100 * words.pointing.value
        if words.anchors is not None:
            figures[f"anchors/{kind}"] = 100 * words.anchors.value
    if pointing.paths is not None:
        figures["paths/anchors"] = 100 * pointing.paths.anchors
        figures["paths/reachable"] = 100 * pointing.paths.reachable
        figures["paths/spread"] = pointing.paths.spread
    return figures


def _make_corpus(corpus: CorpusConfig, say: Callable[[str], object]) -> None:
    folder = Path(corpus.folder)
    settings = folder / "ablation.json"
    wanted = plain({**corpus.model_dump(exclude_none=True), "version": CORPUS_VERSION})
    if settings.is_file():
        if json.loads(settings.read_text(encoding="utf-8")) != wanted:
            raise ConfigError(
                f"{folder} holds a corpus of other settings or an older version: delete it, or "
                "change corpus.folder"
            )
        return
    say(f"generating {folder}")
    sizes = {name: getattr(corpus, name) for name in ("train", "val", "twins", "swaps")}
    variety = {name: getattr(corpus, name) for name in Variety._fields}
    options = {**sizes, **variety, "image-size": corpus.image_size, "seed": corpus.seed}
    kinds = {} if corpus.kinds is None else {"kinds": corpus.kinds}
    _tool("scenes", {"out": folder, **options, **kinds})
    read = [folder / part for part in ("train", "twins") if sizes[part]]
    learned = {"shards": read, "size": corpus.vocabulary, "out": folder / "vocabulary"}
    _tool("vocabulary", learned)
    settings.write_text(json.dumps(wanted) + "\n", encoding="utf-8")


def _tool(name: str, options: Mapping[str, object]) -> None:
    words: list[str] = []
    for key, value in options.items():
        values = value if isinstance(value, (tuple, list)) else [value]
        words += [f"--{key}", *map(str, values)]
    done = subprocess.run(
        [sys.executable, "-m", "data_tools", name, *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ConfigError(f"data_tools {name} ended with code {done.returncode}: {done.stderr}")
