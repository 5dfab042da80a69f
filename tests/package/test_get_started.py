"""Every command of README and of the get-started pages runs on small data, as it is printed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


def commands(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    calls = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language in ("", "bash", "sh", "console"):
            shell = ["/bin/bash", "--noprofile", "--norc", "-eu", "-c", SHELL + block]
            done = subprocess.run(shell, env={"PATH": "/nowhere"}, capture_output=True, check=False)
            assert done.returncode == 0, f"{page}: {done.stderr.decode()} in\n{block}"
            calls += done.stdout.decode().split("\x01\0")[:-1]
    return [call.rstrip("\0").split("\0") for call in calls]


ALL = {page: commands(page) for page in PAGES}
TESTED = {
    page: [call for call in calls if call[0] == "vlp" and tuple(call[:2]) not in ELSEWHERE]
    for page, calls in ALL.items()
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, str(Path(__file__).with_name("run_commands.py")), str(folder)]
    done = subprocess.run(
        program, input=json.dumps(TESTED), env=environment, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page, results):
    outcomes = [result for result in results if result["page"] == page]
    assert len(outcomes) == len(TESTED[page])
    for result in outcomes:
        call = " ".join(result["command"])
        assert result["code"] == 0, f"{call}: {result['code']}\n{result['said']}"


@pytest.mark.nightly
def test_own_images_end_in_a_recall_table(results):
    tables = [one["said"] for one in results if one["command"][1:3] == ["evaluate", "retrieval"]]
    assert len(tables) >= 4
    assert all("R@1" in said and "R@10" in said for said in tables)


@pytest.mark.nightly
@pytest.mark.skipif(("vlp", "app") in ELSEWHERE, reason="Gradio is not installed")
def test_own_images_end_on_the_page(results):
    pages = [one for one in results if one["page"].endswith("own-data.md")]
    shown = [one["said"] for one in pages if one["command"][1] == "app"]
    assert len(shown) == 2, "of the aligned towers and of the trained model"
    matches = ["'label': 'matches', 'confidence'" in said for said in shown]
    assert matches == [False, True], "aligned towers were never trained to match"
    for said in shown:
        assert re.search(r"^search [1-8]$", said, re.MULTILINE)


def test_what_is_installed_and_made_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    calls = [command for found in ALL.values() for command in found]
    for command in calls:
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), command
        for extras in re.findall(r"\[([\w,]+)\]", " ".join(command) if command[0] == "pip" else ""):
            assert set(extras.split(",")) <= project["optional-dependencies"].keys(), command
    assert {command[0] for command in calls} >= {"make", "pip", "vlp"}
