"""The wheel holds all that training needs: it is built, installed and used without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TINY = "model.text.layers=1 model.image.layers=1 model.cross.layers=1 model.text.vocab_size=512"
TINY = [*TINY.split(), "training.steps=2", "training.batch=32", "data.workers=0"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel of a copy of the product, in a folder of its own, without what it depends on."""
    copy, wheels, site = (tmp_path_factory.mktemp(name) for name in ("copy", "wheels", "site"))
    for name in ("vlp", "data_tools", "evaluation", "launch", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, copy], check=True)
    [wheel] = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    return site


def run(site, folder, *arguments):
    environment = os.environ | {
        "PYTHONPATH": str(site),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "launch", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.commands
def test_data_training_evaluation_and_report_in_an_empty_folder(installed, tmp_path):
    assert str(installed / "vlp") in run(installed, tmp_path, "info")
    shards = "shards/scenes"
    run(installed, tmp_path, "data", "scenes", "--out", shards, "--train", "64", "--val", "32",
        "--image-size", "64")  # fmt: skip
    run(installed, tmp_path, "data", "vocabulary", "--shards", f"{shards}/train",
        "--size", "250", "--out", f"{shards}/vocabulary")  # fmt: skip
    run(installed, tmp_path, "train", "--config", "configs/pretrain/scenes_tiny.yaml", *TINY)
    model = "runs/scenes_tiny/model"
    said = run(installed, tmp_path, "evaluate", "retrieval", "--model", model,
               "--shards", f"{shards}/val", "--rerank", "4",
               "--out", f"{model}/evaluation")  # fmt: skip
    assert "re-ranked top 4" in said
    run(installed, tmp_path, "report", "runs/scenes_tiny", "--out", "report.html")
    assert "re-ranked top 4" in (tmp_path / "report.html").read_text()
    start = json.loads((tmp_path / "runs" / "scenes_tiny" / "run.json").read_text())["starts"][0]
    assert not any(one["repository"] == ROOT.name for one in start["git"])


def test_every_dependency_is_pinned_to_a_version_that_it_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(line) for group in groups for line in group]
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            pinned.setdefault(canonicalize_name(pin.name), []).append(pin)
    for requirement in wanted:
        if requirement.name == "vlp":
            continue
        pins = pinned.get(canonicalize_name(requirement.name), [])
        assert pins, f"{requirement.name} is not in constraints.txt: run `make lock`"
        for pin in pins:
            (specifier,) = pin.specifier
            assert specifier.operator == "==", pin
            assert requirement.specifier.contains(specifier.version, prereleases=True), requirement
