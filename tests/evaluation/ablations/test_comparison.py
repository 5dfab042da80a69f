"""`vlp positions compare`, and the page of docs that leads there from an encoding in 20 lines."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evaluation.ablations.comparison import find_data, parse_encodings, write_comparison
from evaluation.ablations.config import AblationConfig
from vlp.config import PLUGINS, ConfigError, load_config

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "how-to" / "add-an-encoding.md"
SMALL = [
    "--seeds", "0,1", "--steps", "2", "--image-size", "16", "training.batch=8",
    "task.model.options={patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}",
    "training.optimiser.warmup_steps=0", "training.log_every=1",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with images and the page's encoding."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name, level in (("dark", 40), ("light", 200)):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for number in range(8):
                pixels = rng.integers(level - 40, level + 40, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / f"images/{part}/{name}/{number}.png")
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


@pytest.mark.integration
def test_the_page_leads_from_an_encoding_to_its_map_and_use(folder):
    look, compare, _ = blocks("bash")
    for line in look.strip().splitlines():
        done = command(line, folder)
        assert done.returncode == 0, done.stderr
        assert "my-bias" in done.stdout
    assert "same_column 2" in done.stdout
    assert "start (float) = 1" in done.stdout
    with Image.open(folder / "map.png") as image:
        assert len(set(image.convert("L").getdata())) > 10
    uses = "\n".join(blocks("python")[1:])
    done = subprocess.run([sys.executable, "-c", uses], cwd=folder, check=False)
    assert done.returncode == 0
    done = command(small(compare), folder, *SMALL, "--plan")
    assert "6 runs to do" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_the_page_leads_to_a_table(folder):
    line = small(blocks("bash")[1])
    done = command(line, folder, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^my-bias .*Holm", done.stdout, re.MULTILINE)
    out = folder / "runs" / "compare"
    latex = (out / "report.tex").read_text()
    assert r"\toprule" in latex
    assert "{}my-bias &" in latex
    assert "| my-bias |" in (out / "report.md").read_text()
    rows = list(csv.DictReader((out / "figures.csv").open()))
    assert [(row["variant"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("my-bias", "own", "rope-mixed") for seed in "01"
    ]
    for name in ("figures.png", "curves.png"):
        with Image.open(out / name) as image:
            assert len(set(image.convert("L").getdata())) > 10
    trained = json.loads((out / "my-bias/0/model/config.json").read_text())["task"]["model"]
    assert trained["positions"][0]["name"] == "my-bias"
    assert trained["absolute"] == "drop"

    again = command(line, folder, *SMALL)  # nothing is done twice
    assert "6 runs, 6 of them done" in again.stdout
    wrong = command(line, folder, *SMALL, "--steps", "3")
    assert wrong.returncode == 2
    assert "holds a run of other settings" in wrong.stderr


def test_encodings_are_read_and_the_nearest_is_named():
    assert parse_encodings("irpe-product:qk, own,none") == {
        "irpe-product:qk": {"name": "irpe-product", "roles": "qk"},
        "own": {},
        "none": {},
    }
    for text, message in (
        ("rope-mixd", r"unknown position encoding 'rope-mixd' \(did you mean 'rope-mixed'\?\)"),
        ("sape,sape", "names sape twice"),
        ("anchor", "anchor lies between an image and a text"),
        ("rope-mixed:k", "rope-mixed has no choice of queries, keys and values"),
        (" ,", "names none"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_encodings(text)


def test_data_is_a_folder_with_parts_or_two_places(tmp_path):
    with pytest.raises(ConfigError, match="there is neither a folder nor a tar file"):
        find_data(tmp_path / "none", None)
    with pytest.raises(ConfigError, match=r"has no part test, val, validation; give .* --test"):
        find_data(tmp_path, None)
    assert find_data(tmp_path, tmp_path / "t") == (tmp_path, tmp_path / "t")
    (tmp_path / "train").mkdir()
    (tmp_path / "test.tar.xz").touch()
    assert find_data(tmp_path, None) == (tmp_path / "train", tmp_path / "test.tar.xz")


def test_the_file_of_a_comparison_is_an_ablation(tmp_path):
    encodings = parse_encodings("sape:k,none")
    data = tmp_path / "a", tmp_path / "b"
    settings = {"name": "vit_tiny_patch16_224", "pretrained": False}
    file = write_comparison(
        tmp_path / "out", settings, encodings, data, (0, 1), {"training.steps": 3}, "keep"
    )
    config = load_config(file, AblationConfig)
    assert list(config.variants) == ["own", "sape:k", "none"]
    absolute = [each.overrides["task.model.absolute"] for each in config.variants.values()]
    assert absolute == ["keep", "keep", "drop"]
    assert config.tables[0].reference == "own"
    with pytest.raises(ConfigError, match="--seeds 0: a paired test needs two or more"):
        write_comparison(tmp_path, settings, encodings, data, (0,), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "vit_tny_patch16_224"], "model vit_tny_patch16_224: "),
        (["--model", "cait_xxs24_224"], "Cait mixes the logits of its heads"),
        (["--encodings", "sap"], r"unknown position encoding 'sap' \(did you mean 'sape'"),
        (["--seeds", "a,b"], "--seeds a,b: write whole numbers"),
        (["--reference", "sape"], "--reference sape is neither own, none nor in --encodings"),
        (["--data", "nowhere"], "--data nowhere: there is neither"),
        (["training.step=3"], "did you mean 'training.steps'"),
        (["--plugin", "gone.py"], "plugin .*gone.py: there is no such file"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(folder, change, message, capsys):
    from launch.__main__ import main

    words = ["positions", "compare", "--model", "vit_tiny_patch16_224", "--encodings", "rope-mixed"]
    assert main([*words, "--data", "images", *SMALL, *change]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.count("\n") == 1
    assert not (folder / "runs/compare/own").exists()
