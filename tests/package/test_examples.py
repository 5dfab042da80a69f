import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch
from pair_shards import tiny_folder
from question_shards import coloured, write_shards

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


def test_a_task_of_ones_own_is_trained_and_evaluated_by_the_commands(tmp_path):
    """`plugins` of a configuration reaches `vlp finetune`, `vlp --plugin` reaches `evaluate`."""
    shards = write_shards(tmp_path / "shards", coloured(12))
    folders = [f"task.data.{part}=[{shards}]" for part in ("train", "validation")]
    words = ["finetune", "colour", "--config", "examples/colour_task.yaml", *folders]
    words += [f"output={tmp_path / 'run'}", f"init_from={tiny_folder(tmp_path / 'start')}"]
    words += ["task.data.canonical_streams=1", "training.batch=12", "training.steps=2"]
    run(*words, "training.precision=float32")
    model = tmp_path / "run" / "best"
    plugin = ["--plugin", "examples/colour_task.py"]
    run(*plugin, "evaluate", "colour", "--model", str(model), "--shards", str(shards))
    assert json.loads((tmp_path / "run/evaluation/best/colour.json").read_text())["items"] == 12


def test_a_plugin_may_import_the_module_whose_defaults_load_it():
    environment = {**os.environ, "VLP_PLUGINS": str(ROOT / "examples/printed_anchor_loss.py")}
    code = "import vlp.models.config"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def run(*words):
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
