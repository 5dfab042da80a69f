"""A URL where a path is meant is refused, and never becomes a folder called `s3:`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.cli.main import main
from vlp.config import ConfigError, load_config
from vlp.io import as_url, atomic_folder, write_text
from vlp.lock import FolderLock
from vlp.training.config import PretrainConfig

URL = "zz://bucket/folder"
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    yield tmp_path
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
def test_commands_refuse_urls(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(line)
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert f"{URL} is a URL" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["output", "data.cache"])
def test_what_a_run_writes_is_on_a_disk(key: str) -> None:
    value = f"{{folder: '{URL}', limit: 1GB}}" if key == "data.cache" else URL
    with pytest.raises(ConfigError, match="zz://bucket/folder is a URL; name a folder on a disk"):
        load_config(ROOT / "configs/pretrain/scenes_tiny.yaml", PretrainConfig, [f"{key}={value}"])


def test_nothing_below_writes_at_a_url() -> None:
    for write in (
        lambda: write_text(Path(URL) / "x", ""),
        lambda: FolderLock(Path(URL)),
        lambda: atomic_folder(Path(URL)).__enter__(),
    ):
        with pytest.raises((OSError, ConfigError), match="URL"):
            write()


def test_a_path_that_was_a_url_is_known_again() -> None:
    assert as_url(Path("s3://a//b")) == "s3://a/b"
    assert as_url("https://u:p@host/x?y=1") == "https://u:p@host/x?y=1"
    assert as_url(Path("file:///a/b")) == "file:///a/b"
    for local in (
        "hub:/tmp/set",
        "local-dir:/tmp/model",
        "a/b",
        "/a",
        "./s3:x",
        "C:/x",
        "hub:owner/name",
        "a=s3://b",
        3,
        None,
    ):
        assert as_url(local) is None, local
