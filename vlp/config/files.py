"""Configuration files: inheritance, dotted overrides, packaged files, and saving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import ValidationError

from vlp.config.messages import explain
from vlp.config.plugins import load_plugins
from vlp.config.schema import AnyConfig, Config, ConfigError
from vlp.config.yaml_text import dump_yaml, parse_yaml, where_and_what
from vlp.io import write_text

INHERIT = "inherit"


def load_config(
    path: str | Path,
    schema: type[AnyConfig],
    overrides: Sequence[str] = (),
    origin: str = "the command line",
) -> AnyConfig:
    """Read a configuration file and validate it.

    `inherit: other.yaml` (relative to the file) is read first and merged key by key; a mapping
    merges into a mapping, but for one of another `format`; everything else replaces. Overrides come
    last, written `a.b=value` with the value in YAML (`data.sources=[{path: shards}]`,
    `training.steps=100`, `teacher=null`). A text that looks like a number is quoted, as everywhere
    in YAML (`tasks=["5117e062"]`). `origin` is where messages say that overrides come from.
    """
    values, origins = read_values(path)
    # A format first: where it is another one, it replaces what its other keys are set in.
    for override in sorted(overrides, key=lambda one: ".format=" not in one):
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"{override!r} is not an override; write key.sub=value")
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{override!r}: the value is not YAML: {error}") from error
        values = overridden(values, key, value)
        for leaf in (key, *(f"{key}.{inner}" for inner in _paths(value))):
            origins[leaf] = origin
        for depth in range(1, key.count(".") + 1):
            origins.setdefault(".".join(key.split(".")[:depth]), origin)
    plugins = values.get("plugins")
    if isinstance(plugins, list) and all(isinstance(each, str) for each in plugins):
        load_plugins(plugins)  # what they register is then known to the schema
    return validated(values, schema, path, origins)


def read_values(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a configuration file and those it inherits from, without validation.

    Returns:
        The merged values, and by dotted key the file in which each stands.
    """
    return _read(config_file(path), ())


def validated(
    values: Mapping[str, Any],
    schema: type[AnyConfig],
    path: str | Path,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> AnyConfig:
    """Values that were read from a file, as a configuration.

    Args:
        values: by key.
        schema: what they are to be.
        path: the file.
        origins: where a dotted key stands, if not in that file.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, schema, origins, Path(path))) from error


def save_config(config: Config, path: str | Path) -> None:
    """Write a resolved configuration as YAML that `load_config` reads back, without secrets."""
    write_text(Path(path), dump_yaml(config.model_dump(mode="json")))


def config_file(path: str | Path) -> Path:
    """Return the file of a configuration; `configs/...` that is not here is the installed one."""
    path = Path(path)
    if path.parts[:1] == ("configs",) and not path.exists():
        installed = Path(str(resources.files("configs"))).joinpath(*path.parts[1:])
        return installed if installed.is_file() else path
    return path


def _read(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: inherits from itself through {' -> '.join(map(str, seen))}")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this configuration ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {where_and_what(error)}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys, not {values!r}")
    parent = values.pop(INHERIT, None)
    if not isinstance(parent, str | None):
        raise ConfigError(f"{path}: '{INHERIT}' names one file, not {parent!r}")
    origins = dict.fromkeys(_paths(values), str(path))
    if parent is None:
        return values, origins
    base, base_origins = _read(path.parent / parent, (*seen, path))
    return merged(base, values), base_origins | origins


def merged(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Values with others over them: a mapping merges into a mapping, everything else replaces.

    A mapping of another `format` (of images with objects) has other keys: it replaces, too.
    """
    old_format = base.get("format")
    same = old_format in (None, update.get("format", old_format))
    result = dict(base) if same else {}
    for key, value in update.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def overridden(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return values with another one merged in at a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return merged(values, value)


def _paths(values: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from _paths(value, f"{prefix}{key}.")
