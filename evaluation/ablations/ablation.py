"""Ablations: every variant is trained with several seeds, evaluated, and compared in tables.

With a corpus, as in configs/ablation/cross_position.yaml, the scenes are generated, the backbones
pretrained if there are any, and each variant pretrained, from nothing or from its backbone. Without
one, as in configs/ablation/sape_cifar10.yaml, `launch/train_vision.py` trains each variant. A run
that is finished is never done again, one that was cut off goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from data_tools.generate.scenes import CORPUS_VERSION
from evaluation.ablations.config import AblationConfig, CorpusConfig, StageConfig, VariantConfig
from evaluation.ablations.runs import Results, Run, do_runs, finished, plain, portable
from vlp.config import ConfigError
from vlp.data.scenes.sample import Variety


def plan(
    config: AblationConfig, source: Path, only: Sequence[str] = ()
) -> tuple[list[Run], list[Run]]:
    """List all runs: the backbones, then the variants that start from them.

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
    evaluate = partial(evaluate_vision, limit=config.limit)
    if config.corpus is not None:
        _make_corpus(config.corpus, say)
        evaluate = partial(evaluate_cross_modal, corpus=Path(config.corpus.folder))
    backbones, variants = plan(config, source, only)
    if backbones:
        do_runs(backbones, config.jobs, None, say)
    do_runs(variants, config.jobs, evaluate, say)
    return results(config, source)


def results(config: AblationConfig, source: Path) -> Results:
    """Return the results of the variants' finished runs."""
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
    shared = portable(source.parent / stage.config)
    overrides = {**stage.overrides, **variant.overrides}
    if config.corpus is None:
        settings = {
            "config": shared,
            "overrides": {**overrides, "training.seed": seed},
            "limit": config.limit,
        }
        folder = Path(config.output) / name / str(seed)
        return Run(f"{name}/{seed}", folder, plain(settings), "train_vision.py")
    corpus = Path(config.corpus.folder)
    overrides |= {
        "data.sources": [{"path": str(corpus / stage.part)}],
        "data.vocabulary": str(corpus / "vocabulary"),
        "training.seed": seed,
    }
    if variant.backbone is not None:
        overrides["init_from"] = str(
            Path(config.output) / "backbone" / variant.backbone / str(seed) / "model"
        )
    settings = {
        "config": shared,
        "overrides": overrides,
        "corpus": config.corpus.model_dump(exclude_none=True),
    }
    folder = Path(config.output) / kind / name / str(seed)
    return Run(f"{kind}/{name}/{seed}", folder, plain(settings))


def evaluate_vision(model: Path, threads: int, limit: int | None) -> dict[str, float]:
    """Evaluate a folder of `train_vision.py` on `limit` test samples of its task."""
    import torch

    from evaluation.vision import evaluate_folder

    torch.set_num_threads(threads)
    return evaluate_folder(model, limit)


def evaluate_cross_modal(model: Path, threads: int, corpus: Path) -> dict[str, float]:
    """Evaluate swaps in three views, recall at 1, pointing and paths on held-out scenes.

    All figures are percent, but the spread of paths, which is in patches and tokens.
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
