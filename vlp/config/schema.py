"""Base of configurations, an open choice between them, and the error of those that are wrong."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import CoreSchema, core_schema

from vlp.io import Redacted, as_url, redacted_values

Precision = Literal["float32", "bf16", "fp16"]
"""Number format of forward passes; parameters are float32 in any case."""


class ConfigError(Redacted, ValueError):
    """A configuration that cannot be used; the message is meant for the person at the terminal."""


def _local(path: str) -> str:
    if as_url(path) is not None:
        raise ValueError(f"{path} is a URL; name a folder on a disk here")
    return path


LocalPath = Annotated[str, AfterValidator(_local)]
"""A path that is written to, where a URL will not do."""


class Config(BaseModel):
    """Base of every configuration part: unknown keys are errors and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def model_dump(self, *, mode: str = "python", **options: Any) -> dict[str, Any]:
        """Return the values by key; mode "json", which is for files, leaves secrets out."""
        values = super().model_dump(mode=mode, **options)
        return redacted_values(values) if mode == "json" else values


AnyConfig = TypeVar("AnyConfig", bound=Config)


class Choice:
    """Mark of an annotated field: a key of its value names the configuration class.

    `Annotated[Base, Choice("kind", names, select)]` is a discriminated union that is open: names
    may be registered after the class that has the field.

    Args:
        key: of the value, such as "kind".
        names: all values of the key.
        select: the class of a name; a ValueError for an unknown one.
    """

    def __init__(
        self, key: str, names: Callable[[], Iterable[str]], select: Callable[[str], type[Config]]
    ) -> None:
        self._key, self._names, self._select = key, names, select

    def classes(self) -> Iterator[type[Config]]:
        """Yield every class that may be chosen."""
        return map(self._select, self._names())

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def _validate(self, value: Any) -> Config:
        if isinstance(value, Config):
            return value
        name = value.get(self._key) if isinstance(value, Mapping) else None
        if not isinstance(name, str):
            raise ValueError(f"`{self._key}` is missing; it is one of {', '.join(self._names())}")
        return self._select(name).model_validate(value)


PLUGINS = "VLP_PLUGINS"
"""Environment variable with the plugins of this process and of those it starts."""


_OWN = ("vlp", "evaluation", "data_tools", "launch")


def plugin_of(made: Any) -> str | None:
    """Return the module of a class or function that a plugin brought; None for one of our own."""
    module: str = made.__module__
    return None if module.partition(".")[0] in _OWN else module


def require_plugins(needed: Any, known: Container[str], what: str, where: str | Path) -> None:
    """Require what the plugins of a model folder register; none is imported on the folder's word.

    Args:
        needed: module by the name that it registers, as the folder says.
        known: all registered names.
        what: that are registered, such as "encoding".
        where: the file, for the message.
    """
    said = needed if isinstance(needed, dict) else {"": None}
    for name, module in said.items():
        if not (isinstance(module, str) and re.fullmatch(r"\w+(\.\w+)*", module)):
            raise ConfigError(f"{where}: plugins name a module for each {what}, not {needed!r}")
        if name not in known:
            raise ConfigError(
                f"{where}: the {what} {name!r} comes from the plugin {module}, which is not "
                "imported, as a model folder may be anyone's: name it, or its file, by `plugins=` "
                "of `vlp.load`, by `vlp --plugin` before the command, or by the variable "
                f"{PLUGINS}"
            )


def load_plugins(plugins: Iterable[str] = ()) -> None:
    """Import modules that register encodings, objectives or tasks of one's own.

    Those of `VLP_PLUGINS` are imported, too, and the variable gets the new ones, so that processes
    that this one starts have them.

    Args:
        plugins: Python files, or modules on the import path or in the working folder.
    """
    known = [each for each in os.environ.get(PLUGINS, "").split(os.pathsep) if each]
    for plugin in (*known, *plugins):
        place = str(Path(plugin).resolve()) if plugin.endswith(".py") else plugin
        _import_plugin(place)
        if place not in known:
            known.append(place)
            os.environ[PLUGINS] = os.pathsep.join(known)


def _import_plugin(place: str) -> None:
    name, folder = place, os.getcwd()
    if is_file := place.endswith(".py"):
        if not Path(place).is_file():
            raise ConfigError(f"plugin {place}: there is no such file")
        name, folder = Path(place).stem, str(Path(place).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise ConfigError(f"plugin {place}: {type(error).__name__}: {error}") from error
    if is_file and Path(module.__file__ or "").resolve() != Path(place):
        raise ConfigError(f"plugin {place}: a module {name!r} is there already; rename the file")
