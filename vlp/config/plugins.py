"""Plugins: modules of one's own that register encodings, objectives or tasks."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from vlp.config.schema import ConfigError

PLUGINS = "VLP_PLUGINS"
"""Environment variable with the plugins of this process and of those it starts."""


def load_plugins(plugins: Iterable[str] = ()) -> None:
    """Import modules that register encodings, objectives or tasks of one's own.

    Those of `VLP_PLUGINS` are imported, too, and the variable gets the new ones, so that processes
    that this one starts have them.

    Args:
        plugins: Python files, or modules on the import path or in the working folder.

    Raises:
        ConfigError: a file or module is not there, or fails.
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
