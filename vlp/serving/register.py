"""Registration with transformers' Auto classes when they are imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_AUTO = "transformers.models.auto"
# `import vlp` must not import transformers and torch, which takes seconds. So it waits for the
# modules of Auto classes, and each of them imports one module of this package; models are
# registered when the first `VlpConfig` is made.
_OURS = {
    f"{_AUTO}.configuration_auto": "vlp.serving.config",
    f"{_AUTO}.processing_auto": "vlp.serving.processor",
    f"{_AUTO}.image_processing_auto": "vlp.serving.image_processor",
}


class AutoClassFinder:
    """Finder on `sys.meta_path` that imports this package's modules after the Auto classes."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return Python's spec of an Auto module, with the import added; else None."""
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
    """Register with the Auto classes, at once if they are imported already."""
    if AutoClassFinder not in sys.meta_path:
        sys.meta_path.insert(0, AutoClassFinder)
        for theirs, ours in _OURS.items():
            if theirs in sys.modules:
                importlib.import_module(ours)
