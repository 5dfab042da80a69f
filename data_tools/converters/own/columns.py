"""Columns of a table that hold the image, its captions and its split, and what values say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from vlp.config import ConfigError
from vlp.io import parse_json

# Usual names, the most telling first.
IMAGES = (
    *("image", "images", "file_name", "filename", "image_file_name", "image_path", "img_path"),
    *("image_file", "image_name", "img", "img_name", "filepath", "file_path", "path", "file"),
    *("photo", "jpg", "jpeg", "png", "webp", "image_id", "img_id"),
)
CAPTIONS = (
    *("caption", "captions", "text", "texts", "txt", "sentence", "sentences", "raw"),
    *("description", "descriptions", "alt_text", "alt", "comment", "title", "prompt"),
)
SPLITS = ("split", "set", "subset", "partition")

SPLIT_NAMES = {
    "train": ("train", "training", "restval"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}

_NUMBERED = re.compile(r"(caption|sentence|text|description)_?\d+")
_DEPTH = 3
"""Of lists in a caption's value."""


class Columns(NamedTuple):
    """Columns that were found, by their names in the table."""

    image: str
    captions: tuple[str, ...]
    split: str | None = None

    @property
    def wanted(self) -> list[str]:
        """Return all of them."""
        return [self.image, *self.captions, *([self.split] if self.split else [])]

    def __str__(self) -> str:
        captions = ", ".join(repr(name) for name in self.captions)
        split = f", split from {self.split!r}" if self.split else ""
        return f"image from column {self.image!r}, captions from {captions}{split}"


class Named(NamedTuple):
    """Columns that the command line names; None: to be found."""

    image: str | None = None
    captions: tuple[str, ...] | None = None
    split: str | None = None


def find_columns(
    names: Sequence[str], named: Named, bytes_columns: Sequence[str] = ()
) -> Columns | None:
    """Find the columns by usual names, whatever their case; None where there are none.

    Args:
        names: of all columns.
        named: on the command line.
        bytes_columns: those that hold encoded images, by their type.
    """
    given = (named.image, *(named.captions or ()), named.split)
    if any(name is not None and name not in names for name in given):
        return None
    by_name = {plain(name): name for name in reversed(names)}
    image = named.image or next((by_name[name] for name in IMAGES if name in by_name), None)
    if named.image is None and image not in bytes_columns and len(bytes_columns) == 1:
        image = bytes_columns[0]
    captions = named.captions
    if captions is None:
        numbered = tuple(name for name in names if _NUMBERED.fullmatch(plain(name)))
        first = next((by_name[name] for name in CAPTIONS if name in by_name), None)
        captions = (first,) if first is not None else numbered
    if image is None or not captions:
        return None
    split = named.split or next((by_name[name] for name in SPLITS if name in by_name), None)
    return Columns(image, captions, None if split in (image, *captions) else split)


def plain(name: str) -> str:
    """Return a column's name as the lists here have it."""
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def no_columns(where: str, names: Iterable[str]) -> ConfigError:
    """Return the error for a table without columns that are known or named."""
    shown = ", ".join(list(names)[:20])
    return ConfigError(
        f"{where}: no columns for images and captions among {shown}; name them with --image COLUMN "
        "--caption COLUMN"
    )


def texts_in(value: Any, depth: int = _DEPTH) -> list[str]:
    """Return the captions that a value holds: a text, a list of them, or objects with one each.

    A text that is written as a list (`["a dog", "two dogs"]`, as CSV files have it) is one.
    """
    if value is None or value != value or depth < 0:  # NaN stands for a missing value
        return []
    if isinstance(value, dict):
        known = {plain(str(key)): key for key in reversed(value)}
        found = next((known[name] for name in ("raw", *CAPTIONS) if name in known), None)
        return [] if found is None else texts_in(value[found], depth - 1)
    if isinstance(value, list | tuple):
        return [text for part in value for text in texts_in(part, depth - 1)]
    text = str(value).strip()
    if text[:2] in ('["', "['") and text.endswith("]"):
        for parse in (parse_json, ast.literal_eval):
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                return texts_in(parse(text), depth - 1)
    return [text] if text else []


def split_of(value: Any) -> str | None:
    """Return train, val or test for a usual name of one; None for anything else."""
    name = str(value).strip().lower()
    return next((split for split, names in SPLIT_NAMES.items() if name in names), None)


def said_split(value: Any) -> str | None:
    """Return the name of a split as a row has it; None where the row has none."""
    name = "" if value is None or value != value else str(value).strip()
    return name or None


def require_splits(
    counts: Mapping[str, int | None], where: str, remedy: str = "it should be train, val or test"
) -> None:
    """Refuse names of which some are splits and others are not; one split alone may be chance.

    Args:
        counts: of images by name, as far as they are known.
        where: the names are, for messages.
        remedy: for messages.

    Raises:
        ConfigError: two different splits stand beside a name of none.
    """
    known = {name: split_of(name) for name in sorted(counts)}
    splits = [split for split in SPLIT_NAMES if split in known.values()]
    strange = [name for name, split in known.items() if split is None]
    if strange and len(splits) > 1:
        count = counts[strange[0]]
        shown = repr(strange[0]) if count is None else f"{strange[0]!r} ({count} images)"
        raise ConfigError(
            f"{where}: {shown} is no split, but stands beside {' and '.join(splits)}; {remedy}"
        )
