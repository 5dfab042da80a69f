"""The pickles of RefCOCO: plain lists, dicts, texts and numbers, and nothing else is let in.

A pickle can name any function and have it called while it is read; these files need none.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_tools.sources.annotation_rows import Located
from vlp.config import ConfigError

# What Python 2 wrote under other names; none of them can do anything but hold values.
_HARMLESS = {
    (module, name): kind
    for module in ("builtins", "__builtin__")
    for name, kind in {"set": set, "frozenset": frozenset, "list": list, "dict": dict}.items()
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _HARMLESS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which plain data does not need"
            ) from None


def read_refs(path: Path) -> Iterator[Located]:
    """Return the rows of a pickled list, of Python 2 or 3, with where they stand.

    Raises:
        ConfigError: the file is missing, no pickle of plain data, or holds no list.
    """
    try:
        with open(path, "rb") as file:
            # Texts of Python 2 are bytes; odd ones must not cost the whole data set.
            content = _PlainUnpickler(file, encoding="utf-8", errors="replace").load()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # a broken pickle raises whatever its bytes happen to say
        raise ConfigError(
            f"{path}: not a pickle of references ({error}); take refs(unc).p as it is published"
        ) from error
    if not isinstance(content, list):
        raise ConfigError(f"{path}: holds {type(content).__name__}, not the list of references")
    return ((f"{path}, row {number}", row) for number, row in enumerate(content, 1))
