"""Evaluation of several models on several tasks; results that exist are reused."""

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

from evaluation.downstream.task_evaluation import get_evaluation, load_model
from evaluation.jobs import NAME, PROBES, Job, ZeroShotJob
from evaluation.options import EvalOptions
from evaluation.probes.foils import evaluate_foils
from evaluation.probes.swaps import evaluate_swaps
from evaluation.probes.word_pointing import evaluate_pointing
from evaluation.results import Result, SavedFigures, Table, merge_notes, saved_figures
from evaluation.retrieval.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError, format_kinds
from evaluation.suite.others import OtherModel, other_model
from evaluation.work_sharding import ProcessGroup
from evaluation.zeroshot import evaluate_zeroshot, read_prompts
from vlp.config import Choice, Config, ConfigError, LocalPath, validate
from vlp.data.shards.sample_files import DataError
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
    """A model of the tables, or one model for each task."""

    name: str = Field(pattern=NAME, description="its name in every table")
    model: str | None = Field(
        None,
        description="folder or hub name, for tasks without a `model`; a dual encoder of another "
        "library is `transformers:NAME` or `open_clip:ARCHITECTURE/TAG`",
    )
    tasks: tuple[AnyJob, ...] = Field(min_length=1, description="tasks to evaluate it on")

    @model_validator(mode="after")
    def _require_unique_tasks(self) -> EvaluatedModel:
        labels = [job.label for job in self.tasks]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"{self.name} has two tasks {label!r}: give each a `name`")
        for job in self.tasks:
            if job.model is None and self.model is None:
                raise ValueError(f"{self.name}, {job.label}: set `model` of the task or the entry")
        return self


class SuiteConfig(Config):
    """Models and tasks that one call evaluates."""

    output: LocalPath = Field(
        "runs/evaluation", description="folder of the results; --out replaces it"
    )
    models: tuple[EvaluatedModel, ...] = Field(min_length=1, description="models to compare")

    @model_validator(mode="after")
    def _require_same_data(self) -> SuiteConfig:
        names = [entry.name for entry in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are called {name!r}")
        # Name of the first model with a label, and its data.
        first: dict[str, tuple[str, Any]] = {}
        for entry in self.models:
            for job in entry.tasks:
                data = job.task, job.shards, job.limit
                owner, first_data = first.setdefault(job.label, (entry.name, data))
                if data != first_data:
                    raise ValueError(
                        f"{job.label} differs in task, shards or limit between {owner} and "
                        f"{entry.name}: give one of them another `name`"
                    )
        return self


def suite_of(
    models: Sequence[str],
    shards: Sequence[str],
    labelled: Sequence[str] = (),
    classes: str | None = None,
    **options: Any,
) -> SuiteConfig:
    """Return a suite of all evaluations that the data allow, for each model.

    shards: folders with captions. labelled: images with classes, and classes: file of the class
    names, for zero-shot classification. options: fields of every job.
    """
    if bool(labelled) != (classes is not None):
        raise ConfigError("--labelled and --classes go together: set both or neither")
    tasks: list[dict[str, Any]] = [
        {"task": task, "shards": shards} for task in ("retrieval", "foils") if shards
    ]
    if labelled:
        tasks.append({"task": "zeroshot", "shards": labelled, "classes": classes})
    entries = [
        {"name": _folder_name(model), "model": model, "tasks": [task | options for task in tasks]}
        for model in models
    ]
    return validate({"models": entries}, SuiteConfig, "vlp evaluate suite")


def _folder_name(model: str) -> str:
    return re.sub(r"[^\w.+@-]+", "-", model).strip("-.") or "model"


# Files of a model folder that no checksum covers: a card is written after an evaluation.
_CARD_FILES = ("README.md", ".gitattributes")

# Tasks of dual encoders, which have one feature per image and per text.
DUAL_ENCODER_TASKS = ("retrieval", "zeroshot", "swaps", "foils")


def job_key(job: Job, model: Path | OtherModel, checksums: dict[Path | OtherModel, str]) -> str:
    """Return a hash of the inputs of a result: model files, options, data and prompts.

    checksums: cache of the models' checksums, which this call fills.
    """
    parts = [json.dumps(_options(job), sort_keys=True)]
    try:
        if model not in checksums:
            checksums[model] = (
                model.checksum() if isinstance(model, OtherModel) else model_checksum(model)
            )
        parts.append(checksums[model])
        other_data = (*getattr(job, "bank", ()), *getattr(job, "features", ()))
        for shards in map(Path, (*job.shards, *other_data)):
            if not shards.exists():
                raise EvaluationError(f"{shards}: there is no such folder of shards")
            # All files, not the index alone, which stays the same if only captions change.
            parts.append(_hash_file_stats(shards))
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
        if file.is_file() and file.name not in _CARD_FILES:
            digest.update(f"{file.name}\n{_checksum(file)}\n".encode())
    return digest.hexdigest()


def run_job(
    job: Job, model: Path | OtherModel, device: str | None, workers: int | None, progress: bool
) -> Result:
    """Evaluate a model folder, or a model of another library; the same for any number of ranks."""
    options = EvalOptions(job.limit, job.batch, device, job.precision, workers, progress=progress)
    job_options = job.options()
    if isinstance(model, OtherModel):
        _require_dual_encoder_task(job, model)
        loaded = model.load()
    elif job.task in PROBES:
        loaded = load_model(model)
    else:
        result: Result = get_evaluation(job.task).evaluate_folder(
            model, job.shards, options, **job_options
        )
        return result
    if isinstance(job, ZeroShotJob):
        prompts = read_prompts(job_options.pop("classes"), job_options.pop("templates"))
        return evaluate_zeroshot(loaded, job.shards, prompts, options, **job_options)
    evaluations: dict[str, Callable[..., Result]] = {
        "retrieval": evaluate_retrieval,
        "pointing": evaluate_pointing,
        "swaps": evaluate_swaps,
        "foils": evaluate_foils,
    }
    return evaluations[job.task](loaded, job.shards, options, **job_options)


def _require_dual_encoder_task(job: Job, model: OtherModel) -> None:
    if job.task not in DUAL_ENCODER_TASKS:
        raise EvaluationError(
            f"{model} is a dual encoder, and {job.task} needs a cross-modal encoder; choose one of "
            f"{', '.join(DUAL_ENCODER_TASKS)}"
        )
    for option in ("rerank", "match"):
        if getattr(job, option, 0):
            raise EvaluationError(
                f"{model} has no cross-modal encoder: leave {option} of {job.task} at 0"
            )


def model_of(job: Job, default: str | None) -> Path | OtherModel:
    """Return the local folder of a job's model, or the model of another library.

    default: name of the model of a job without one.
    """
    name = job.model or default or ""
    other = other_model(name) if ":" in name else None
    return other or local_folder(name)


def _hash_file_stats(path: Path) -> str:
    """Hash name, size and modification time of a file, or of all files below a folder."""
    paths = (Path(f) / n for f, _, names in os.walk(path, followlinks=True) for n in names)
    files = sorted(paths) if path.is_dir() else [path]
    lines = []
    for file in files:
        if file.is_file():
            stat = file.stat()
            lines.append(f"{file.relative_to(path)}\t{stat.st_size}\t{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _checksum(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


JOB = "job.json"
# Wrong input; any other error is a defect, printed with its traceback.
_INPUT_ERRORS = (ConfigError, DataError, EvaluationError, FileNotFoundError, ValueError)


@dataclass(frozen=True)
class SuiteResult:
    """Results (JSON values) and failures (one line each) by (model, label of the task).

    models, labels: in the order of the configuration.
    """

    models: tuple[str, ...]
    labels: tuple[str, ...]
    results: dict[tuple[str, str], dict[str, Any]]
    failures: dict[tuple[str, str], str]

    def tables(self) -> list[Table]:
        """Return a table per task with a column per model, and a summary with a row per model."""
        saved = {name: saved_figures(content) for name, content in self.results.items()}
        tables = [table for label in self.labels if (table := self._task_table(label, saved))]
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

    def _task_table(self, label: str, saved: dict[tuple[str, str], SavedFigures]) -> Table | None:
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
        """Yield the notes under a task's table, see `merge_notes`."""
        notes: dict[str, list[str]] = {}
        for model in models:
            content = self.results[model, label]
            notes[model] = list(content.get("notes") or ())
            if content.get("skipped"):
                notes[model].append(f"Skipped: {format_kinds(content['skipped'])}.")
        return merge_notes(notes)

    def _summary(self, saved: dict[tuple[str, str], SavedFigures]) -> Table:
        rows = []
        for model in self.models:
            cells = [model]
            for label in self.labels:
                result = saved.get((model, label))
                missing = "failed" if (model, label) in self.failures else "–"
                cells.append(missing if result is None else result.figures[result.main].percent())
            rows.append(cells)
        names = {label: result.main for (_, label), result in saved.items()}
        metrics = ", ".join(f"{label}: {names[label]}" for label in self.labels if label in names)
        return Table("All models", ["", *self.labels], rows, [f"{metrics}." if metrics else ""])


def run_suite(
    config: SuiteConfig,
    out: Path,
    device: str | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> SuiteResult:
    """Run all evaluations, with results in `out`/MODEL/TASK.

    A result is reused while the model's files, the options and the data (`job_key`) stay the same.
    A failure does not stop the other evaluations.
    """
    results: dict[tuple[str, str], dict[str, Any]] = {}
    failures: dict[tuple[str, str], str] = {}
    checksums: dict[Path | OtherModel, str] = {}
    verbose = progress and ProcessGroup.current().first
    for entry in config.models:
        for job in entry.tasks:
            name = entry.name, job.label
            try:
                results[name] = _job_result(entry, job, out, checksums, progress, device, workers)
            except Exception as error:
                # The text of a DataError from a worker process has the whole traceback.
                message = error.plain_message if isinstance(error, DataError) else str(error)
                failures[name] = " ".join(message.split()) or repr(error)
                if not isinstance(error, _INPUT_ERRORS) and verbose:
                    traceback.print_exception(error, file=sys.stderr)
                if verbose:
                    print(f"{'/'.join(name)}: failed: {failures[name]}", file=sys.stderr)
    labels = dict.fromkeys(job.label for entry in config.models for job in entry.tasks)
    models = tuple(entry.name for entry in config.models)
    return SuiteResult(models, tuple(labels), results, failures)


def _job_result(
    entry: EvaluatedModel,
    job: Job,
    out: Path,
    checksums: dict[Path | OtherModel, str],
    progress: bool,
    device: str | None,
    workers: int | None,
) -> dict[str, Any]:
    """Return the saved result of a job, or evaluate it and save the result."""
    processes, target = ProcessGroup.current(), out / entry.name / job.label
    model = model_of(job, entry.model)

    def lookup() -> tuple[str, dict[str, Any] | None, str]:
        try:
            key = job_key(job, model, checksums)
        except EvaluationError as error:
            return "", None, str(error)
        return key, _saved_result(target, key, job.task), ""

    # On one rank, so that all ranks either reuse the result or evaluate.
    ((key, content, problem),) = processes.map_blocks(1, lambda _: lookup())
    if problem:
        raise EvaluationError(problem)
    name = f"{entry.name}/{job.label}"
    if content is not None:
        if progress and processes.first:
            print(f"{name}: reused", flush=True)
        return content
    start = time.monotonic()
    result = run_job(job, model, device, workers, progress)
    if processes.first:
        _save(target, result, {"key": key, "model": str(model), "options": _options(job)})
        if progress:
            print(f"{name}: evaluated in {time.monotonic() - start:.0f} s", flush=True)
    # Through JSON, so that a new result equals its saved form.
    content = json.loads(json.dumps(result.to_json()))
    return content


def _options(job: Job) -> dict[str, Any]:
    return job.model_dump(mode="json", exclude={"name", "model"})


def _saved_result(folder: Path, key: str, task: str) -> dict[str, Any] | None:
    try:
        if parse_json((folder / JOB).read_text(encoding="utf-8"))["key"] != key:
            return None
        content: dict[str, Any] = parse_json((folder / f"{task}.json").read_text(encoding="utf-8"))
        saved_figures(content)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return content


def _save(folder: Path, result: Result, metadata: dict[str, Any]) -> None:
    """Save a result and its metadata in one atomic write of the folder."""
    with atomic_folder(folder) as partial:
        result.save(partial)
        write_json(partial / JOB, metadata)
