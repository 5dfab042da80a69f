"""Several models, each on several tasks; a result that exists is kept."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.core.results import Table, attributed
from evaluation.core.samples import EvaluationError, kinds_in_words
from evaluation.core.saved_results import Saved, saved_figures
from evaluation.core.work_sharding import Ranks
from evaluation.downstream.job import Job
from evaluation.suite.others import OtherModel
from evaluation.suite.suite_config import EvaluatedModel, SuiteConfig
from evaluation.suite.suite_jobs import job_key, model_of, run_job
from vlp.config import ConfigError
from vlp.io import atomic_folder, parse_json, write_json

JOB = "job.json"
_OF_THE_USER = (ConfigError, EvaluationError, FileNotFoundError, ValueError)


@dataclass(frozen=True)
class SuiteResult:
    """Results by model and label of the task; failures likewise, each one line of what was wrong.

    labels: of the tasks, in the order in which they come first.
    """

    models: tuple[str, ...]
    labels: tuple[str, ...]
    results: dict[tuple[str, str], dict[str, Any]]
    failures: dict[tuple[str, str], str]

    def tables(self) -> list[Table]:
        """One a task, with a column a model, and the summary with a row a model."""
        saved = {name: saved_figures(content) for name, content in self.results.items()}
        tables = [table for label in self.labels if (table := self._of_task(label, saved))]
        return [*tables, self._summary(saved)]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
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
        names = list(dict.fromkeys(name for own in figures.values() for name in own))
        rows = []
        for name in names:
            cells = [
                figures[model][name].percent() if name in figures[model] else "–"
                for model in columns
            ]
            chance = next((own[name].chance for own in figures.values() if name in own), 0.0)
            rows.append([name, *cells, f"{100 * chance:.1f}" if chance else ""])
        notes = ["Percent; in brackets 95 % bootstrap intervals over images."]
        notes += self._notes(label, columns)
        title = f"{label}: {', '.join(content['shards'])}"
        return Table(title, ["", *columns, "chance"], rows, notes)

    def _notes(self, label: str, models: Sequence[str]) -> Iterator[str]:
        """Return notes under a task's tables, with the models where not all have them."""
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
                own = saved.get((model, label))
                missing = "failed" if (model, label) in self.failures else "–"
                cells.append(missing if own is None else own.figures[own.main].percent())
            rows.append(cells)
        mains = {label: own.main for (_, label), own in saved.items()}
        told = ", ".join(f"{label}: {mains[label]}" for label in self.labels if label in mains)
        return Table("All models", ["", *self.labels], rows, [f"{told}." if told else ""])


def run_suite(
    config: SuiteConfig,
    out: Path,
    device: str | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> SuiteResult:
    """Evaluate what is not there yet below `out` (MODEL/TASK), and gather everything.

    A result is kept as long as the files of its model, its options and its data (`job_key`) stay
    the same. One that fails is named and does not stop the others.

    Args:
        config: models and tasks.
        out: folder of the results.
        device: where to compute; None is this rank's GPU, or the CPU.
        workers: processes that read; None: this rank's cores up to 8 on a GPU, none on a CPU.
        progress: lines and bars on the first rank.
    """
    results: dict[tuple[str, str], dict[str, Any]] = {}
    failures: dict[tuple[str, str], str] = {}
    sums: dict[Path | OtherModel, str] = {}
    told = progress and Ranks.current().first
    for entry in config.models:
        for job in entry.tasks:
            name = entry.name, job.label
            try:
                results[name] = _result(entry, job, out, sums, progress, device, workers)
            except Exception as error:
                failures[name] = " ".join(str(error).split()) or repr(error)
                if not isinstance(error, _OF_THE_USER) and told:
                    traceback.print_exception(error, file=sys.stderr)
                if told:
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
    """Return the saved result of one job, evaluated now where it is missing."""
    ranks, target = Ranks.current(), out / entry.name / job.label
    folder = model_of(job, entry.model)

    def kept() -> tuple[str, dict[str, Any] | None, str]:
        try:
            key = job_key(job, folder, sums)
        except EvaluationError as error:
            return "", None, str(error)
        return key, _saved(target, key, job.task), ""

    # One rank decides, so that all do the same.
    ((key, content, problem),) = ranks.map_blocks(1, lambda _: kept())
    if problem:
        raise EvaluationError(problem)
    name = f"{entry.name}/{job.label}"
    if content is not None:
        if progress and ranks.first:
            print(f"{name}: kept", flush=True)
        return content
    start = time.monotonic()
    result = run_job(job, folder, device, workers, progress)
    if ranks.first:
        _save(target, result, {"key": key, "model": str(folder), "options": _options(job)})
        if progress:
            print(f"{name}: judged in {time.monotonic() - start:.0f} s", flush=True)
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


def _save(folder: Path, result: Any, about: dict[str, Any]) -> None:
    """Save a result; the folder gets its name when it is complete."""
    with atomic_folder(folder) as partial:
        result.save(partial)
        write_json(partial / JOB, about)
