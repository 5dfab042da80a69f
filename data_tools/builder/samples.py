"""Sample specs, refused rows, caption cleaning and take-down lists."""

from __future__ import annotations

import html
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from html.entities import html5
from pathlib import Path
from typing import NamedTuple

from vlp.config import ConfigError
from vlp.data.schema import Annotation, captions_of
from vlp.io import atomic_write


class SampleSpec(NamedTuple):
    """A sample to build, with one image or two by file name."""

    key: str  # printable, without dots, slashes and spaces
    images: tuple[str, ...]
    annotation: Annotation
    size: tuple[int, int] | None = None  # (width, height) that boxes refer to; None: the image's


class Fault(NamedTuple):
    """An unusable part of the raw data; the manifest counts them by kind and lists their ids."""

    kind: str
    id: str


def has_text(annotation: Annotation) -> bool:
    """Return whether a sample is of use for a training: it has a text, a label or a box."""
    fields = ("hypothesis", "statement", "label", "questions", "expressions", "boxes")
    # A label may be False.
    return bool(captions_of(annotation)) or any(
        getattr(annotation, field) not in (None, "", []) for field in fields
    )


EMPTY, LINK, LONG = "empty caption", "caption of a URL alone", "caption too long"
_JOINERS = "\u200c\u200d"
_ENTITY = re.compile(r"&(?:#\d{2,7}|#[xX][0-9a-fA-F]{2,6}|[A-Za-z]\w*)(?:;|(?![\w=]))")
_PERSON = re.compile(r"<\s*person\s*>", re.IGNORECASE)
_PHRASE = re.compile(r"\[/EN#\d+\S* ([^\]]*)\]")  # with its entity in Flickr30k Entities
_URL = re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE)


def clean_caption(text: str) -> str:
    """Decode HTML entities, drop invisible characters, normalise Unicode (NFC) and spaces."""
    # Twice, as some crawls escape entities twice.
    text = _ENTITY.sub(_decode_entity, _ENTITY.sub(_decode_entity, text))
    text = unicodedata.normalize("NFC", _PHRASE.sub(r"\1", text))
    # Printable ASCII, the usual case, has only visible characters.
    if not text.isascii() or not text.isprintable():
        text = "".join(map(_visible_form, text))
    # CC12M has `<PERSON>` where CC3M has `person`.
    return " ".join(_PERSON.sub("person", text).split())


def _decode_entity(entity: re.Match[str]) -> str:
    name = entity[0].removeprefix("&")
    # `html.unescape` also decodes beginnings of a name: `&notit;` to `¬it;`.
    return html.unescape(entity[0]) if name[0] == "#" or name in html5 else entity[0]


def drop_reason(caption: str, max_words: int) -> str | None:
    """Return `EMPTY`, `LINK` or `LONG` for a cleaned caption to drop, None for a usable one."""
    if not any(map(str.isalnum, caption)):
        return EMPTY
    if not any(map(str.isalnum, _URL.sub("", caption))):
        return LINK
    if caption.count(" ") >= max_words:
        return LONG
    return None


def clean_captions(
    texts: Iterable[str | None], key: str, max_words: int
) -> tuple[list[str], list[Fault]]:
    """Return an image's cleaned captions, and a Fault with id `KEY/caption N` per dropped one."""
    captions, dropped = [], []
    for number, text in enumerate(texts):
        caption = clean_caption(text or "")
        reason = drop_reason(caption, max_words)
        if reason is None:
            captions.append(caption)
        else:
            dropped.append(Fault(reason, f"{key}/caption {number}"))
    return captions, dropped


def _visible_form(character: str) -> str:
    category = unicodedata.category(character)
    # Control characters and line separators stand between words.
    if category in ("Cc", "Cs", "Zl", "Zp"):
        return " "
    # Format characters are invisible, but scripts and emoji need joiners.
    return "" if category == "Cf" and character not in _JOINERS else character


# A space must follow or precede the mark, as keys may start with #.
_COMMENT = re.compile(r"^#(?:\s|$)|\s#")
_FOLDER_HEADING = re.compile("# of (.+):")

Line = tuple[Path, str, str]  # of a take-down list: folder and key of a sample, reason


class TakeDown:
    """Samples to leave out, by key, `image_id` or `url`; `matched_lines`: lines with a sample."""

    def __init__(self, lines: frozenset[str] = frozenset()) -> None:
        self.lines = lines
        self.matched_lines: set[str] = set()

    @classmethod
    def read(cls, path: Path | None, out: Path | None = None) -> TakeDown:
        """Read a list; lines under `# of FOLDER:` (see `write_list`) count for that `out` only."""
        if path is None:
            return cls()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the take-down list cannot be read ({error})") from error
        lines: dict[Path | None, set[str]] = defaultdict(set)
        folder = None
        for line in text.splitlines():
            if heading := _FOLDER_HEADING.fullmatch(line):
                folder = Path(heading[1]).resolve()
                lines[folder] |= set()
            elif key := _COMMENT.split(line)[0].strip():
                lines[folder].add(key)
        if out is not None and out.resolve() in lines:
            return cls(frozenset(lines[out.resolve()] | lines[None]))
        # A folder without a heading gets all lines.
        return cls(frozenset().union(*lines.values()))

    def matches(self, key: str, annotation: Annotation) -> bool:
        """Return whether a line is this sample's key, `image_id` or `url`; record the line."""
        url = (annotation.model_extra or {}).get("url")
        lines = self.lines.intersection(
            name for name in (key, annotation.image_id, url) if isinstance(name, str)
        )
        self.matched_lines |= lines
        return bool(lines)


def write_list(path: Path, heading: str, lines: Iterable[Line], folders: Iterable[Path]) -> int:
    """Write a take-down list of `folders` atomically; returns the number of keys."""
    count, folder = 0, None
    with atomic_write(path, error=ConfigError) as file:
        file.write(f"# {heading}\n".encode())
        # A heading for a folder without lines, too: `TakeDown.read` gives others all lines.
        file.writelines(f"# of {name}:\n".encode() for name in dict.fromkeys(folders))
        for line_folder, key, reason in lines:
            if line_folder != folder:
                folder = line_folder
                file.write(f"# of {folder}:\n".encode())
            file.write(f"# {reason}\n{key}\n".encode())
            count += 1
    return count
