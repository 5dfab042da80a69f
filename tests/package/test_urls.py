"""A URL at any place of any command is read, written or refused, and never a folder called `s3:`.

The protocol of these is one that fsspec does not know, so each must be refused in a sentence.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup

from data_tools.__main__ import COMMANDS, MODULES
from launch.cli.main import commands, main
from vlp.config import ConfigError, load_config
from vlp.io import as_url, atomic_folder, write_text
from vlp.process.lock import FolderLock
from vlp.training.config import PretrainConfig

URL = "zz://bucket/folder"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLP_STAGING", str(tmp_path / "staging"))
    (tmp_path / "there").mkdir()
    yield tmp_path
    assert not [name for name in os.listdir(tmp_path) if ":" in name]


def tool_arguments() -> Iterator[tuple[str, str]]:
    """Every data tool with each of its arguments that is a path."""
    for name, (package, _) in COMMANDS.items():
        parser = parser_of(name, package)
        for action in parser._actions:
            if action.type is Path:
                yield name, action.dest
    yield "import", "place"


def parser_of(name: str, package: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    module = importlib.import_module(f"data_tools.{package}.{MODULES.get(name, name)}")
    module.add_arguments(parser)
    return parser


def line_of(parser: argparse.ArgumentParser, dest: str) -> list[str]:
    """A command line in which everything required is there, and `dest` is the URL."""
    line: list[str] = []
    chosen = [
        each
        for group in parser._mutually_exclusive_groups
        if group.required and dest not in [each.dest for each in group._group_actions]
        for each in [next(one for one in group._group_actions if one.type is Path)]
    ]
    for action in parser._actions:
        if action in chosen:
            line += [*action.option_strings[-1:], "there"]
        if not (action.required or action.dest == dest) or action.dest == "help":
            continue
        value = URL if action.dest == dest else next(iter(action.choices or ["there"]))
        value = "1" if action.type in (int, float) else value
        line += [*action.option_strings[-1:], value]
    return line


@pytest.mark.parametrize(("tool", "dest"), sorted(tool_arguments()))
def test_every_path_of_a_data_tool(
    tool: str, dest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = line_of(parser_of(tool, COMMANDS[tool][0]), dest)
    assert main(["data", tool, *line]) == 2, line
    said = capsys.readouterr().err.strip().splitlines()
    assert said == [f"error: {URL}: the protocol 'zz' is not known"]


def leaves(group: TyperGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from leaves(command, (*path, name)) if name != "data" else ()
        else:
            yield (*path, name), command


def is_place(param: Any) -> bool:
    return str(param.metavar).startswith(("DIR", "FILE", "RUN"))


def other_arguments() -> list[tuple[tuple[str, ...], str]]:
    """Every other command with each of its parameters that names a place."""
    return [
        (path, param.name)
        for path, command in leaves(commands())
        for param in command.params
        if is_place(param)
    ]


@pytest.mark.parametrize(("path", "name"), other_arguments(), ids=lambda value: str(value))
def test_every_place_of_other_commands(
    path: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = dict(leaves(commands()))[path]
    line: list[str] = []
    for param in command.params:
        if not (param.required or param.name == name):
            continue
        options = [each for each in param.opts if each.startswith("--")]
        other = "1" if getattr(param, "metavar", None) == "N" else "there"
        value = URL if param.name == name else other
        line += [*options[:1], value]
    try:
        code = main([*path, *line])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr().err.strip()
    assert (code, said.count("Traceback")) == (2, 0), said
    assert said.endswith(f"error: {URL}: the protocol 'zz' is not known"), (line, said)


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
