"""Samples that a take-down list keeps out of the shards: one key, image id or URL a line."""

from __future__ import annotations

from pathlib import Path

from vlp.config import ConfigError
from vlp.data.schema import Annotation


class TakeDown:
    """What is taken down, and which of its lines were met so far (`met`)."""

    def __init__(self, lines: frozenset[str] = frozenset()) -> None:
        self.lines = lines
        self.met: set[str] = set()

    @classmethod
    def read(cls, path: Path | None) -> TakeDown:
        """Read the list; empty lines and what follows ` #` (or a `#` in front) do not count.

        Raises:
            ConfigError: it cannot be read.
        """
        if path is None:
            return cls()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the take-down list cannot be read ({error})") from error
        # A URL may hold a `#`, so it starts a comment only behind white space.
        lines = (f" {line}".split(" #")[0].strip() for line in text.splitlines())
        return cls(frozenset(line for line in lines if line))

    def names(self, key: str, annotation: Annotation) -> bool:
        """Whether a line names this sample: by key, `image_id` or `url`."""
        if not self.lines:
            return False
        url = (annotation.model_extra or {}).get("url")
        said = self.lines.intersection(
            name for name in (key, annotation.image_id, url) if isinstance(name, str)
        )
        self.met |= said
        return bool(said)
