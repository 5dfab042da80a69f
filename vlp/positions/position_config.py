"""One encoding as a configuration names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from vlp.config import Config


class PositionConfig(Config):
    """One encoding of `vlp.positions.list_positions()`."""

    name: str = Field(description="of one encoding in vlp.positions.list_positions()")
    # Not `on`, as `attach` calls it: YAML 1.1 reads that as true.
    roles: str | None = Field(None, description="letters of q, k, v, where the encoding has them")
    options: Mapping[str, Any] = Field({}, description="of the encoding, as in {theta: 10}")
