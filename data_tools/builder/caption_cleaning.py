"""The rule by which every caption is cleaned, the same for all corpora.

1. HTML entities become the characters they stand for (`&amp;` -> `&`), twice where a crawl has
   escaped them twice.
2. Unicode is composed (NFC).
3. Control characters become spaces; format characters that are not seen (soft hyphen, byte order
   mark, direction marks) go. The two joiners stay, for scripts and emoji need them.
4. The placeholder `<PERSON>` of CC12M becomes `person`, the word that CC3M has in its place.
5. White space is collapsed.

Case and punctuation stay: they are the tokenizer's. A caption that then holds no letter or digit,
only URLs, or too many words is dropped, never shortened.
"""

from __future__ import annotations

import argparse
import html
import re
import unicodedata
from collections.abc import Iterable

from data_tools.builder.sample_spec import Refused

MAX_WORDS = 256
"""Longest caption that is kept unless told otherwise: CC12M's own limit."""

EMPTY, LINK, LONG = "empty caption", "caption of a URL alone", "caption too long"

_JOINERS = "\u200c\u200d"
_PERSON = re.compile(r"<\s*person\s*>", re.IGNORECASE)
_URL = re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE)


def add_caption_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--max-words`."""
    parser.add_argument(
        "--max-words",
        type=int,
        default=MAX_WORDS,
        metavar="N",
        help=f"drop captions of more words (default {MAX_WORDS})",
    )


def clean_caption(text: str) -> str:
    """Return the caption by the rule of this module; nothing is dropped yet."""
    text = html.unescape(html.unescape(text))
    text = unicodedata.normalize("NFC", text)
    text = "".join(map(_visible, text)) if not text.isascii() or not text.isprintable() else text
    return " ".join(_PERSON.sub("person", text).split())


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
    texts: Iterable[str], key: str, max_words: int = MAX_WORDS
) -> tuple[list[str], list[Refused]]:
    """Return the captions of one image that are kept, in order, and what was dropped.

    Args:
        texts: as the raw data has them.
        key: of the sample; what is dropped is named `KEY/caption 2`, counted from 0.
        max_words: of a caption.
    """
    kept, dropped = [], []
    for number, text in enumerate(texts):
        caption = clean_caption(text)
        reason = why_dropped(caption, max_words)
        if reason is None:
            kept.append(caption)
        else:
            dropped.append(Refused(reason, f"{key}/caption {number}"))
    return kept, dropped


def _visible(character: str) -> str:
    category = unicodedata.category(character)
    if category in ("Cc", "Cs", "Zl", "Zp"):
        return " "
    return "" if category == "Cf" and character not in _JOINERS else character
