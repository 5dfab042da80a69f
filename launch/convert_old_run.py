"""Conversion of folders with the former configuration keys: the script of `vlp convert-run`.

Configurations in `config.yaml`, `state.json`, `task.json` and `config.json` get the present keys
and task names, files of results those of their task, and `SHA256SUMS` the new sums.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from vlp.config import dump_yaml, parse_yaml
from vlp.io import atomic_folder, sha256_of

# Dotted key of a run's configuration -> its present name; a task's data may be a list or a mapping.
KEYS = {
    "start": "init_from",
    "training.accumulation": "gradient_accumulation_steps",
    "training.keep": "keep_last",
    "training.optimiser.scales": "lr_multipliers",
    "data.order": "sampler",
    "data.augment.mirror": "hflip",
    "task.pictures": "images",
    "task.data.order": "sampler",
    "task.data.mirror": "hflip",
    "task.data.augment.mirror": "hflip",
    "task.data.train.pictures": "images",
    "task.data.test.pictures": "images",
}
TASKS = {"entailment": "snli_ve", "statements": "nlvr2", "assignment": "nlvr2_assignment"}
# Dotted key, as it was named -> the present names of its values.
VALUES = {"task.kind": TASKS, "task.data.view": {"picture": "image"}}
RESULT_KEYS = {"picture": "image", "pictures": "images"}
RESULTS, SUMS = "evaluation", "SHA256SUMS"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vlp convert-run`; returns the exit code (2: wrong input)."""
    from launch.cli.main import run_script

    return run_script("convert-run", arguments)


def convert(old: Path, new: Path) -> list[Path]:
    """Copy a folder and rewrite its configurations; returns the files that changed.

    Raises:
        OSError: `old` is no folder, `new` exists or lies in `old`, or the disk is full. Nothing of
            a failed conversion is left.
        ValueError: a configuration is not valid JSON or YAML; the file is named.
    """
    if not old.is_dir():
        raise NotADirectoryError(f"{old} is not a folder")
    if new.exists():
        raise FileExistsError(f"{new} exists; name a new folder")
    if new.resolve().is_relative_to(old.resolve()):
        raise OSError(f"{new} lies in {old}; name a folder elsewhere")
    with atomic_folder(new) as partial:
        shutil.copytree(old, partial)
        changed = _rewrite(partial)
    return [new / path.relative_to(partial) for path in changed]


def run_config(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a run's configuration with the present keys and task names.

    Args:
        values: as read from a file, of a pretraining, fine-tuning or vision run.
        prefix: dotted key that these values have in the whole configuration.
    """
    result = {}
    for key, value in values.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            value = run_config(value, path)
        elif isinstance(value, str):
            value = VALUES.get(path, {}).get(value, value)
        result[KEYS.get(path, key)] = value
    return result


def result_file(values: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation's result, or one of its predictions, with the present keys."""
    converted: dict[str, Any] = _renamed(values)
    if converted.get("task") in TASKS:
        converted["task"] = TASKS[converted["task"]]
    return converted


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {RESULT_KEYS.get(key, key): _renamed(inner) for key, inner in value.items()}
    return [_renamed(inner) for inner in value] if isinstance(value, list) else value


def _part(key: str, prefix: str = "") -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Convert the configuration that a file holds under one key, where it holds one."""

    def convert_part(values: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(values.get(key), dict):
            return values
        return values | {key: run_config(values[key], prefix)}

    return convert_part


FILES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "config.yaml": run_config,
    "state.json": _part("config"),
    "task.json": _part("task", "task"),
    "config.json": _part("task", "task"),
}


def _rewrite(folder: Path) -> list[Path]:
    changed = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and _converted(path):
            changed.append(path)
    for parent in {path.parent for path in changed}:
        if (parent / SUMS).exists():
            _sum_again(parent, [path for path in changed if path.parent == parent])
    return [_present_name(path) for path in changed]


def _converted(path: Path) -> bool:
    """Rewrite one file in its place; False where it is none of ours or has the present keys."""
    results = path.parent.name == RESULTS
    if path.name in FILES:
        rewrite = FILES[path.name]
    elif results and path.suffix in (".json", ".jsonl"):
        rewrite = result_file
    else:
        return False
    text = path.read_text(encoding="utf-8")
    try:
        before = _read(path.suffix, text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    after = [rewrite(part) if isinstance(part, dict) else part for part in before]
    if after == before:
        return results and path.name.partition(".")[0] in TASKS
    path.write_text(_written(path.suffix, after), encoding="utf-8")
    return True


def _read(suffix: str, text: str) -> list[Any]:
    """Return the values of a file: one, or that of each line."""
    if suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return [parse_yaml(text) if suffix == ".yaml" else json.loads(text)]


def _written(suffix: str, values: list[Any]) -> str:
    if suffix == ".jsonl":
        return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    (value,) = values
    return dump_yaml(value) if suffix == ".yaml" else json.dumps(value, indent=1) + "\n"


def _present_name(path: Path) -> Path:
    """Give a file of results the name of its task."""
    stem, dot, rest = path.name.partition(".")
    if path.parent.name != RESULTS or stem not in TASKS:
        return path
    return path.rename(path.with_name(TASKS[stem] + dot + rest))


def _sum_again(folder: Path, files: list[Path]) -> None:
    sums = {path.name: sha256_of(path) for path in files}
    lines = [line.split("  ", 1) for line in (folder / SUMS).read_text().splitlines()]
    text = "".join(f"{sums.get(name, digest)}  {name}\n" for digest, name in lines)
    (folder / SUMS).write_text(text)


if __name__ == "__main__":
    sys.exit(main())
