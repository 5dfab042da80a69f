"""Texts with URLs, and what is left of them."""

from __future__ import annotations

import time

import pytest

from vlp.config import Config, ConfigError, load_config, save_config
from vlp.io import redacted


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://user:secret@host/a?token=secret&x=1", "https://***@host/a?***"),
        ("https://secret@host", "https://***@host"),
        ("s3://user:sec@ret@bucket/a", "s3://***@bucket/a"),
        ("https:/user:secret@host/a", "https:/***@host/a"),  # a Path of it
        ("1https://u:secret@h", "1https://***@h"),
        ("see=https://h/{0..3}.tar?sig=sec/ret%3D: cannot", "see=https://h/{0..3}.tar?*** cannot"),
        ("403, url='https://h/x?token=secret' (b)", "403, url='https://h/x?*** (b)"),
        (
            '{"path": "https://h/x#access_token=secret", "b": 1}',
            '{"path": "https://h/x#***", "b": 1}',
        ),
        ("https://${U}:${P}@h/x?token=${T}&k=${K}", "https://${U}:${P}@h/x?token=${T}&k=${K}"),
        ("https://h/x?token=${T}&k=secret", "https://h/x?***"),
        ("https://me:${P}@h", "https://***@h"),
        ("s3://bucket/images@v2, https://host/a?", "s3://bucket/images@v2, https://host/a?"),
        ("https://a/1.tar,https://u:secret@h/2.tar", "https://a/1.tar,https://***@h/2.tar"),
        ("zip://*.tar::https://u:secret@h/x.zip", "zip://*.tar::https://***@h/x.zip"),
        ("['https://a/x','https://u:secret@h/y']", "['https://a/x','https://***@h/y']"),
        ("s3://b/0?.tar,https://secret@h/y?t=secret", "s3://b/0?.tar,https://***@h/y?***"),
        ("git+https://secret@h/x#secret", "git+https://***@h/x#***"),
        ("ftp://secret@h/x?secret", "ftp://***@h/x?***"),
        ("hf://gpt2@main/x", "hf://gpt2@main/x"),
        ("hf://u:secret@main/x?.tar?v=secret", "hf://***@main/x?.tar?***"),
        ("s3://b/shard-0000?.tar", "s3://b/shard-0000?.tar"),
        ("s3://b/x.tar?versionId=secret", "s3://b/x.tar?***"),
        ("a?b=c user:name@host /folder/file.tar", "a?b=c user:name@host /folder/file.tar"),
        ("s3://KEY:se/cr+et@bucket/x", "s3://***@bucket/x"),
        ("https://user:pass word@host/x", "https://***@host/x"),
        ("ftp://user:a/b?c#d e@host/x", "ftp://***@host/x"),
        ("zip://a.jpg::s3://key:se/cret@b/c", "zip://a.jpg::s3://***@b/c"),
        ("https://host/x;token=secret/y?z", "https://host/x;***/y?***"),
        ("s3://bucket/x;token=secret", "s3://bucket/x;***"),
        ("s3://${K}:${S}@b/x;token=${T}", "s3://${K}:${S}@b/x;token=${T}"),
        ("https://h:80/x of me@host", "https://h:80/x of me@host"),
        ("https://h:80: refused me@host", "https://h:80: refused me@host"),
        ("https://h: refused me@host", "https://h: refused me@host"),
        ("https://h/a@2x.png, s3://b/c@2x.png", "https://h/a@2x.png, s3://b/c@2x.png"),
    ],
)
def test_secrets_are_left_out(text: str, left: str) -> None:
    assert redacted(text) == left
    assert redacted(left) == left


def test_long_texts_take_no_time() -> None:
    began = time.monotonic()
    for letter in (
        "a",
        "a1",
        "a:/",
        "${a}",
        "@",
        "?",
        "s3://a?",
        "s3://a?b=,",
        "a:b ",
        "s3://a:b ",
    ):
        redacted("https://" + letter * 20_000 + "!")
        redacted(letter * 20_000)
    assert time.monotonic() - began < 5


class Place(Config):
    path: str
    more: dict[str, list[str]]


def test_a_configuration_keeps_its_secrets_and_writes_none(tmp_path) -> None:
    url = "https://user:secret@host/a?token=secret"
    place = Place(path=url, more={"a": [url]})
    save_config(place, tmp_path / "config.yaml")
    assert "secret" not in (tmp_path / "config.yaml").read_text()
    written = load_config(tmp_path / "config.yaml", Place)
    assert written.path == written.more["a"][0] == "https://***@host/a?***"
    assert place.model_dump()["path"] == place.path == url


def test_errors_of_a_configuration_show_none(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text(
        "path: [https://user:secret@host/a?token=secret]\nmore: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml", Place)
    assert "secret" not in repr(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml", Place, ["https://user:secret@host/a?token=secret"])
    assert "secret" not in repr(caught.value)
