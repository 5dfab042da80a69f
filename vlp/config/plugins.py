"""Plugins: modules of one's own that register encodings, objectives or tasks."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from vlp.config.schema import ConfigError

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
