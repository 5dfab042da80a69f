"""Typed configuration: YAML files with inheritance, dotted overrides and clear errors.

Every package owns its part, a subclass of `Config`. Each failure of `load_config` is a
`ConfigError` that names the key, its file and the nearest valid key.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from vlp.io import Redacted, as_url, expand_home, redact_values, similar_path, write_text

Precision = Literal["float32", "bf16", "fp16"]  # of forward passes; parameters are float32


class ConfigError(Redacted, ValueError):
    """A configuration that cannot be used; the message is meant for the person at the terminal."""


def _require_local(path: str) -> str:
    if as_url(path) is not None:
        raise ValueError(f"{path} is a URL; this key takes a local path")
    if expanded := expand_home(path):
        raise ValueError(f"~ is not replaced here; write {expanded}")
    return path


LocalPath = Annotated[str, AfterValidator(_require_local)]  # a path to write to, never a URL


class Config(BaseModel):
    """Base of every configuration part: frozen; unknown keys, inf and nan are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def model_dump(self, *, mode: str = "python", **options: Any) -> dict[str, Any]:
        """Return the values by key; mode "json" (for files) redacts secrets in URLs."""
        values = super().model_dump(mode=mode, **options)
        return redact_values(values) if mode == "json" else values


AnyConfig = TypeVar("AnyConfig", bound=Config)


class Choice:
    """Annotation of a field: a discriminated union of classes that may be registered later.

    In `Annotated[Base, Choice("kind", names, get_class)]` the value's key `kind` is one of
    `names()`, and `get_class(name)` returns its class, or raises ValueError for an unknown name.
    """

    def __init__(
        self, key: str, names: Callable[[], Iterable[str]], get_class: Callable[[str], type[Config]]
    ) -> None:
        self._key, self._names, self._get_class = key, names, get_class

    def classes(self) -> Iterator[type[Config]]:
        """Yield the class of every name."""
        return map(self._get_class, self._names())

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def _validate(self, value: Any) -> Config:
        if isinstance(value, Config):
            return value
        name = value.get(self._key) if isinstance(value, Mapping) else None
        if not isinstance(name, str):
            raise ValueError(f"set `{self._key}` to one of {', '.join(self._names())}")
        return self._get_class(name).model_validate(value)


PLUGINS = "VLP_PLUGINS"  # environment variable, inherited by child processes
_PACKAGES = ("vlp", "evaluation", "data_tools", "launch")


def plugin_of(definition: Any) -> str | None:
    """Return the module of a plugin's class or function; None if this project defines it."""
    module: str = definition.__module__
    return None if module.partition(".")[0] in _PACKAGES else module


def require_plugins(plugins: Any, names: Container[str], kind: str, folder: str | Path) -> None:
    """Require that the plugins of a model folder are imported already; never import them.

    Args:
        plugins: `{name: module}` from the folder, unchecked.
        names: names that are registered in this process.
        kind: what a name stands for, such as "encoding".
    """
    modules = plugins if isinstance(plugins, dict) else {"": None}  # refused below
    for name, module in modules.items():
        if not (isinstance(module, str) and re.fullmatch(r"\w+(\.\w+)*", module)):
            raise ConfigError(f"{folder}: plugins name a module for each {kind}, not {plugins!r}")
        if name not in names:
            raise ConfigError(
                f"{folder}: the {kind} {name!r} comes from the plugin {module}. Plugins of model "
                "folders are not imported unasked; if you trust it, name it or its file by "
                f"`plugins=` of `vlp.load`, `vlp --plugin` before the command, or {PLUGINS}"
            )


def load_plugins(plugins: Iterable[str] = ()) -> None:
    """Import plugins (Python files or modules) that register encodings, objectives or tasks.

    Plugins of `VLP_PLUGINS` are imported, too; `plugins` are added to it for child processes.
    """
    variable = [plugin for plugin in os.environ.get(PLUGINS, "").split(os.pathsep) if plugin]
    for plugin in (*variable, *plugins):
        plugin = str(Path(plugin).resolve()) if plugin.endswith(".py") else plugin
        _import_plugin(plugin)
        if plugin not in variable:
            variable.append(plugin)
            os.environ[PLUGINS] = os.pathsep.join(variable)


def _import_plugin(plugin: str) -> None:
    # Console scripts, unlike `python -m`, do not have the working directory on sys.path.
    name, folder = plugin, os.getcwd()
    if is_file := plugin.endswith(".py"):
        if not Path(plugin).is_file():
            raise ConfigError(f"plugin {plugin}: there is no such file")
        name, folder = Path(plugin).stem, str(Path(plugin).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a script without a guard would end the command
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        # Beyond this function and the import machinery, the deepest line of the plugin's folder.
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)[1:]
            if "importlib" not in frame.filename
        ]
        places = [
            f" ({frame.filename}, line {frame.lineno})"
            for frame in frames
            if Path(frame.filename).parent == Path(frames[0].filename).parent
        ]
        raise ConfigError(f"plugin {plugin}: {reason}{places[-1] if places else ''}") from error
    if is_file and Path(module.__file__ or "").resolve() != Path(plugin):
        raise ConfigError(
            f"plugin {plugin}: the name {name!r} belongs to another module; rename the file"
        )


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_NUMBERS = {  # as in YAML 1.2's core schema
    _INT: re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    _FLOAT: re.compile(
        r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
}


class _Loader(yaml.SafeLoader):
    """Safe loader of YAML 1.1 with numbers of YAML 1.2 (`1e-4`); duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes every text that `_Loader` would read as a number."""


_Loader.add_constructor(_INT, _Loader.construct_yaml_int)
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first_character: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
        for first_character, resolvers in _class.yaml_implicit_resolvers.items()
    }
    for _tag, _pattern in _NUMBERS.items():
        _class.add_implicit_resolver(_tag, _pattern, [*"-+.0123456789"])


def parse_yaml(text: str) -> Any:
    """Parse YAML by `_Loader`; yaml.YAMLError for any invalid text."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # PyYAML's own, such as for dates, unhashable keys, deep nesting
        raise yaml.YAMLError(str(error) or type(error).__name__) from error


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Return line, column and problem of a YAML error as one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def dump_yaml(values: Any) -> str:
    """Write values as YAML that `parse_yaml` reads back unchanged."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


_SYNONYMS = {  # key of other packages -> key here
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


def explain(
    error: ValidationError, schema: type[Config], origins: Mapping[str, str], path: Path
) -> str:
    """Return a line for each problem of a configuration, with the origin of its key."""
    lines = []
    for problem in error.errors():
        key_parts, fields = _locate(problem["loc"], schema)
        key = ".".join(key_parts)
        # A missing key has the origin of its mapping.
        levels = [".".join(key_parts[:n]) for n in range(len(key_parts), 0, -1)]
        origin = next((origins[level] for level in levels if level in origins), str(path))
        if problem["type"] == "extra_forbidden":
            hint = _nearest(".".join([*fields, key_parts[-1]]), schema)
            lines.append(f"{origin}: unknown key '{key}'; {hint}")
        elif problem["type"] == "missing":
            lines.append(f"{origin}: the key '{key}' is required")
        else:
            lines.append(
                ": ".join(filter(None, [origin, key and f"'{key}'", _value_problem(key, problem)]))
            )
    return "\n".join(lines)


def _value_problem(key: str, problem: Mapping[str, Any]) -> str:
    """Return pydantic's message for a key's value, with the value if it is a plain one.

    Messages of this project's validators name the value themselves.
    """
    value, message = problem["input"], problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("tuple_type", "list_type") and isinstance(value, str | int | float):
        return f"should be a list, as in {key}='[{value}]'"
    if problem["type"] == "value_error" or isinstance(value, Mapping | list | tuple):
        return message
    return f"{message} (given: {value!r})"


def _locate(location: Sequence[str | int], schema: type[Config]) -> tuple[list[str], list[str]]:
    """Return the parts of the user's key for pydantic's location, and its parts that are fields.

    pydantic's location also contains the kinds of tagged unions, which are dropped. Indices of
    lists are parts of the key, but no fields.
    """
    types: list[type[Config]] = [schema]
    key_parts, field_names = [], []
    for part in location:
        fields = [config.model_fields[part] for config in types if part in config.model_fields]
        if not fields and len(types) > 1:
            types_of_kind = [
                config
                for config in types
                if "kind" in config.model_fields and config.model_fields["kind"].default == part
            ]
            if types_of_kind:
                types = types_of_kind
                continue
        key_parts.append(str(part))
        if fields:
            types = [inner for field in fields for inner in _field_types(field)]
            field_names.append(str(part))
    return key_parts, field_names


def _nearest(unknown_key: str, schema: type[Config]) -> str:
    """Return a hint: the most similar sibling, else a key of that name, else the closest."""
    # The key itself may be valid for another `kind` of a union.
    keys = [key for key, _ in schema_fields(schema) if key != unknown_key]
    parent, _, name = unknown_key.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == parent]
    if matches := difflib.get_close_matches(name, siblings, n=1):
        return f"did you mean '{parent + '.' if parent else ''}{matches[0]}'?"
    name = _SYNONYMS.get(name, name)
    namesakes = [key for key in keys if key.rpartition(".")[2] == name]
    if namesakes:
        return f"did you mean '{namesakes[0]}'?"
    matches = difflib.get_close_matches(unknown_key, keys, n=1, cutoff=0.0)
    return f"the nearest valid key is '{matches[0]}'" if matches else "no key is valid here"


def schema_fields(schema: type[Config], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) of a configuration class, inner configurations included."""
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}", field
        for inner in _field_types(field):
            yield from schema_fields(inner, f"{prefix}{name}.")


def _field_types(field: FieldInfo) -> Iterator[type[Config]]:
    for part in (field.annotation, *field.metadata):
        yield from _config_types(part)


def _config_types(annotation: Any) -> Iterator[type[Config]]:
    """Yield the configuration classes in a type, such as those of a union or of a list's items."""
    if isinstance(annotation, Choice):
        yield from annotation.classes()
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for inner in get_args(annotation):
        yield from _config_types(inner)


INHERIT = "inherit"


def parse_override(override: str) -> tuple[str, Any]:
    """Return key and value of `KEY=VALUE`, whose value is YAML."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"{override!r} sets no key; write KEY=VALUE")
    try:
        return key, parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{override!r}: the value is not YAML: {error}") from error


def load_config(
    path: str | Path,
    schema: type[AnyConfig],
    overrides: Sequence[str] = (),
    origin: str = "the command line",
) -> AnyConfig:
    """Read a configuration file and validate it.

    The file's keys win over those of `inherit: other.yaml` (relative to the file), and overrides
    `a.b=value` over both (see `merge`). The value is YAML: `data.sources=[{path: shards}]`,
    `teacher=null`, `tasks=["5117e062"]` (quoted, as it would be a number). Error messages call the
    overrides `origin`.
    """
    values, origins = read_values(path)
    # Formats first: another format replaces the whole mapping, which other overrides then change.
    for override in sorted(overrides, key=lambda override: ".format=" not in override):
        key, value = parse_override(override)
        for inner_key in (key, *(f"{key}.{inner}" for inner in _dotted_keys(value))):
            origins[inner_key] = origin
        # Mappings above the key that no file has.
        for depth in range(1, key.count(".") + 1):
            origins.setdefault(".".join(key.split(".")[:depth]), origin)
        update = value
        for part in reversed(key.split(".")):
            update = {part: update}
        values = merge(values, update)
    plugins = values.get("plugins")
    if isinstance(plugins, list) and all(isinstance(plugin, str) for plugin in plugins):
        load_plugins(plugins)  # the schema needs the names that they register
    return validate(values, schema, path, origins)


def validate(
    values: Mapping[str, Any],
    schema: type[AnyConfig],
    path: str | Path,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> AnyConfig:
    """Return the configuration of a file's values; errors name `path`, or the key's origin."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, schema, origins, Path(path))) from error


def save_config(config: Config, path: str | Path) -> None:
    """Write a configuration as YAML with all its keys; secrets in URLs are redacted."""
    write_text(Path(path), dump_yaml(config.model_dump(mode="json")))


def config_file(path: str | Path) -> Path:
    """Return a path; look up a `configs/...` that does not exist in the installed package."""
    path = Path(path)
    if path.parts[:1] == ("configs",) and not path.exists():
        package_file = Path(str(resources.files("configs"))).joinpath(*path.parts[1:])
        return package_file if package_file.is_file() else path
    return path


def read_values(
    path: str | Path, children: tuple[Path, ...] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a file and its `inherit` files, and the origin file by dotted key.

    children: files that inherit this file; a file that inherits itself is an error.
    """
    path = config_file(path).resolve()
    if path in children:
        raise ConfigError(f"{path}: inherits from itself through {' -> '.join(map(str, children))}")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read this configuration ({error.strerror}){similar_path(path)}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_yaml_problem(error)}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys, not {values!r}")
    parent = values.pop(INHERIT, None)
    if not isinstance(parent, str | None):
        raise ConfigError(f"{path}: name one file as '{INHERIT}', not {parent!r}")
    origins = dict.fromkeys(_dotted_keys(values), str(path))
    if parent is None:
        return values, origins
    base, base_origins = read_values(path.parent / parent, (*children, path))
    return merge(base, values), base_origins | origins


def merge(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings recursively; values of `update` win.

    A mapping whose key `format` differs from the base's replaces the base's as a whole.
    """
    old_format = base.get("format")
    same_format = old_format in (None, update.get("format", old_format))
    result = dict(base) if same_format else {}
    for key, value in update.items():
        base_value = result.get(key)
        are_mappings = isinstance(base_value, Mapping) and isinstance(value, Mapping)
        result[key] = merge(base_value, value) if are_mappings else value  # type: ignore[arg-type]
    return result


def _dotted_keys(values: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from _dotted_keys(value, f"{prefix}{key}.")
