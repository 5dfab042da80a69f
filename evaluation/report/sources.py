"""Runs, model folders and folders of results, as reports and `vlp info` read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from evaluation.results import Figure, figures_by_stage, reranked_top
from evaluation.samples import EvaluationError
from vlp.config import parse_yaml
from vlp.io import parse_json, redact_values
from vlp.models.folder import WEIGHTS
from vlp.models.pretrained.local_copy import CONFIG, results_folder
from vlp.tasks.downstream.task import TASK
from vlp.training.run_folder import read_log

EXPECTED_FILES = f"KIND.json, {WEIGHTS}, log.jsonl, report.json or config.yaml, or best/ or model/"
_MODELS = ("best", "model")
# Integers of a result that do not count items.
_NOT_COUNTS = {"rerank", "bank_shared"}
# Folders inside a run.
_INNER = {"best", "model", "evaluation"}
# Dotted keys of config.yaml in the order of the report, and their labels.
_SETTINGS = (
    ("init_from", "starts from"),
    ("task.kind", "task"),
    ("task.data.train", "trained on"),
    ("data.sources", "trained on"),
    ("objectives", "objectives"),
    ("training.epochs", "epochs"),
    ("training.steps", "steps"),
    ("training.batch", "batch"),
    ("training.precision", "precision"),
    ("training.optimiser.learning_rate", "learning rate"),
    ("training.seed", "seed"),
    ("model.image.image_size", "image size, pixels"),
    ("model.image.patch_size", "patch size, pixels"),
    ("model.cross.position", "cross-modal positions"),
)


class StoredResult(NamedTuple):
    """One KIND.json: figures by name, and for retrieval by stage in `variants`."""

    kind: str
    # Stage ("" or "dual encoder", "re-ranked top 16") -> figures by name.
    variants: dict[str, dict[str, Figure]]
    # Of evaluated items, such as {"images": 1000}.
    counts: dict[str, int]
    shards: tuple[str, ...]
    skipped: dict[str, int]
    notes: tuple[str, ...]


@dataclass
class Source:
    """One RUN of the command line; `problems` with its files, one line each."""

    folder: Path
    name: str
    model: Path | None = None
    task: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)
    results: list[StoredResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_sources(folders: Sequence[str | Path]) -> list[Source]:
    """Read every folder."""
    paths = [Path(folder) for folder in folders]
    return [_read_source(path, name) for path, name in zip(paths, short_names(paths))]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the run's folder name of each path; the whole path where runs have equal names."""
    names = [[part for part in path.resolve().parts if part not in _INNER][-1] for path in paths]
    return [str(p) if names.count(name) > 1 else name for p, name in zip(paths, names)]


def settings(source: Source) -> list[tuple[str, str]]:
    """Return (label, value) of the settings that the run has."""
    rows = []
    for key, label in _SETTINGS:
        value: Any = source.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value not in (None, [], {}):
            rows.append((label, _text_of(value)))
    return rows


def training_summary(source: Source) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of the training from report.json, else from the log's last line."""
    training = source.training
    if not training:
        if source.log and "step" in source.log[-1]:
            yield "ended", f"not yet, or killed; the last logged step is {source.log[-1]['step']}"
        return
    ended, step, total = (training.get(name) for name in ("ended", "step", "total_steps"))
    yield "ended", f"{ended} at step {step} of {total}"
    for name, label, unit, template in (
        ("seconds", "time", 3600, "{:.2f} h"),
        ("samples_per_second", "speed", 1, "{:.1f} samples/s"),
        ("peak_memory_bytes", "peak memory", 2**30, "{:.1f} GiB"),
    ):
        if isinstance(training.get(name), int | float):
            yield label, template.format(training[name] / unit)
    for name in ("device", "ranks", "best", "non_finite_steps", "resumed_at_steps"):
        if training.get(name):
            yield name.replace("_", " "), _text_of(training[name])
    skipped, examples = training.get("skipped_samples"), training.get("skipped_examples")
    skipped = skipped if isinstance(skipped, Mapping) else {}
    examples = examples if isinstance(examples, Mapping) else {}
    for kind, count in skipped.items():
        details = "; ".join(map(str, examples.get(kind, ())))
        yield f"skipped: {kind}", f"{count}: {details}".rstrip(": ")


def _text_of(value: Any) -> str:
    if isinstance(value, Mapping):
        if "path" in value:
            return str(value["path"])
        return ", ".join(
            f"{name} {part:.4g}" if type(part) in (int, float) else str(name)
            for name, part in value.items()
            if part
        )
    if isinstance(value, list):
        return ", ".join(map(_text_of, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read_source(folder: Path, name: str) -> Source:
    if not folder.is_dir():
        raise EvaluationError(f"{folder}: there is no such folder")
    source = Source(folder, name)
    folders = [folder, *(folder / model for model in _MODELS)]
    folders += [folder.absolute().parent] if folder.name == "evaluation" else []
    source.model = next(
        (path for path in folders if (path / WEIGHTS).is_file() and (path / CONFIG).is_file()), None
    )
    # A folder inside a run, such as `run/model/evaluation`, has the log and report of that run.
    for run in (folder.absolute(), *folder.absolute().parents[:2]):
        if any((run / file).is_file() for file in ("log.jsonl", "config.yaml")):
            if set(folder.absolute().relative_to(run).parts) <= _INNER:
                source.config = redact_values(_read_mapping(run / "config.yaml", source))
                source.log, num_damaged = read_log(run / "log.jsonl")
                if num_damaged:
                    problem = f"{run / 'log.jsonl'}: {num_damaged} lines cannot be read"
                    source.problems.append(problem)
                source.training = _read_mapping(run / "report.json", source)
            break
    source.results = list(_read_results(folder, source))
    if not (source.model or source.config or source.log or source.training or source.results):
        if (folder / "all.md").is_file():
            raise EvaluationError(f"{folder} holds a suite: its tables are in {folder / 'all.md'}")
        damaged = f" ({'; '.join(source.problems)})" if source.problems else ""
        raise EvaluationError(f"{folder}: nothing to report{damaged}; looked for {EXPECTED_FILES}")
    if source.model is not None:
        task = _read_mapping(source.model / TASK, source).get("task")
        source.task = task.get("kind") if isinstance(task, dict) else None
    return source


def _read_mapping(file: Path, source: Source) -> dict[str, Any]:
    """Read JSON or YAML; return {} if the file is missing, or damaged (added to `problems`)."""
    parse = parse_yaml if file.suffix == ".yaml" else parse_json
    try:
        content = parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        source.problems.append(f"{file} cannot be read ({' '.join(str(error).split())})")
        return {}
    return content if isinstance(content, dict) else {}


def _read_results(folder: Path, source: Source) -> Iterator[StoredResult]:
    excluded = {CONFIG, TASK, "report.json"}
    inner = (p for m in _MODELS for p in (folder / "evaluation" / m, folder / m / "evaluation"))
    for directory in (folder, results_folder(folder), folder / "evaluation", *inner):
        for file in sorted(directory.glob("*.json")):
            # Only the first result of a kind: best/ comes before model/.
            if file.name not in excluded and (result := read_result(file, source)) is not None:
                excluded.add(file.name)
                yield result


def read_result(file: Path, source: Source) -> StoredResult | None:
    """Read a result; return None without figures, or if damaged (added to `source.problems`)."""
    content = _read_mapping(file, source)
    figures = content.get("figures", content.get("kinds"))
    if file.stem == "vision" and "task" not in content:
        figures, content = content, {"task": "vision"}
    if not isinstance(content.get("task"), str) or figures is None:
        return None
    try:
        variants = (
            _label_stages(figures_by_stage(figures), content)
            if isinstance(figures, list)
            else {"": dict(_flatten_figures(figures, ""))}
        )
        figures_of_all = [figure for stage in variants.values() for figure in stage.values()]
        if not figures_of_all:
            raise ValueError("it has no figures")
        if not np.isfinite(figures_of_all).all():
            raise ValueError("it has figures that are not finite")
        return StoredResult(
            kind=content["task"],
            variants=variants,
            # Integers at the top level count evaluated items.
            counts={k: v for k, v in content.items() if type(v) is int and k not in _NOT_COUNTS},
            shards=tuple(map(str, content.get("shards") or ())),
            skipped=dict(content.get("skipped") or {}),
            notes=tuple(map(str, content.get("notes") or ())),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        source.problems.append(f"{file} cannot be read ({' '.join(str(error).split())})")
        return None


def _label_stages(stages: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    rerank, images, texts = (content.get(name) or 0 for name in ("rerank", "images", "texts"))
    top = reranked_top(rerank, images, texts) if images or texts else rerank
    labels = {"dual": "dual encoder", "rerank": f"re-ranked top {top}"}
    return {labels.get(stage, stage): figures for stage, figures in stages.items()}


def _flatten_figures(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Figure]]:
    """Yield the figures of nested objects; names are joined by ` / `."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value.keys() >= {"value", "low", "high"}:
            figure = Figure(*(float(value[field]) for field in Figure._fields))
            yield (prefix + name).replace("_", " "), figure
        elif isinstance(value, Mapping):
            yield from _flatten_figures(value, f"{prefix}{name} / ")
        elif isinstance(value, int | float) and not prefix:
            # A figure of a vision model, in percent and without an interval.
            yield name, Figure(value / 100, value / 100, value / 100, 0.0)
