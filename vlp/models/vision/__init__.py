"""Vision-only models; importing this package registers `vlp_*` names with timm."""

from __future__ import annotations

from vlp.models.vision import entry_points as entry_points
