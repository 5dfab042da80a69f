"""vlp: vision-language pretraining with the anchor-based relative position embedding ACE-RPE.

`load` reads a model folder; `create_position` and `list_positions` give position encodings.
`Vlp...` are classes of transformers, registered with its Auto classes on import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vlp.serving.register import register_when_imported

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


register_when_imported()
