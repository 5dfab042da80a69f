from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.builder.samples import (
    EMPTY,
    LINK,
    LONG,
    clean_caption,
    clean_captions,
    why_dropped,
)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("  a dog\t and\n a cat . ", "a dog and a cat ."),
        ("salt &amp; pepper &lt;3", "salt & pepper <3"),
        ("twice &amp;quot;escaped&amp;quot;", 'twice "escaped"'),
        ("<PERSON> and < Person > at home", "person and person at home"),
        ("cafe\u0301", "caf\u00e9"),
        ("soft\u00adhyphen\ufeff \u200bzero\u200b", "softhyphen zero"),
        ("line\u2028break\x00and\x1bbell", "line break and bell"),
        ("\U0001f468\u200d\U0001f469 joined", "\U0001f468\u200d\U0001f469 joined"),
        ("no\u00a0break", "no break"),
        ("Case, Stays!", "Case, Stays!"),
    ],
)
def test_the_rule(raw: str, clean: str) -> None:
    assert clean_caption(raw) == clean


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("", EMPTY),
        (" .,- ", EMPTY),
        ("&nbsp;", EMPTY),
        ("https://x.org/a.jpg", LINK),
        ("www.x.org , http://y.org", LINK),
        ("see www.x.org", None),
        ("a b c d", LONG),
        ("a b c", None),
        ("\u72ac", None),
    ],
)
def test_what_is_dropped(raw: str, reason: str | None) -> None:
    assert why_dropped(clean_caption(raw), max_words=3) == reason


def test_captions_of_a_image_are_named_by_their_number() -> None:
    kept, dropped = clean_captions(["a dog", " ", "www.x.org", "a &amp; b"], "k7")
    assert kept == ["a dog", "a & b"]
    assert dropped == [(EMPTY, "k7/caption 1"), (LINK, "k7/caption 2")]


@given(st.text())
def test_what_is_clean_stays(text: str) -> None:
    clean = clean_caption(text)
    assert clean == " ".join(clean.split())
    assert not any(unicodedata.category(character) in ("Cc", "Cs") for character in clean)
    if "&" not in clean and "<" not in clean:
        assert clean_caption(clean) == clean
