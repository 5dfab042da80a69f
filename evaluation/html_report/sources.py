"""Sources of a report: run folders, model folders and folders of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from evaluation.results import Figure
from evaluation.samples import EvaluationError
from vlp.config import parse_yaml
from vlp.io import parse_json, redacted_values
from vlp.models.folder import WEIGHTS
from vlp.models.pretrained.local_copy import CONFIG, RESULTS, results_folder
from vlp.tasks.downstream.task import TASK
from vlp.training.run_folder import read_log

LOOKED_FOR = (
    "results (KIND.json in it, or in evaluation/, evaluation/best/, evaluation/model/), "
    f"a model ({WEIGHTS}, or best/, model/), log.jsonl, report.json, config.yaml"
)
PREDICTIONS = ".predictions.jsonl"
_MODELS = ("best", "model")
_TAILS = {"best", "model", "evaluation"}
_ARROWS = {"text_to_image": "text → image", "image_to_text": "image → text", "both": "both"}
_FIGURE = {"value", "low", "high"}
_ABOUT = {"task", "shards", "skipped", "notes", "figures", "kinds", "rerank", "bank_shared"}


class StoredResult(NamedTuple):
    """One KIND.json: figures by name, and for retrieval by stage in `variants`.

    variants: what was done ("" or "dual encoder", "re-ranked top 16") -> figures by name. counts:
    what was evaluated, such as {"images": 1000}.
    """

    kind: str
    file: Path
    variants: dict[str, dict[str, Figure]]
    counts: dict[str, int]
    shards: tuple[str, ...]
    skipped: dict[str, int]
    notes: tuple[str, ...]

    @property
    def predictions(self) -> Path | None:
        """Return the file of its predictions, where there is one."""
        file = self.file.with_name(self.file.stem + PREDICTIONS)
        return file if file.is_file() else None


@dataclass
class Source:
    """One RUN of the command line: what was found there; `missing` says what was not, or not whole.

    name: from its folder. log: lines of log.jsonl. training: report.json. task: kind of a
    fine-tuned model.
    """

    folder: Path
    name: str
    model: Path | None = None
    task: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)
    results: list[StoredResult] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> dict[str, int]:
        """Return the samples that training skipped, by kind."""
        found = self.training.get("skipped_samples")
        return dict(found) if isinstance(found, Mapping) else {}


def read_sources(folders: Sequence[str | Path]) -> list[Source]:
    """Read every folder.

    Raises:
        EvaluationError: one is not there, or holds nothing that a report shows.
    """
    paths = [Path(folder) for folder in folders]
    return [_read(path, name) for path, name in zip(paths, short_names(paths))]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last telling part of each path; more of it where two are the same."""
    parts = [path.resolve().parts for path in paths]
    cut = [len(own) for own in parts]
    for number, own in enumerate(parts):
        while cut[number] > 1 and own[cut[number] - 1] in _TAILS:
            cut[number] -= 1
    names = [own[end - 1] for own, end in zip(parts, cut)]
    for length in range(1, max(map(len, parts), default=0) + 1):
        again = [number for number, name in enumerate(names) if names.count(name) > 1]
        if not again:
            break
        for number in again:
            names[number] = "/".join(parts[number][-length:])
    return names


def _read(folder: Path, name: str) -> Source:
    if not folder.is_dir():
        raise EvaluationError(f"{folder}: there is no such folder")
    source = Source(folder, name)
    source.model = next((path for path in _model_places(folder) if _is_model(path)), None)
    run = next((path for path in (folder, *folder.absolute().parents[:2]) if _is_run(path)), None)
    if run is not None and (run == folder or _belongs(folder, run)):
        source.config = redacted_values(_yaml(run / "config.yaml", source))
        source.log, bad = read_log(run / "log.jsonl")
        if bad:
            source.missing.append(f"{run / 'log.jsonl'}: {bad} lines cannot be read")
        source.training = _json(run / "report.json", source)
    source.results = list(_results(folder, source))
    if not (source.model or source.config or source.log or source.training or source.results):
        damaged = f" ({'; '.join(source.missing)})" if source.missing else ""
        raise EvaluationError(f"{folder}: nothing to report{damaged}; looked for {LOOKED_FOR}")
    if source.model is not None:
        task = _json(source.model / TASK, source).get("task")
        source.task = task.get("kind") if isinstance(task, dict) else None
    for found, what in (
        (source.results, "results of `python -m evaluation TASK`"),
        (source.log, "log.jsonl, so no curves"),
        (source.model, "model folder, so no maps"),
    ):
        if not found:
            source.missing.append(f"no {what}")
    return source


def _model_places(folder: Path) -> Iterator[Path]:
    yield folder
    yield from (folder / name for name in _MODELS)
    whole = folder.absolute()
    if whole.name == RESULTS:
        yield whole.parent
    elif whole.parent.name == RESULTS:
        yield whole.parent.parent / whole.name


def _is_model(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file()


def _is_run(folder: Path) -> bool:
    # A model folder has a configuration of its own, which is JSON.
    return any((folder / name).is_file() for name in ("log.jsonl", "config.yaml"))


def _belongs(folder: Path, run: Path) -> bool:
    """Return whether a folder is the model of a run, or its results."""
    return set(folder.absolute().relative_to(run).parts) <= _TAILS


def _yaml(file: Path, source: Source) -> dict[str, Any]:
    try:
        found = parse_yaml(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        return _damaged(file, error, source)
    return found if isinstance(found, dict) else {}


def _json(file: Path, source: Source) -> dict[str, Any]:
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        return _damaged(file, error, source)
    return found if isinstance(found, dict) else {}


def _damaged(file: Path, error: Exception, source: Source) -> dict[str, Any]:
    source.missing.append(f"{file} cannot be read ({' '.join(str(error).split())})")
    return {}


def _results(folder: Path, source: Source) -> Iterator[StoredResult]:
    places = [folder, results_folder(folder), folder / RESULTS]
    for name in _MODELS:
        places += [folder / RESULTS / name, folder / name / RESULTS]
    seen = set()
    for place in places:
        for file in sorted(place.glob("*.json")):
            if file.name in {CONFIG, TASK, "report.json"} or file.stem in seen:
                continue
            result = read_result(file, source)
            if result is not None:
                # Those of the best model come first; the last one's would say the same again.
                seen.add(file.stem)
                yield result


def read_result(file: Path, source: Source) -> StoredResult | None:
    """Read the figures of a file; None if it holds none."""
    found = _json(file, source)
    named = found.get("figures", found.get("kinds"))
    if file.stem == "vision" and "task" not in found:
        named, found = found, {"task": "vision"}
    if not isinstance(found.get("task"), str) or named is None:
        return None
    try:
        variants = (
            _staged(named, found) if isinstance(named, list) else {"": dict(_figures(named, ""))}
        )
        counts = {
            name: value
            for name, value in found.items()
            if isinstance(value, int) and name not in _ABOUT and not isinstance(value, bool)
        }
        return StoredResult(
            kind=found["task"],
            file=file,
            variants=variants,
            counts=counts,
            shards=tuple(map(str, found.get("shards") or ())),
            skipped=dict(found.get("skipped") or {}),
            notes=tuple(map(str, found.get("notes") or ())),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _damaged(file, error, source)
        return None


def _staged(
    rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]
) -> dict[str, dict[str, Figure]]:
    """Retrieval's: a list, by stage and direction."""
    labels = {"dual": "dual encoder", "rerank": f"re-ranked top {found.get('rerank')}"}
    variants: dict[str, dict[str, Figure]] = {}
    for row in rows:
        own = variants.setdefault(labels.get(row["stage"], row["stage"]), {})
        arrow = _ARROWS.get(row["direction"], row["direction"])
        own[f"{arrow} {row['name']}"] = _figure(row)
    return variants


def _figures(named: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Figure]]:
    for name, value in named.items():
        if isinstance(value, Mapping) and value.keys() >= _FIGURE:
            yield (prefix + name).replace("_", " "), _figure(value)
        elif isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{name} / ")
        elif isinstance(value, int | float) and not prefix:
            # A vision model's, in percent and without an interval.
            yield name, Figure(value / 100, value / 100, value / 100, 0.0)


def _figure(row: Mapping[str, Any]) -> Figure:
    value, low, high, chance = (float(row[name]) for name in Figure._fields)
    return Figure(value, low, high, chance)
