"""Ablations: every variant is trained with several seeds, evaluated, and compared in tables.

With a corpus, as in configs/ablation/cross_position.yaml, the scenes are generated, the backbones
pretrained if there are any, and each variant pretrained, from nothing or from its backbone. With
`measured`, as in configs/ablation/flickr8k_towers.yaml, each variant is pretrained on images of
one's own; with `fine_tuned`, it is fine-tuned for a task. With none of them, as in
configs/ablation/sape_cifar10.yaml, `launch/train_vision.py` trains each variant. A run that is
finished is never done again, one that was cut off goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data_tools.scenes import CORPUS_VERSION
from evaluation.ablations.config import AblationConfig, CorpusConfig, StageConfig, VariantConfig
from evaluation.ablations.measures import (
    evaluate_cross_modal,
    evaluate_fine_tuned,
    evaluate_images,
    evaluate_vision,
)
from evaluation.ablations.runs import Results, Run, do_runs, finished, plain, portable
from vlp.config import ConfigError, overridden, read_values
from vlp.data.scenes.sample import Variety
from vlp.io import parse_json, redacted_values


def plan(
    config: AblationConfig, source: Path, only: Sequence[str] = ()
) -> tuple[list[Run], list[Run]]:
    """List all runs: the backbones, then the variants that start from them.

    A variant with `minutes` is left out until the run that tells its steps is finished.

    Args:
        config: the ablation.
        source: its file, which stage configurations are relative to.
        only: these variants; none means all.
    """
    pairs = config.runs(only)
    used = {config.variants[name].backbone for name, _ in pairs}
    backbones = []
    if config.pretraining is not None:
        pretraining = _stage(source, config.pretraining)
        backbones = [
            _run(config, pretraining, "backbone", name, backbone, seed)
            for name, backbone in config.backbones.items()
            if name in used
            for seed in config.seeds
        ]
    training = _stage(source, config.training)
    variants = [
        _run(config, training, "variant", name, variant, seed)
        for name, seed in pairs
        if (variant := _with_steps(config, training, name)) is not None
    ]
    return backbones, variants


def check(config: AblationConfig, source: Path, only: Sequence[str] = ()) -> None:
    """Read the settings of each variant and backbone, before one of them is trained.

    Raises:
        ConfigError: `only` names an unknown variant, a folder holds a run of other settings, or
            settings are wrong, and whose.
    """
    # One that waits for another's time has the same overrides.
    for kind, runs in zip(("backbone", "variant"), plan(config, source, only), strict=True):
        for place, run in {run.folder.parent: run for run in runs}.items():
            try:
                run.read()
            except ConfigError as error:
                raise ConfigError(f"{kind} {place.name}: {error}") from error
        for run in runs:
            finished(run)


def run_ablation(
    config: AblationConfig,
    source: Path,
    only: Sequence[str] = (),
    say: Callable[[str], object] = print,
    kept: Collection[tuple[str, int]] | None = None,
) -> Results:
    """Do whatever is still to be done; returns the results by (variant, seed).

    Args:
        config: the ablation.
        source: its file, which stage configurations are relative to.
        only: variants to train now; none means all.
        say: gets a line for each run.
        kept: the only (variant, seed) to do, as a budget keeps them; None is all.

    Raises:
        ConfigError: there is no checkout to train from, `only` names an unknown variant, a folder
            holds a run of other settings, settings of a variant are wrong, or a training failed
            (its log is named).
    """
    check(config, source, only)
    pairs = config.runs(only)
    evaluate = partial(evaluate_vision, limit=config.limit)
    if config.corpus is not None:
        _make_corpus(config.corpus, say)
        evaluate = partial(evaluate_cross_modal, corpus=Path(config.corpus.folder))
    elif config.measured is not None:
        evaluate = partial(evaluate_images, measured=config.measured)
    elif config.fine_tuned is not None:
        evaluate = partial(evaluate_fine_tuned, fine_tuned=config.fine_tuned)
    wanted = [pair for pair in pairs if kept is None or pair in kept]
    backbones, variants = plan(config, source, only)
    if backbones:
        do_runs(backbones, config.jobs, None, say)
    if config.frozen is not None:
        from evaluation.ablations.frozen import train_frozen

        chosen = [run for run in variants if _pair(run) in wanted]
        train_frozen(chosen, config.frozen, config.limit, Path(config.output), say)
        return results(config, source)
    do_runs([run for run in variants if _pair(run) in wanted], config.jobs, evaluate, say)
    if any(config.variants[name].minutes for name, _ in wanted):
        # Now that runs at equal steps have told how long a step takes.
        runs = {_pair(run): run for run in plan(config, source, only)[1]}
        do_runs([runs[pair] for pair in wanted if pair in runs], config.jobs, evaluate, say)
        for name in dict.fromkeys(name for name, seed in wanted if (name, seed) not in runs):
            say(f"  {name} was not trained: it needs the first run of {config.timed_by(name)}")
    return results(config, source)


def results(config: AblationConfig, source: Path) -> Results:
    """Return the results of the variants' finished runs."""
    found: Results = {}
    for run in plan(config, source)[1]:
        result = finished(run)
        if result is not None:
            found[_pair(run)] = result
    return found


def run_folders(config: AblationConfig, source: Path) -> dict[str, list[Path]]:
    """Return the folders of the finished runs of each variant."""
    folders: dict[str, list[Path]] = {}
    for run in plan(config, source)[1]:
        if finished(run) is not None:
            folders.setdefault(_pair(run)[0], []).append(run.folder)
    return folders


def _pair(run: Run) -> tuple[str, int]:
    name, _, seed = run.name.rpartition("/")
    return name.removeprefix("variant/"), int(seed)


class _Stage(NamedTuple):
    """A stage's settings, its file as `portable` names it, and what that says."""

    settings: StageConfig
    config: str
    values: dict[str, Any]


def _stage(source: Path, settings: StageConfig) -> _Stage:
    file = source.parent / settings.config
    return _Stage(settings, portable(file), read_values(file)[0])


def _with_steps(config: AblationConfig, training: _Stage, name: str) -> VariantConfig | None:
    """Return a variant, its `minutes` as steps, or None where a step's seconds are not known."""
    variant = config.variants[name]
    timed_by = config.timed_by(name)
    if variant.minutes is None or timed_by is None:
        return variant
    twin = config.variants[timed_by]
    first = _run(config, training, "variant", timed_by, twin, config.seeds[0])
    cost = (finished(first) or {}).get("training")
    if cost is None:
        return None
    steps = max(1, round(60 * variant.minutes * cost["steps"] / cost["seconds"]))
    return variant.model_copy(update={"overrides": {**variant.overrides, "training.steps": steps}})


def _run(
    config: AblationConfig, stage: _Stage, kind: str, name: str, variant: VariantConfig, seed: int
) -> Run:
    overrides = {**stage.settings.overrides, **variant.overrides, "training.seed": seed}
    if config.corpus is None:
        folder = Path(config.output) / name / str(seed)
        if config.measured is not None:
            settings = _settings(stage, overrides, measured=config.measured.model_dump())
            return Run(f"{name}/{seed}", folder, settings)
        if config.fine_tuned is not None:
            settings = _settings(stage, overrides, fine_tuned=config.fine_tuned.model_dump())
            words = (config.fine_tuned.task,)
            return Run(f"{name}/{seed}", folder, settings, "finetune.py", words)
        more = {} if config.frozen is None else {"frozen": config.frozen.model_dump()}
        settings = _settings(stage, overrides, limit=config.limit, **more)
        return Run(f"{name}/{seed}", folder, settings, "train_vision.py")
    corpus = Path(config.corpus.folder)
    overrides |= {
        "data.sources": [{"path": str(corpus / stage.settings.part)}],
        "data.vocabulary": str(corpus / "vocabulary"),
    }
    if variant.backbone is not None:
        overrides["init_from"] = str(
            Path(config.output) / "backbone" / variant.backbone / str(seed) / "model"
        )
    settings = _settings(stage, overrides, corpus=config.corpus.model_dump(exclude_none=True))
    folder = Path(config.output) / kind / name / str(seed)
    return Run(f"{kind}/{name}/{seed}", folder, settings)


def _settings(stage: _Stage, overrides: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return what makes a run another one, as `Run` has it."""
    values = stage.values
    for key, value in overrides.items():
        values = overridden(values, key, value)
    told = plain({"config": stage.config, "overrides": overrides, "configuration": values, **more})
    return {**told, "configuration": redacted_values(told["configuration"])}


def _make_corpus(corpus: CorpusConfig, say: Callable[[str], object]) -> None:
    folder = Path(corpus.folder)
    settings = folder / "ablation.json"
    wanted = plain({**corpus.model_dump(exclude_none=True), "version": CORPUS_VERSION})
    if settings.is_file():
        if parse_json(settings.read_text(encoding="utf-8")) != wanted:
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
