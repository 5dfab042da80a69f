"""`vlp positions compare`, and the page of docs that leads there from an encoding in 20 lines."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vlp.config import PLUGINS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "how-to" / "add-an-encoding.md"
SMALL = [
    "--seeds", "0,1", "training.steps=2", "task.data.image_size=16", "training.batch=8",
    "task.model.options={patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}",
    "training.optimiser.warmup_steps=0", "training.log_every=1",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch, class_folders):
    """An empty folder with images and the page's encoding."""
    class_folders(tmp_path / "images/train")
    class_folders(tmp_path / "images/test")
    code = blocks("python")[0]
    assert len(code.splitlines()) <= 22
    (tmp_path / "my_bias.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PLUGINS, raising=False)
    return tmp_path


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def command(line, folder, *more):
    words = shlex.split(line.replace("\\\n", " "))
    assert words[0] == "vlp"
    return subprocess.run(
        [sys.executable, "-m", "launch", *words[1:], *more],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def small(line):
    """The page's comparison, of a smaller model and fewer encodings."""
    line = re.sub(r"--seeds \S+ --epochs \S+", "", line.replace("vit_small", "vit_tiny"))
    return line.replace("rope-mixed,irpe-product", "rope-mixed")


@pytest.mark.nightly
def test_the_page_leads_to_a_table(folder):
    line = small(blocks("bash")[1])
    done = command(line, folder, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^my-bias .*Holm", done.stdout, re.MULTILINE)
    out = folder / "runs" / "compare"
    latex = (out / "report.tex").read_text()
    assert "my-bias &" in latex
    assert "| my-bias |" in (out / "report.md").read_text()
    rows = list(csv.DictReader((out / "figures.csv").open()))
    assert [(row["variant"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("my-bias", "own", "rope-mixed") for seed in "01"
    ]
    trained = json.loads((out / "my-bias/0/model/config.json").read_text())["task"]["model"]
    assert trained["positions"][0]["name"] == "my-bias"
    assert trained["absolute"] == "drop"

    again = command(line, folder, *SMALL)  # nothing is done twice
    assert "6 runs, 6 of them done" in again.stdout
    wrong = command(line, folder, *SMALL, "training.steps=3")
    assert wrong.returncode == 2
    assert "holds a run of other settings" in wrong.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "vit_tny_patch16_224"], "model vit_tny_patch16_224: "),
        (["--model", "cait_xxs24_224"], "Cait mixes the logits of its heads"),
        (["--encodings", "sap"], r"unknown position encoding 'sap' \(did you mean 'sape'"),
        (["--encodings", "anchor"], "lies between an image and a text|cross-modal"),
        (["--encodings", "rope-mixed:k"], "rope-mixed has no choice of queries, keys and values"),
        (["--seeds", "0"], r"seeds"),
        (["--reference", "sape"], "unknown variants sape"),
        (["training.step=3"], "did you mean 'training.steps'"),
        (["--plugin", "gone.py"], "plugin .*gone.py: there is no such file"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(folder, change, message, capsys):
    from launch.cli.main import main

    words = ["positions", "compare", "--model", "vit_tiny_patch16_224", "--encodings", "rope-mixed"]
    data = ["--train", "images/train", "--test", "images/test"]
    assert main([*words, *data, *SMALL, *change]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.startswith("error: ")
    assert not (folder / "runs/compare/own").exists()
