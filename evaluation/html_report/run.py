"""Settings and training data of a run, in rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from evaluation.html_report.sources import Source

# Dotted keys of config.yaml in the order that a reader asks; what a run has not is left out.
_SETTINGS = (
    ("init_from", "starts from"),
    ("task.kind", "task"),
    ("task.data.train", "trained on"),
    ("task.data.validation", "judged while training on"),
    ("data.sources", "trained on"),
    ("data.captions", "captions of an image"),
    ("objectives", "objectives"),
    ("training.epochs", "epochs"),
    ("training.steps", "steps"),
    ("training.batch", "batch"),
    ("training.gradient_accumulation_steps", "accumulated batches"),
    ("training.precision", "precision"),
    ("training.optimiser.learning_rate", "learning rate"),
    ("training.optimiser.weight_decay", "weight decay"),
    ("training.seed", "seed"),
    ("model.image.image_size", "image size, pixels"),
    ("model.image.patch_size", "patch size, pixels"),
    ("model.image.layers", "image layers"),
    ("model.text.layers", "text layers"),
    ("model.cross.layers", "cross-modal layers"),
    ("model.cross.position", "cross-modal positions"),
)


def settings(source: Source) -> list[tuple[str, str]]:
    """Labels and values of the resolved configuration."""
    rows = []
    for key, label in _SETTINGS:
        value: Any = source.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value not in (None, [], {}):
            rows.append((label, _said(value)))
    return rows


def whole_config(source: Source) -> str:
    """Return the resolved configuration as YAML; empty without one."""
    return yaml.safe_dump(source.config, sort_keys=False) if source.config else ""


def course(source: Source) -> list[tuple[str, str]]:
    """Return the course of the training from report.json, else from the log's last line."""
    return list(_course(source.training, source.log[-1] if source.log else {}))


def _course(training: Mapping[str, Any], last: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not training:
        if "step" in last:
            yield "ended", f"not yet, or it was killed; the last logged step is {last['step']}"
        return
    yield (
        "ended",
        f"{training.get('ended')} at step {training.get('step')} of "
        + str(training.get("total_steps")),
    )
    seconds, speed = training.get("seconds"), training.get("samples_per_second")
    if isinstance(seconds, int | float):
        yield "time", _time(seconds)
    if isinstance(speed, int | float):
        yield "speed", f"{speed:.1f} samples/s"
    if training.get("device"):
        ranks = training.get("ranks", 1)
        yield "device", f"{training['device']}, {ranks} rank{'s' if ranks != 1 else ''}"
    memory = training.get("peak_memory_bytes")
    if isinstance(memory, int | float):
        yield "peak memory", f"{memory / 2**30:.1f} GiB"
    best = training.get("best")
    if isinstance(best, Mapping):
        figures = ", ".join(
            f"{name} {value:.4g}"
            for name, value in best.items()
            if name != "step" and isinstance(value, int | float)
        )
        yield "best on validation", f"step {best.get('step')}: {figures}"
    for name, label in (("non_finite_steps", "non-finite steps"), ("resumed_at_steps", "resumed")):
        if training.get(name):
            yield label, _said(training[name])


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        if "path" in value:
            weight = value.get("weight", 1)
            return f"{value['path']}" + (f" (weight {weight:g})" if weight != 1 else "")
        return ", ".join(str(name) for name, part in value.items() if part)
    if isinstance(value, list):
        return ", ".join(map(_said, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
