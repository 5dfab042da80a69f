"""vlp: vision-language pretraining with the anchor-based relative position embedding ACE-RPE.

`load` reads a model folder; `create_position` and `list_positions` give position encodings.
`Vlp...` are classes of transformers, registered with its Auto classes on import.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlp.models.folder import Loaded as Loaded
    from vlp.models.folder import from_pretrained as load
    from vlp.positions import create_position, list_positions
    from vlp.serving.config import VlpConfig
    from vlp.serving.image_processor import VlpImageProcessor
    from vlp.serving.model import VlpForQuestionAnswering, VlpModel
    from vlp.serving.processor import VlpProcessor

__version__ = "0.1.0"
__all__ = [
    "VlpConfig",
    "VlpForQuestionAnswering",
    "VlpImageProcessor",
    "VlpModel",
    "VlpProcessor",
    "create_position",
    "list_positions",
    "load",
]

# Public name -> module that defines it.
_MODULES = {
    "VlpConfig": "vlp.serving.config",
    "VlpForQuestionAnswering": "vlp.serving.model",
    "VlpImageProcessor": "vlp.serving.image_processor",
    "VlpModel": "vlp.serving.model",
    "VlpProcessor": "vlp.serving.processor",
    "create_position": "vlp.positions",
    "list_positions": "vlp.positions",
    "load": "vlp.models.folder",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import vlp` takes no time."""
    if name not in _MODULES:
        raise AttributeError(f"module 'vlp' has no attribute {name!r}; there are {__all__}")
    module = importlib.import_module(_MODULES[name])
    return getattr(module, "from_pretrained" if name == "load" else name)


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__})


_AUTO = "transformers.models.auto"
# `import vlp` must not import transformers and torch, which takes seconds: the import of a module
# of Auto classes imports a module of this package. The first `VlpConfig` registers the models.
_MODULE_AFTER_AUTO = {
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
        vlp_module = _MODULE_AFTER_AUTO.get(name)
        spec = PathFinder.find_spec(name, path, target) if vlp_module else None
        if vlp_module is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_and_register(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(vlp_module)

        spec.loader.exec_module = exec_and_register  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Register with the Auto classes, at once if they are imported already."""
    if AutoClassFinder not in sys.meta_path:
        sys.meta_path.insert(0, AutoClassFinder)
        for auto_module, vlp_module in _MODULE_AFTER_AUTO.items():
            if auto_module in sys.modules:
                importlib.import_module(vlp_module)


register_when_imported()
