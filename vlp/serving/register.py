"""Registration with transformers' Auto classes when they are imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_AUTO = "transformers.models.auto"
# Registering at once would make `import vlp` import transformers and torch, which takes seconds. So
# `import vlp` watches for the modules of the Auto classes, in either order of imports. Models are
# registered by the first configuration that is made.
# Module of transformers -> the module of ours that it needs.
_OURS = {
    f"{_AUTO}.configuration_auto": "vlp.serving.config",
    f"{_AUTO}.processing_auto": "vlp.serving.processor",
    f"{_AUTO}.image_processing_auto": "vlp.serving.image_processor",
}


class AutoClassFinder:
    """Finder on `sys.meta_path` that imports our modules after the Auto classes."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that Python finds, with our import after the module's own; else None."""
        ours = _OURS.get(name)
        spec = PathFinder.find_spec(name, path, target) if ours else None
        if ours is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_and_register(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(ours)

        spec.loader.exec_module = exec_and_register  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Register with the Auto classes that are imported, now or later."""
    if AutoClassFinder not in sys.meta_path:
        sys.meta_path.insert(0, AutoClassFinder)
        for theirs, ours in _OURS.items():
            if theirs in sys.modules:
                importlib.import_module(ours)
