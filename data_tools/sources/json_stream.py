"""Members of a long JSON list one by one, so that a file of a gigabyte needs no ten of memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from data_tools.sources.annotation_rows import Located
from vlp.config import ConfigError

CHARACTERS = 1 << 24
"""Read at once."""

_BETWEEN = re.compile(r"[\s,]*")
_BEHIND = re.compile(r"\s*[,\]]")


def streamed_list(path: Path) -> Iterator[Located]:
    """Yield the members of the list that a JSON file holds, each with its place for messages.

    Raises:
        ConfigError: the file is missing, no list, or damaged from some member on.
    """
    decoder = json.JSONDecoder()
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(CHARACTERS)
            at, number = _next(text, 0), 0
            if text[at : at + 1] != "[":
                raise ConfigError(f"{path}: this should be a list; is it the right file?")
            at += 1
            while True:
                at = _next(text, at)
                if text[at : at + 1] == "]":
                    return
                try:
                    member, end = decoder.raw_decode(text, at)
                except (ValueError, RecursionError):  # or a number of too many digits
                    end = len(text)
                # A number may go on in what is not read yet; what comes behind it tells.
                if _BEHIND.match(text, end):
                    number += 1
                    yield f"{path}, row {number}", member
                    at = end
                    continue
                # A member that is longer than what is held doubles it, so that no file takes long.
                more = file.read(max(CHARACTERS, len(text) - at))
                if not more:
                    raise ConfigError(
                        f"{path}: damaged or cut off behind row {number}; download it again"
                    )
                text, at = text[at:] + more, 0
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error})") from error


def _next(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    assert found is not None  # it may match nothing
    return found.end()
