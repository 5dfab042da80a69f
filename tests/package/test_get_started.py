"""Every command of README and of the get-started pages runs on small data, as it is printed."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from typing import Any

import pytest
from fenced_commands import commands, run_all
from product import ROOT

PAGES = ["README.md", *(f"docs/get-started/{name}.md" for name in ("install", "demo", "own-data"))]

# Commands that are not run here, and what runs them.
ELSEWHERE = {("vlp", "demo"): "ten minutes: `make demo`"}
if importlib.util.find_spec("gradio") is None:
    ELSEWHERE["vlp", "app"] = "the page needs Gradio"

ALL = {page: commands(page) for page in PAGES}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of every command, in a process without a checkout in its folder."""
    wanted = {
        page: [one for one in found if one[0] == "vlp" and tuple(one[:2]) not in ELSEWHERE]
        for page, found in ALL.items()
    }
    return run_all(wanted, tmp_path_factory.mktemp("commands"), timeout=500)


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page: str, results: list[dict[str, Any]]) -> None:
    mine = [result for result in results if result["page"] == page]
    assert len(mine) == sum(
        one[0] == "vlp" and tuple(one[:2]) not in ELSEWHERE for one in ALL[page]
    )
    for result in mine:
        shown = " ".join(result["command"])
        assert result["code"] == 0, f"{shown}: {result['code']}\n{result['said']}"


@pytest.mark.nightly
def test_own_images_end_in_a_recall_table(results: list[dict[str, Any]]) -> None:
    tables = [one["said"] for one in results if one["command"][1:3] == ["evaluate", "retrieval"]]
    assert len(tables) >= 4
    assert all("R@1" in said and "R@10" in said for said in tables)


@pytest.mark.nightly
@pytest.mark.skipif(("vlp", "app") in ELSEWHERE, reason="Gradio is not installed")
def test_own_images_end_on_the_page(results: list[dict[str, Any]]) -> None:
    shown = [
        one["said"]
        for one in results
        if one["page"].endswith("own-data.md") and one["command"][1] == "app"
    ]
    assert len(shown) == 2, "of the aligned towers and of the trained model"
    matches = ["'label': 'matches', 'confidence'" in said for said in shown]
    assert matches == [False, True], "aligned towers were never trained to match"
    for said in shown:
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
