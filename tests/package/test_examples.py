"""The scripts of `examples/` run, with tiny settings."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def example(name):
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]


def test_an_encoding_leaves_a_timm_model_as_it_was():
    assert example("timm_position")(["--model", "vit_tiny_patch16_224"]) < 1e-4


def test_anchors_are_found_with_the_tiny_model(capsys):
    path = example("anchors")(["--text", "a red circle"])
    assert path.shape[1] == 16
    assert torch.isfinite(path).all()
    assert "circle" in capsys.readouterr().out


def test_an_own_folder_is_pretrained_on(tmp_path):
    command = [sys.executable, "examples/own_folder.py", "--out", tmp_path]
    subprocess.run([*command, "--steps", "2", "--batch", "16"], cwd=ROOT, check=True, timeout=300)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "loss/total" in line] == [1, 2]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
