"""vlp: vision-language pretraining with the anchor-based relative position embedding ACE-RPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlp.models.folder import Loaded as Loaded
    from vlp.models.folder import from_pretrained as load
    from vlp.positions import create_position, list_positions

__version__ = "0.1.0"
__all__ = ["create_position", "list_positions", "load"]


def __getattr__(name: str) -> Any:
    """Import on first use: `import vlp` itself stays as quick as Python's own start."""
    if name == "load":
        from vlp.models.folder import from_pretrained

        return from_pretrained
    if name in ("create_position", "list_positions"):
        import vlp.positions

        return getattr(vlp.positions, name)
    raise AttributeError(f"module 'vlp' has no attribute {name!r}")
