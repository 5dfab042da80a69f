"""The scripts of `examples/` run, with tiny settings."""

import runpy
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
