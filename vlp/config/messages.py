"""Words for configurations that are wrong: the key, where it stands, the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from vlp.config.schema import Choice, Config

_ELSEWHERE = {
    **dict.fromkeys(("lr", "base_lr", "max_lr"), "learning_rate"),
    "wd": "weight_decay",
    **dict.fromkeys(("batch_size", "bs", "per_device_train_batch_size"), "batch"),
    "num_workers": "workers",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "warmup": "warmup_steps",
    **dict.fromkeys(("amp", "dtype", "bf16", "fp16", "mixed_precision"), "precision"),
    **dict.fromkeys(("output_dir", "save_dir", "name"), "output"),
    **dict.fromkeys(("pretrained", "checkpoint"), "init_from"),
    **dict.fromkeys(("train_data", "dataset", "shards"), "sources"),
    "img_size": "image_size",
}
"""Keys of this package by their names in others."""


def explain(
    error: ValidationError, schema: type[Config], origins: Mapping[str, str], path: Path
) -> str:
    """Say what is wrong with values, a line for each.

    Args:
        error: of the validation.
        schema: what they should be.
        origins: where a dotted key stands, if not in the file.
        path: the file.
    """
    lines = []
    for problem in error.errors():
        location, fields = _location(problem["loc"], schema)
        key = ".".join(location)
        named = next(
            (
                origins[".".join(location[:n])]
                for n in range(len(location), 0, -1)
                if ".".join(location[:n]) in origins
            ),
            str(path),
        )
        if problem["type"] == "extra_forbidden":
            near = _nearest(".".join([*fields, location[-1]]), schema)
            lines.append(f"{named}: unknown key '{key}'; {near}")
        elif problem["type"] == "missing":
            lines.append(f"{named}: the key '{key}' is required")
        else:
            lines.append(": ".join(filter(None, [named, key and f"'{key}'", _said(key, problem)])))
    return "\n".join(lines)


def _said(key: str, problem: Mapping[str, Any]) -> str:
    """Say what is wrong with a value, with the value where it is short."""
    given, said = problem["input"], problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("tuple_type", "list_type") and isinstance(given, str | int | float):
        return f"should be a list, as in {key}='[{given}]'"
    if problem["type"] == "value_error" or isinstance(given, Mapping | list | tuple):
        return said
    return f"{said} (given: {given!r})"


def _location(parts: Sequence[str | int], schema: type[Config]) -> tuple[list[str], list[str]]:
    """The key as it is written, and the fields of the schema in it, as in `_schema_paths`.

    Of a choice by `kind`, the chosen kind is no part of it; a place in a list is no field.
    """
    types: list[type[Config]] = [schema]
    location, names = [], []
    for part in parts:
        fields = [kind.model_fields[part] for kind in types if part in kind.model_fields]
        if not fields and len(types) > 1:
            chosen = [kind for kind in types if _tag(kind) == part]
            if chosen:
                types = chosen
                continue
        location.append(str(part))
        if fields:
            types = [inner for field in fields for inner in _field_types(field)]
            names.append(str(part))
    return location, names


def _tag(schema: type[Config]) -> Any:
    field = schema.model_fields.get("kind")
    return None if field is None else field.default


def _nearest(key: str, schema: type[Config]) -> str:
    # A choice by `kind` lists the keys of all kinds: the key itself may be one of another kind.
    known = [path for path in _schema_paths(schema) if path != key]
    parent, _, leaf = key.rpartition(".")
    siblings = [path for path in known if path.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(leaf, [path.rpartition(".")[2] for path in siblings], n=1)
    if near:
        return f"did you mean '{parent + '.' if parent else ''}{near[0]}'?"
    leaf = _ELSEWHERE.get(leaf, leaf)
    same_leaf = [path for path in known if path.rpartition(".")[2] == leaf]
    if same_leaf:
        return f"did you mean '{same_leaf[0]}'?"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"the nearest valid key is '{near[0]}'" if near else "no key is valid here"


def _schema_paths(schema: type[Config], prefix: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _field_types(field):
            yield from _schema_paths(inner, f"{prefix}{name}.")


def _field_types(field: FieldInfo) -> Iterator[type[Config]]:
    for part in (field.annotation, *field.metadata):
        yield from _config_types(part)


def _config_types(annotation: Any) -> Iterator[type[Config]]:
    """The configurations in a type: alone, in a choice, or as elements of a tuple, list or dict."""
    if isinstance(annotation, Choice):
        yield from annotation.classes()
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for inner in get_args(annotation):
        yield from _config_types(inner)
