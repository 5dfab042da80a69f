"""Samples of a converter, refused rows, cleaned captions and take-down lists."""

from __future__ import annotations

import html
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from html.entities import html5
from pathlib import Path
from typing import NamedTuple

from data_tools.options import MAX_WORDS
from vlp.config import ConfigError
from vlp.data.schema import Annotation, captions_of
from vlp.io import atomic_write


class SampleSpec(NamedTuple):
    """One sample to build, of one image or two; its key has no dots or slashes.

    Boxes are in pixels of `size` (width, height), by default of the original.
    """

    key: str
    images: tuple[str, ...]
    annotation: Annotation
    size: tuple[int, int] | None = None


class Refused(NamedTuple):
    """A part of the raw data that makes no sample, by its `id`; counted by kind."""

    kind: str
    id: str


def has_text(annotation: Annotation) -> bool:
    """Return whether there is anything to learn: a text of any kind, a label or a box."""
    fields = ("hypothesis", "statement", "label", "questions", "expressions", "boxes")
    # A label may be False.
    others = any(getattr(annotation, field) not in (None, "", []) for field in fields)
    return bool(captions_of(annotation)) or others


EMPTY, LINK, LONG = "empty caption", "caption of a URL alone", "caption too long"
_JOINERS = "\u200c\u200d"
_ENTITY = re.compile(r"&(?:#\d{2,7}|#[xX][0-9a-fA-F]{2,6}|[A-Za-z]\w*)(?:;|(?![\w=]))")
_PERSON = re.compile(r"<\s*person\s*>", re.IGNORECASE)
_URL = re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE)


def clean_caption(text: str) -> str:
    """Return a caption cleaned by one rule for all corpora; case and punctuation stay."""
    # Some crawls have escaped HTML entities twice.
    text = _ENTITY.sub(_character, _ENTITY.sub(_character, text))
    text = unicodedata.normalize("NFC", text)
    # Plain text, the most of it, has no characters to replace.
    text = "".join(map(_visible, text)) if not text.isascii() or not text.isprintable() else text
    # CC12M has `<PERSON>` where CC3M has `person`.
    return " ".join(_PERSON.sub("person", text).split())


def _character(entity: re.Match[str]) -> str:
    name = entity[0].removeprefix("&")
    return html.unescape(entity[0]) if name[0] == "#" or name in html5 else entity[0]


def why_dropped(caption: str, max_words: int = MAX_WORDS) -> str | None:
    """Return why a cleaned caption is dropped: one of `EMPTY`, `LINK` and `LONG`; None keeps it."""
    if not any(map(str.isalnum, caption)):
        return EMPTY
    if not any(map(str.isalnum, _URL.sub("", caption))):
        return LINK
    if caption.count(" ") >= max_words:
        return LONG
    return None


def clean_captions(
    texts: Iterable[str | None], key: str, max_words: int = MAX_WORDS
) -> tuple[list[str], list[Refused]]:
    """Return the kept captions of an image, and the dropped ones by `KEY/caption 2` (from 0)."""
    captions, dropped = [], []
    for number, text in enumerate(texts):
        caption = clean_caption(text or "")
        reason = why_dropped(caption, max_words)
        if reason is None:
            captions.append(caption)
        else:
            dropped.append(Refused(reason, f"{key}/caption {number}"))
    return captions, dropped


def _visible(character: str) -> str:
    category = unicodedata.category(character)
    # Control characters part words; invisible ones do not, and scripts and emoji need joiners.
    if category in ("Cc", "Cs", "Zl", "Zp"):
        return " "
    return "" if category == "Cf" and character not in _JOINERS else character


# Keys may start with #.
_COMMENT = re.compile(r"^#(?:\s|$)|\s#")
_OF_FOLDER = re.compile("# of (.+):")


class Line(NamedTuple):
    """A key to take down and why."""

    folder: Path
    key: str
    reason: str


class TakeDown:
    """Take-down list, and its lines that matched so far."""

    def __init__(self, lines: frozenset[str] = frozenset()) -> None:
        self.lines = lines
        self.matched: set[str] = set()

    @classmethod
    def read(cls, path: Path | None, out: Path | None = None) -> TakeDown:
        """Read a list; keys under `# of FOLDER:` (see `write_list`) count for that `out` alone."""
        if path is None:
            return cls()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the take-down list cannot be read ({error})") from error
        lines: dict[Path | None, set[str]] = defaultdict(set)
        folder = None
        for line in text.splitlines():
            if heading := _OF_FOLDER.fullmatch(line):
                folder = Path(heading[1]).resolve()
                lines[folder] |= set()
            elif key := _COMMENT.split(line)[0].strip():
                lines[folder].add(key)
        local = lines.get(out.resolve()) if out is not None else None
        return cls(frozenset().union(*(lines.values() if local is None else (local, lines[None]))))

    def names(self, key: str, annotation: Annotation) -> bool:
        """Return whether a line names this sample: by key, `image_id` or `url`."""
        if not self.lines:
            return False
        url = (annotation.model_extra or {}).get("url")
        matches = self.lines.intersection(
            name for name in (key, annotation.image_id, url) if isinstance(name, str)
        )
        self.matched |= matches
        return bool(matches)


def write_list(path: Path, heading: str, lines: Iterable[Line], folders: Iterable[Path]) -> int:
    """Write a list of keys of some folders whole or not at all; returns the number of keys."""
    count, folder = 0, None
    with atomic_write(path, error=ConfigError) as file:
        file.write(f"# {heading}\n".encode())
        file.writelines(f"# of {other}:\n".encode() for other in dict.fromkeys(folders))
        for line in lines:
            if line.folder != folder:
                folder = line.folder
                file.write(f"# of {folder}:\n".encode())
            file.write(f"# {line.reason}\n{line.key}\n".encode())
            count += 1
    return count


def warn_of_shared_keys(shared: int) -> None:
    """Print a warning if `shared` kept samples have a key of the list."""
    if shared:
        print(
            f"  careful: {shared} samples that are kept have the same key as a dropped one of "
            "another folder: build each folder again where it is, which its part of the list is for"
        )
