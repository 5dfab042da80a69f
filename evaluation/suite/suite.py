"""Several models, each on several tasks; a result that exists is kept."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

import vlp
from evaluation.downstream.registry import get_evaluation
from evaluation.grounding.grounding import evaluate_grounding
from evaluation.jobs import JOBS, NAME, PROBES, Job, ZeroShotJob
from evaluation.options import EvalOptions
from evaluation.probes.foils import evaluate_foils
from evaluation.probes.swaps import evaluate_swaps
from evaluation.probes.word_pointing import evaluate_pointing
from evaluation.results import Result, Saved, Table, attributed, saved_figures
from evaluation.retrieval.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError, kinds_in_words, single_line_errors
from evaluation.suite.others import OtherModel, other_model
from evaluation.work_sharding import ProcessGroup
from evaluation.zeroshot import evaluate_zeroshot, read_prompts
from vlp.config import Choice, Config, ConfigError, LocalPath, validate
from vlp.data.shards.index import INDEX_NAME
from vlp.io import atomic_folder, parse_json, write_json
from vlp.models.pretrained.local_copy import local_folder
from vlp.tasks.downstream.registry import task_kinds


def job_names() -> tuple[str, ...]:
    """Return the names of all tasks and probes of a suite."""
    return (*task_kinds(), *PROBES)


def job_class(name: str) -> type[Job]:
    """Return the class of a job."""
    if name in PROBES:
        return PROBES[name]
    if name not in task_kinds():
        raise ValueError(f"unknown task {name!r}; there are {', '.join(map(repr, job_names()))}")
    return get_evaluation(name).job


AnyJob = Annotated[Job, Choice("task", job_names, job_class)]


class EvaluatedModel(Config):
    """A model, or the models of one method, under one name."""

    name: str = Field(pattern=NAME, description="its row in every table")
    model: str | None = Field(
        None,
        description="folder or hub name of all tasks that name none; a dual encoder of another "
        "library is `transformers:NAME` or `open_clip:ARCHITECTURE/TAG`",
    )
    tasks: tuple[AnyJob, ...] = Field(min_length=1, description="what it is evaluated on")

    @model_validator(mode="after")
    def _require_unique_tasks(self) -> EvaluatedModel:
        labels = [job.label for job in self.tasks]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"{self.name} has two tasks {label!r}: give each a `name`")
        for job in self.tasks:
            if job.model is None and self.model is None:
                raise ValueError(f"{self.name}, {job.label}: neither it nor its entry has a model")
        return self


class SuiteConfig(Config):
    """Models and tasks that one call evaluates."""

    output: LocalPath = Field(
        "runs/evaluation", description="folder of the results; --out replaces it"
    )
    models: tuple[EvaluatedModel, ...] = Field(min_length=1, description="that are compared")

    @model_validator(mode="after")
    def _require_same_data(self) -> SuiteConfig:
        names = [entry.name for entry in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are called {name!r}")
        first: dict[str, tuple[str, Job]] = {}
        for entry in self.models:
            for job in entry.tasks:
                owner, first_job = first.setdefault(job.label, (entry.name, job))
                if (first_job.task, first_job.shards, first_job.limit) != (
                    job.task,
                    job.shards,
                    job.limit,
                ):
                    raise ValueError(
                        f"{job.label} is another task, or of other shards, in {entry.name} than "
                        f"in {owner}; one table is about one set: give it a `name` of its own"
                    )
        return self


def suite_of(
    models: Sequence[str],
    shards: Sequence[str],
    labelled: Sequence[str] = (),
    classes: str | None = None,
    **options: Any,
) -> SuiteConfig:
    """Return the configuration of all evaluations that the data allow, for each model.

    shards: with captions; labelled: with classes, for zero-shot classification by `classes`.
    """
    if bool(labelled) != (classes is not None):
        raise ConfigError(
            "--labelled and --classes go together: images of classes, and their names"
        )
    tasks: list[dict[str, Any]] = [
        {"task": task, "shards": shards} for task in ("retrieval", "foils") if shards
    ]
    if labelled:
        tasks.append({"task": "zeroshot", "shards": labelled, "classes": classes})
    entries = [
        {"name": _row(model), "model": model, "tasks": [task | options for task in tasks]}
        for model in models
    ]
    return validate({"models": entries}, SuiteConfig, "vlp evaluate suite")


def _row(model: str) -> str:
    """Return a model's name with the characters of a folder's name."""
    return re.sub(r"[^\w.+@-]+", "-", model).strip("-.") or "model"


# A card is written after an evaluation, and must not make it obsolete.
_NOT_THE_MODEL = ("README.md", ".gitattributes")


# Evaluations that need only one vector per image and per text.
BY_FEATURES = ("retrieval", "zeroshot", "swaps", "foils")


def job_key(job: Job, folder: Path | OtherModel, sums: dict[Path | OtherModel, str]) -> str:
    """Hash a result's inputs: the model's files, the options, the data, the prompts.

    `sums` caches the hashes of model folders.
    """
    parts = [json.dumps(_options(job), sort_keys=True)]
    try:
        if folder not in sums:
            sums[folder] = (
                folder.checksum() if isinstance(folder, OtherModel) else model_checksum(folder)
            )
        parts.append(sums[folder])
        other_data = (*getattr(job, "bank", ()), *getattr(job, "features", ()))
        for shards in map(Path, (*job.shards, *other_data)):
            if not shards.exists():
                raise EvaluationError(f"{shards}: there is no such folder of shards")
            # An index covers contents; class folders and tars have names, sizes and times alone.
            index = shards / INDEX_NAME
            parts.append(_checksum(index) if index.is_file() else _stamps(shards))
        for name in ("classes", "templates"):
            file = getattr(job, name, None)
            parts.append("" if file is None else _checksum(Path(file)))
    except OSError as error:
        message = (
            f"{error.filename}: cannot be read ({error.strerror})" if error.filename else error
        )
        raise EvaluationError(str(message)) from error
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def model_checksum(folder: Path) -> str:
    """Compute SHA-256 over names and contents of a model folder's files, without its model card."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name not in _NOT_THE_MODEL:
            digest.update(f"{file.name}\n{_checksum(file)}\n".encode())
    return digest.hexdigest()


def run_job(
    job: Job, folder: Path | OtherModel, device: str | None, workers: int | None, progress: bool
) -> Result:
    """Evaluate a model folder, or a model of another library; the same for any number of ranks."""
    options = EvalOptions(job.limit, job.batch, device, job.precision, workers, progress=progress)
    job_options = job.options()
    if isinstance(folder, OtherModel):
        _require_features_alone(job, folder)
        loaded = folder.load()
    elif job.task in JOBS and job.task != "vqa":
        # These take any model folder.
        with single_line_errors():
            loaded = vlp.load(folder)
    else:
        result: Result = get_evaluation(job.task).evaluate_folder(
            folder, job.shards, options, **job_options
        )
        return result
    if isinstance(job, ZeroShotJob):
        prompts = read_prompts(job_options.pop("classes"), job_options.pop("templates"))
        return evaluate_zeroshot(loaded, job.shards, prompts, options, **job_options)
    evaluations: dict[str, Callable[..., Result]] = {
        "retrieval": evaluate_retrieval,
        "grounding": evaluate_grounding,
        "pointing": evaluate_pointing,
        "swaps": evaluate_swaps,
        "foils": evaluate_foils,
    }
    return evaluations[job.task](loaded, job.shards, options, **job_options)


def _require_features_alone(job: Job, model: OtherModel) -> None:
    if job.task not in BY_FEATURES:
        raise EvaluationError(
            f"{model} is a dual encoder: {job.task} needs more than its features; choose of "
            f"{', '.join(BY_FEATURES)}"
        )
    for option in ("rerank", "match"):
        if getattr(job, option, 0):
            raise EvaluationError(
                f"{model} has no cross-modal encoder: leave {option} of {job.task} at 0"
            )


def model_of(job: Job, model: str | None) -> Path | OtherModel:
    """Return the folder of a job's model, `model` being that of its entry."""
    name = job.model or model or ""
    other = other_model(name) if ":" in name else None
    return other or local_folder(name)


def _stamps(path: Path) -> str:
    """Hash names, sizes and times of a file, or of a folder and its class folders."""
    paths = (Path(f) / n for f, _, names in os.walk(path, followlinks=True) for n in names)
    files = sorted(paths) if path.is_dir() else [path]
    stamps = []
    for file in files:
        if file.is_file():
            stat = file.stat()
            stamps.append(f"{file.relative_to(path)}\t{stat.st_size}\t{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()


def _checksum(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


JOB = "job.json"
_OF_THE_USER = (ConfigError, EvaluationError, FileNotFoundError, ValueError)


@dataclass(frozen=True)
class SuiteResult:
    """Results and failures (one line each) by model and task label; labels in first-use order."""

    models: tuple[str, ...]
    labels: tuple[str, ...]
    results: dict[tuple[str, str], dict[str, Any]]
    failures: dict[tuple[str, str], str]

    def tables(self) -> list[Table]:
        """Return a table per task, with a column a model, and the summary with a row a model."""
        saved = {name: saved_figures(content) for name, content in self.results.items()}
        tables = [table for label in self.labels if (table := self._of_task(label, saved))]
        return [*tables, self._summary(saved)]

    def to_json(self) -> dict[str, Any]:
        """Return all results as plain JSON values."""
        return {
            "models": list(self.models),
            "results": [
                {"model": model, "name": label, **content}
                for (model, label), content in self.results.items()
            ],
            "failures": [
                {"model": model, "name": label, "error": error}
                for (model, label), error in self.failures.items()
            ],
        }

    def save(self, folder: Path) -> None:
        """Write `all.json` and `all.md`."""
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join(table.markdown() for table in self.tables())
        (folder / "all.md").write_text(text, encoding="utf-8")
        write_json(folder / "all.json", self.to_json(), allow_nan=False)

    def _of_task(self, label: str, saved: dict[tuple[str, str], Saved]) -> Table | None:
        columns = [model for model in self.models if (model, label) in saved]
        if not columns:
            return None
        content = self.results[columns[0], label]
        figures = {model: saved[model, label].figures for model in columns}
        names = list(dict.fromkeys(name for values in figures.values() for name in values))
        rows = []
        for name in names:
            cells = [
                figures[model][name].percent() if name in figures[model] else "–"
                for model in columns
            ]
            figure = next(values[name] for values in figures.values() if name in values)
            rows.append([name, *cells, figure.chance_percent()])
        notes = ["Percent; in brackets 95 % bootstrap intervals over images."]
        notes += self._notes(label, columns)
        title = f"{label}: {', '.join(content['shards'])}"
        return Table(title, ["", *columns, "chance"], rows, notes)

    def _notes(self, label: str, models: Sequence[str]) -> Iterator[str]:
        """Return notes under a task's table, each with its models unless all have it."""
        notes: dict[str, list[str]] = {}
        for model in models:
            content = self.results[model, label]
            notes[model] = list(content.get("notes") or ())
            if content.get("skipped"):
                notes[model].append(f"Skipped: {kinds_in_words(content['skipped'])}.")
        return attributed(notes)

    def _summary(self, saved: dict[tuple[str, str], Saved]) -> Table:
        rows = []
        for model in self.models:
            cells = [model]
            for label in self.labels:
                result = saved.get((model, label))
                missing = "failed" if (model, label) in self.failures else "–"
                cells.append(missing if result is None else result.figures[result.main].percent())
            rows.append(cells)
        mains = {label: result.main for (_, label), result in saved.items()}
        metrics = ", ".join(f"{label}: {mains[label]}" for label in self.labels if label in mains)
        return Table("All models", ["", *self.labels], rows, [f"{metrics}." if metrics else ""])


def run_suite(
    config: SuiteConfig,
    out: Path,
    device: str | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> SuiteResult:
    """Run missing evaluations below `out` (MODEL/TASK), and collect all results.

    A result is reused while its model's files, options and data (`job_key`) stay the same. Failures
    are named and do not stop the others.
    """
    results: dict[tuple[str, str], dict[str, Any]] = {}
    failures: dict[tuple[str, str], str] = {}
    sums: dict[Path | OtherModel, str] = {}
    verbose = progress and ProcessGroup.current().first
    for entry in config.models:
        for job in entry.tasks:
            name = entry.name, job.label
            try:
                results[name] = _result(entry, job, out, sums, progress, device, workers)
            except Exception as error:
                failures[name] = " ".join(str(error).split()) or repr(error)
                if not isinstance(error, _OF_THE_USER) and verbose:
                    traceback.print_exception(error, file=sys.stderr)
                if verbose:
                    print(f"{'/'.join(name)}: failed: {failures[name]}", file=sys.stderr)
    labels = dict.fromkeys(job.label for entry in config.models for job in entry.tasks)
    models = tuple(entry.name for entry in config.models)
    return SuiteResult(models, tuple(labels), results, failures)


def _result(
    entry: EvaluatedModel,
    job: Job,
    out: Path,
    sums: dict[Path | OtherModel, str],
    progress: bool,
    device: str | None,
    workers: int | None,
) -> dict[str, Any]:
    """Return the result of one job, saved or evaluated now."""
    processes, target = ProcessGroup.current(), out / entry.name / job.label
    folder = model_of(job, entry.model)

    def lookup() -> tuple[str, dict[str, Any] | None, str]:
        try:
            key = job_key(job, folder, sums)
        except EvaluationError as error:
            return "", None, str(error)
        return key, _saved(target, key, job.task), ""

    # One rank decides, so that all either read or evaluate.
    ((key, content, problem),) = processes.map_blocks(1, lambda _: lookup())
    if problem:
        raise EvaluationError(problem)
    name = f"{entry.name}/{job.label}"
    if content is not None:
        if progress and processes.first:
            print(f"{name}: kept", flush=True)
        return content
    start = time.monotonic()
    result = run_job(job, folder, device, workers, progress)
    if processes.first:
        _save(target, result, {"key": key, "model": str(folder), "options": _options(job)})
        if progress:
            print(f"{name}: judged in {time.monotonic() - start:.0f} s", flush=True)
    # Through JSON, so that fresh and saved results are equal.
    fresh: dict[str, Any] = json.loads(json.dumps(result.to_json()))
    return fresh


def _options(job: Job) -> dict[str, Any]:
    return job.model_dump(mode="json", exclude={"name", "model"})


def _saved(folder: Path, key: str, task: str) -> dict[str, Any] | None:
    try:
        if parse_json((folder / JOB).read_text(encoding="utf-8"))["key"] != key:
            return None
        content: dict[str, Any] = parse_json((folder / f"{task}.json").read_text(encoding="utf-8"))
        saved_figures(content)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return content


def _save(folder: Path, result: Result, metadata: dict[str, Any]) -> None:
    """Save a result; the folder gets its name when it is complete."""
    with atomic_folder(folder) as partial:
        result.save(partial)
        write_json(partial / JOB, metadata)
