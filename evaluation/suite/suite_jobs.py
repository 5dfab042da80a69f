"""One job of a suite: the key of what it depends on, and its evaluation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import vlp
from evaluation.core.results import Table
from evaluation.core.samples import EvaluationError
from evaluation.downstream.job import Job
from evaluation.downstream.registry import get_evaluation
from evaluation.probes.foils import evaluate_foils
from evaluation.probes.pointing import evaluate_pointing
from evaluation.probes.winoground import evaluate_swaps
from evaluation.retrieval.retrieval import evaluate_retrieval
from evaluation.suite.others import OtherModel, other_model
from evaluation.suite.suite_config import PROBES, ZeroShotJob
from evaluation.zeroshot.prompts import read_prompts
from evaluation.zeroshot.zeroshot import evaluate_zeroshot
from vlp.data.shards.index import INDEX_NAME
from vlp.models.pretrained.local_copy import local_folder

_NOT_THE_MODEL = ("README.md", ".gitattributes")
_CHUNK = 2**22


class JobResult(Protocol):
    """Result of a job."""

    def table(self) -> Table:
        """For the person."""

    def to_json(self) -> dict[str, Any]:
        """For `evaluation.core.saved_results`."""

    def save(self, folder: str | Path) -> Path:
        """For files."""


BY_FEATURES = ("retrieval", "zeroshot", "swaps", "foils")
"""What needs of a model no more than one vector of an image, and one of a text."""


def job_key(job: Job, folder: Path | OtherModel, sums: dict[Path | OtherModel, str]) -> str:
    """Hash what a result depends on: the model's files, the options, the data, the prompts.

    The data are the shards' index, which knows their contents; of class folders and tars, which
    have none, they are names, sizes and times of change.

    Args:
        job: to evaluate.
        folder: of the model, or a model of another library.
        sums: of model folders that were read before; filled.

    Raises:
        EvaluationError: there are no such shards, or a file cannot be read.
    """
    options = job.model_dump(mode="json", exclude={"name", "model"})
    parts = [json.dumps(options, sort_keys=True)]
    try:
        if folder not in sums:
            sums[folder] = (
                folder.checksum() if isinstance(folder, OtherModel) else model_checksum(folder)
            )
        parts.append(sums[folder])
        for shards in map(Path, job.shards):
            if not shards.exists():
                raise EvaluationError(f"{shards}: there is no such folder of shards")
            index = shards / INDEX_NAME
            parts.append(_checksum(index) if index.is_file() else _stamps(shards))
        for name in ("classes", "templates"):
            file = getattr(job, name, None)
            parts.append("" if file is None else _checksum(Path(file)))
    except OSError as error:
        said = f"{error.filename}: cannot be read ({error.strerror})" if error.filename else error
        raise EvaluationError(str(said)) from error
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def model_checksum(folder: Path) -> str:
    """Compute SHA-256 over names and contents of a model folder's files, without its model card."""
    whole = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name not in _NOT_THE_MODEL:
            whole.update(f"{file.name}\n{_checksum(file)}\n".encode())
    return whole.hexdigest()


def run_job(
    job: Job,
    folder: Path | OtherModel,
    device: str | None,
    workers: int | None,
    progress: bool,
) -> JobResult:
    """Evaluate a model folder, or a model of another library; the same for any number of ranks.

    Raises:
        EvaluationError: the model is of another kind, a dual encoder cannot do it, or nothing can
            be evaluated.
        ConfigError: shards cannot be read.
        FileNotFoundError: there is no such model.
        ValueError: the model folder is damaged.
    """
    shared = {"limit", "batch", "precision"}
    own = set(type(job).model_fields) - set(Job.model_fields)
    options = job.model_dump(include=shared | own)
    options |= {"device": device, "workers": workers, "progress": progress}
    result: JobResult
    if isinstance(folder, OtherModel):
        _require_features_alone(job, folder)
        loaded = folder.load()
        if job.task not in PROBES:
            return evaluate_retrieval(loaded, job.shards, **options)
    elif job.task not in PROBES:
        result = get_evaluation(job.task).evaluate_folder(folder, job.shards, **options)
        return result
    else:
        loaded = vlp.load(folder)
    if isinstance(job, ZeroShotJob):
        prompts = read_prompts(options.pop("classes"), options.pop("templates"))
        return evaluate_zeroshot(loaded, job.shards, prompts, **options)
    probes: dict[str, Any] = {
        "pointing": evaluate_pointing,
        "swaps": evaluate_swaps,
        "foils": evaluate_foils,
    }
    result = probes[job.task](loaded, job.shards, **options)
    return result


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
    """Return the folder of a job's model, `model` being that of its entry.

    Raises:
        FileNotFoundError: there is no such model.
    """
    name = job.model or model or ""
    return other_model(name) or local_folder(name)


def _stamps(place: Path) -> str:
    """Hash names, sizes and times of a file, or of a folder and its class folders."""
    files = sorted([*place.glob("*"), *place.glob("*/*")]) if place.is_dir() else [place]
    stamps = []
    for file in files:
        if file.is_file():
            about = file.stat()
            stamps.append(f"{file.relative_to(place)}\t{about.st_size}\t{about.st_mtime_ns}")
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()


def _checksum(file: Path) -> str:
    content = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            content.update(chunk)
    return content.hexdigest()
