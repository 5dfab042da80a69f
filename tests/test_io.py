from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vlp.io
from launch.cli.main import main
from vlp.config import Config, ConfigError, load_config, save_config
from vlp.io import as_url, atomic_folder, redact, restore_folder, write_text
from vlp.lock import FolderLock
from vlp.training.config import PretrainConfig

WRITER = """
import json, sys
from pathlib import Path
from vlp.io import atomic_folder, restore_folder
place, number = Path(sys.argv[1]), 0
restore_folder(place)
while True:
    number += 1
    with atomic_folder(place) as partial:
        partial.mkdir()
        for name in ("a", "b"):
            (partial / name).write_text(json.dumps([number] * 1000))
"""


def read(place, seconds):
    """Read a folder again and again; returns the numbers of those that were there, each whole."""
    values, end = set(), time.monotonic() + seconds
    while time.monotonic() < end:
        for name in ("a", "b"):
            content = json.loads((place / name).read_text())
            if content != 0:
                assert len(content) == 1000
                assert len(set(content)) == 1
                values.add(content[0])
    return values


def write(place, number):
    with atomic_folder(place) as partial:
        partial.mkdir()
        (partial / "a").write_text(str(number))


@pytest.mark.nightly
def test_a_reader_finds_a_whole_folder_while_it_is_written_and_its_writer_killed(tmp_path):
    place, rng, values = tmp_path / "model", random.Random(1), set[int]()
    write(place, 0)
    (place / "b").write_text("0")
    for _ in range(8):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(place)])
        try:
            values |= read(place, seconds=rng.uniform(0.3, 0.8))
        finally:
            writer.kill()
            writer.wait()
        assert {path.name for path in place.iterdir()} == {"a", "b"}
    assert len(values) > 20


@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_former_folder_goes(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(vlp.io, "_exchange", lambda new, place: False)
    link, disk = tmp_path / "link", tmp_path / "disk"
    (disk / "model").mkdir(parents=True)
    link.symlink_to(disk / "model")
    for number in range(3):
        (disk / "model.tmp").symlink_to(tmp_path)  # in the way
        write(link, number)
        assert (disk / "model" / "a").read_text() == str(number)
        assert [path.name for path in disk.iterdir()] == ["model"]
    assert link.is_symlink()
    with pytest.raises(FileExistsError):
        write(disk / "model" / "a", 4)


def test_a_folder_that_was_put_aside_comes_back(tmp_path, monkeypatch):
    place = tmp_path / "model"
    write(place, 1)
    monkeypatch.setattr(vlp.io, "_exchange", lambda new, place: False)
    calls, rename = [], Path.rename

    def interrupted(self, to):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(place, 2)
    monkeypatch.undo()
    assert not place.exists()
    restore_folder(place)
    assert (place / "a").read_text() == "1"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://user:secret@host/a?token=secret&x=1", "https://***@host/a?***"),
        ("https://secret@host", "https://***@host"),
        ("s3://KEY:7/ab+secret@b/x http://h:80/x", "s3://***@b/x http://h:80/x"),
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
def test_secrets_are_left_out(text, left):
    assert redact(text) == left
    assert redact(left) == left


class Place(Config):
    path: str
    more: dict[str, list[str]]


def test_a_configuration_keeps_its_secrets_and_writes_none(tmp_path):
    url = "https://user:secret@host/a?token=secret"
    place = Place(path=url, more={"a": [url]})
    save_config(place, tmp_path / "config.yaml")
    assert "secret" not in (tmp_path / "config.yaml").read_text()
    written = load_config(tmp_path / "config.yaml", Place)
    assert written.path == written.more["a"][0] == "https://***@host/a?***"
    assert place.model_dump()["path"] == place.path == url


def test_errors_of_a_configuration_show_none(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "path: [https://user:secret@host/a?token=secret]\nmore: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml", Place)
    assert "secret" not in repr(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml", Place, ["https://user:secret@host/a?token=secret"])
    assert "secret" not in repr(caught.value)


URL = "zz://bucket/folder"


@pytest.fixture
def untouched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    yield
    assert os.listdir(tmp_path) == ["there"]


@pytest.mark.parametrize(
    "line",
    [
        ["data", "index", URL],
        ["data", "stats", "there", "--out", URL],
        ["data", "import", URL, "--out", "there"],
        ["evaluate", "retrieval", "--model", "there", "--shards", "there", URL],
        ["evaluate", "retrieval", "--model", URL, "--shards", "there"],
    ],
)
def test_commands_refuse_urls(line, capsys, untouched):
    try:
        code = main(line)
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert f"{URL} is a URL" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["output", "data.cache"])
def test_what_a_run_writes_is_on_a_disk(key):
    value = f"{{folder: '{URL}', limit: 1GB}}" if key == "data.cache" else URL
    with pytest.raises(ConfigError, match="zz://bucket/folder is a URL; this key takes"):
        load_config(
            Path(__file__).parents[1] / "configs/pretrain/scenes_tiny.yaml",
            PretrainConfig,
            [f"{key}={value}"],
        )


def test_nothing_below_writes_at_a_url(untouched):
    for write in (
        lambda: write_text(Path(URL) / "x", ""),
        lambda: FolderLock(Path(URL)),
        lambda: atomic_folder(Path(URL)).__enter__(),
    ):
        with pytest.raises((OSError, ConfigError), match="URL"):
            write()


def test_a_path_that_was_a_url_is_known_again():
    assert as_url(Path("s3://a//b")) == "s3://a/b"
    assert as_url("https://u:p@host/x?y=1") == "https://u:p@host/x?y=1"
    assert as_url(Path("file:///a/b")) == "file:///a/b"
    prefixed = ("hub:/tmp/set", "local-dir:/tmp/model", "hub:owner/name", "C:/x")
    for local in (*prefixed, "a/b", "/a", "./s3:x", "a=s3://b", 3, None):
        assert as_url(local) is None, local
