"""A task that a test module registers: fine-tuned, evaluated, predicted, reported, shown."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml
from pair_shards import tiny_folder
from PIL import Image
from question_shards import AUGMENT, COLOURS, coloured, write_shards

import evaluation.downstream.registry
import vlp.tasks.downstream.registry
from evaluation.downstream import evaluate_task
from evaluation.downstream.predict import predict, predict_one, write_official
from evaluation.options import EvalOptions
from evaluation.page.gradio_page import abilities
from evaluation.page.session import TryIt
from evaluation.report.html_page import result_tables
from evaluation.report.sources import read_sources
from evaluation.suite.compare import compare
from evaluation.suite.suite import SuiteConfig, run_suite
from vlp.config import ConfigError, load_config
from vlp.serving.model_card import model_card
from vlp.tasks.downstream.registry import get_task, task_kinds, task_summary
from vlp.tasks.downstream.task import load_task
from vlp.training.config import FinetuneConfig

RUN = """
import sys, colour_task
from launch.finetune import build_task, select
from vlp.training.command import run_training
from vlp.training.config import FinetuneConfig
code = run_training(sys.argv[1], FinetuneConfig, [], False, build_task, select)
sys.exit(code)
"""


@pytest.fixture(scope="module", autouse=True)
def _registered():
    """Register the task for this module alone."""
    importlib.import_module("colour_task")
    yield
    del sys.modules["colour_task"]
    for registry in (vlp.tasks.downstream.registry, evaluation.downstream.registry):
        del registry._registered["colour"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of the fine-tuning command, and the shards."""
    root = tmp_path_factory.mktemp("colours")
    shards = write_shards(root / "shards", coloured(12))
    data = {"train": [str(shards)], "validation": [str(shards)], "augment": AUGMENT}
    config = {
        "output": str(root / "run"),
        "init_from": str(tiny_folder(root / "start")),
        "task": {"kind": "colour", "data": {**data, "canonical_streams": 1}},
        "training": {"batch": 12, "steps": 40, "precision": "float32", "evaluate_every": 20,
                     "optimiser": {"learning_rate": 0.01, "warmup_steps": 1}},
    }  # fmt: skip
    (root / "colour.yaml").write_text(yaml.safe_dump(config))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RUN, str(root / "colour.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return root / "run", shards


@pytest.mark.nightly
def test_the_model_folder_names_the_module_of_the_task(run, tmp_path):
    folder = shutil.copytree(run[0] / "best", tmp_path / "model")
    file = folder / "task.json"
    said = json.loads(file.read_text())
    assert said["plugins"] == {"colour": "colour_task"}
    file.write_text(json.dumps(said | {"plugins": {"taste": "their_task"}}))
    with pytest.raises(ConfigError, match="the task 'taste' comes from the plugin their_task"):
        load_task(folder)
    assert "their_task" not in sys.modules


def test_the_registry_knows_it():
    assert task_kinds()[-1] == "colour"
    assert task_summary("colour") == "colours"
    assert get_task("colour").config.__name__ == "ColourConfig"
    with pytest.raises(ValueError, match=r"there are retrieval, .*, colour"):
        get_task("taste")


def test_its_configuration_is_read_and_checked(run, tmp_path):
    folder, _ = run
    config = load_config(folder / "config.yaml", FinetuneConfig)
    assert isinstance(config.task, get_task("colour").config)
    with pytest.raises(ConfigError, match=r"did you mean 'task\.smoothing'"):
        load_config(folder / "config.yaml", FinetuneConfig, ["task.smoothin=0.1"])
    with pytest.raises(ConfigError, match="unknown kind of task 'taste'"):
        load_config(folder / "config.yaml", FinetuneConfig, ["task.kind=taste"])


def test_it_is_fine_tuned_evaluated_predicted_and_reported(run, tmp_path):
    folder, shards = run
    model = folder / "best"
    assert json.loads((folder / "report.json").read_text())["best"]["accuracy"] == 1
    result = evaluate_task(load_task(model), [shards], options=EvalOptions(resamples=20))
    assert result.metrics == {"accuracy": 1}
    result.save(model / "evaluation")

    found = predict(model, [shards])
    assert [row["prediction"] for row in found.rows[:3]] == ["red", "green", "blue"]
    assert "scores" not in found.rows[0]
    write_official(tmp_path / "out.json", found)
    assert json.loads((tmp_path / "out.json").read_text())[1] == {"001": "green"}
    Image.new("RGB", (20, 20), COLOURS["blue"]).save(tmp_path / "blue.png")
    said = predict_one(model, [tmp_path / "blue.png"], device="cpu")
    assert (said.kind, said.answers[0][0]) == ("colour", "blue")

    assert result_tables(read_sources([folder]))[0].title == "Colours"
    card = model_card(model)
    assert "trained with `vlp`, for colours." in card
    assert "--image a.jpg\n" in card


def test_suite_comparison_and_page_ask_the_registry(run, tmp_path):
    folder, shards = run
    job = {"task": "colour", "shards": [str(shards)]}
    models = [{"name": name, "model": str(folder / name), "tasks": [job]}
              for name in ("best", "model")]  # fmt: skip
    result = run_suite(SuiteConfig.model_validate({"models": models}), tmp_path)
    assert not result.failures
    same = compare(tmp_path / "best" / "colour", tmp_path / "model" / "colour", resamples=10)
    assert same.differences["accuracy"].items == 12
    one = TryIt(folder / "best", device="cpu")
    image = Image.new("RGB", (20, 20), COLOURS["green"])
    assert one.act("colour", [image])[0][0] == "green"
    assert abilities(one).startswith("Fine-tuned for colour.")
    assert "Colour (" not in abilities(one)
