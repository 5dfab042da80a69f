"""Every command of README and of the get-started pages runs on small data, as it is printed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from product import ROOT

PAGES = ["README.md", *(f"docs/get-started/{name}.md" for name in ("install", "demo", "own-data"))]

# Commands that are not run here, and what runs them.
ELSEWHERE = {("vlp", "demo"): "ten minutes: `make demo`"}
if importlib.util.find_spec("gradio") is None:
    ELSEWHERE["vlp", "app"] = "the page needs Gradio"

# Calls of these are written down instead of run; anything else in a block fails.
SHELL = """
for name in vlp make pip python git cd; do
  eval "$name() { printf '%s\\\\0' $name \\"\\$@\\" $'\\x01'; }"
done
"""


def commands(page: str) -> list[list[str]]:
    """The commands of a page in order, parsed by a shell."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language not in ("", "bash", "sh", "console"):
            continue
        shell = ["/bin/bash", "--noprofile", "--norc", "-eu", "-c", SHELL + block]
        ran = subprocess.run(shell, env={"PATH": "/nowhere"}, capture_output=True, check=False)
        assert ran.returncode == 0, f"{page}: {ran.stderr.decode()} in\n{block}"
        calls = ran.stdout.decode().split("\x01\0")[:-1]
        found += [call.rstrip("\0").split("\0") for call in calls]
    return found


ALL = {page: commands(page) for page in PAGES}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of every command, in a process without a checkout in its folder."""
    wanted = {
        page: [one for one in found if one[0] == "vlp" and tuple(one[:2]) not in ELSEWHERE]
        for page, found in ALL.items()
    }
    paths = [ROOT, ROOT / "tests" / "support"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    folder = tmp_path_factory.mktemp("commands")
    program = [sys.executable, str(Path(__file__).with_name("run_commands.py")), str(folder)]
    ran = subprocess.run(
        program, input=json.dumps(wanted), env=environment, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page: str, results: list[dict[str, Any]]) -> None:
    mine = [result for result in results if result["page"] == page]
    assert len(mine) == sum(
        one[0] == "vlp" and tuple(one[:2]) not in ELSEWHERE for one in ALL[page]
    )
    for result in mine:
        shown = " ".join(result["command"])
        assert result["code"] == 0, f"{shown}: {result['code']}\n{result['said']}"


def test_own_images_end_in_a_recall_table(results: list[dict[str, Any]]) -> None:
    tables = [one["said"] for one in results if one["command"][1:3] == ["evaluate", "retrieval"]]
    assert len(tables) >= 4
    assert all("R@1" in said and "R@10" in said for said in tables)


@pytest.mark.skipif(("vlp", "app") in ELSEWHERE, reason="Gradio is not installed")
def test_own_images_end_on_the_page(results: list[dict[str, Any]]) -> None:
    [said] = [
        one["said"]
        for one in results
        if one["page"].endswith("own-data.md") and one["command"][1] == "app"
    ]
    assert "'label': 'matches', 'confidence'" in said
    assert re.search(r"^search [1-8]$", said, re.MULTILINE)


def test_what_is_installed_and_made_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    calls = [command for found in ALL.values() for command in found]
    for command in calls:
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), command
        for extras in re.findall(r"\[([\w,]+)\]", " ".join(command) if command[0] == "pip" else ""):
            assert set(extras.split(",")) <= project["optional-dependencies"].keys(), command
    assert {command[0] for command in calls} >= {"make", "pip", "vlp"}
