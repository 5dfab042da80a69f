"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from vlp.config import ConfigError


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which gets its name when the block ends well; its folder is made.

    Raises:
        ConfigError: it cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(unfinished, "wb") as file:
                yield file
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from error
