import json
import shlex

import pytest
import yaml
from huggingface_hub import ModelCard
from pair_shards import entailment_shards, tiny_folder
from PIL import Image

from evaluation.__main__ import main
from evaluation.downstream import evaluate_task
from evaluation.options import EvalOptions
from vlp.serving.model_card import MARK, model_card, write_model_card
from vlp.tasks.downstream.task import start_parts
from vlp.tasks.pair_classification.task import (
    Nlvr2AssignmentConfig,
    Nlvr2Config,
    PairClassification,
    SnliVeConfig,
)


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "tiny")


def test_what_the_card_says_of_use_runs(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (20, 20)).save("photo.jpg")
    _, block, _ = model_card(folder).split("## Use")[1].split("```", 2)
    names = {}
    exec(block.removeprefix("python").replace("FOLDER", str(folder)), names)
    assert names["log_odds"].shape == (1,)


def test_the_hub_reads_the_front_matter(tmp_path):
    shards = entailment_shards(tmp_path / "shards")
    parts, _ = start_parts(str(tiny_folder(tmp_path / "start")), {})
    task = PairClassification(
        SnliVeConfig.model_validate({"data": {"train": [str(shards)]}}), parts
    )
    model = tmp_path / "snli" / "best"
    task.save_model(model, task.state_dict())
    result = evaluate_task(task, [shards], options=EvalOptions(resamples=5))
    result.save(model / "evaluation")
    config = {
        "init_from": "runs/base/model",
        "task": {"kind": "snli_ve", "data": {"train": [str(shards), "gone"]}},
        "training": {"batch": 64, "precision": "bf16", "optimiser": {"learning_rate": 2e-5}},
    }
    (tmp_path / "snli" / "config.yaml").write_text(yaml.safe_dump(config))
    report = {"ended": "finished", "step": 1200, "total_steps": 1200, "samples": 76800,
              "trained_samples": 76000, "seconds": 5400,
              "skipped_samples": {"no text": 800}, "ranks": 8, "device": "H100",
              "best": {"step": 1000, "accuracy": 0.8}}  # fmt: skip
    (tmp_path / "snli" / "report.json").write_text(json.dumps(report))
    data = ModelCard(model_card(model, "apache-2.0")).data
    assert (data.license, data.library_name) == ("apache-2.0", "vlp")
    assert {"ace-rpe", "snli_ve"} <= set(data.tags)
    values = {one.metric_type: one.metric_value for one in data.eval_results}
    assert values["accuracy"] == pytest.approx(100 * result.figures["accuracy"].value, abs=0.01)
    plain = ModelCard(model_card(tmp_path / "start")).data
    assert plain.pipeline_tag == "zero-shot-image-classification"
    assert plain.eval_results is None


def test_retrieval_results_are_those_of_the_last_stage(folder):
    out = folder / "evaluation"
    out.mkdir()
    figures = [
        {"stage": stage, "direction": "both", "name": "mean", "value": value, "low": 0, "high": 1,
         "chance": 0}
        for stage, value in (("dual", 0.5), ("rerank", 0.6))
    ]  # fmt: skip
    content = {"task": "retrieval", "shards": ["shards/coco/test"], "figures": figures}
    (out / "retrieval.json").write_text(json.dumps(content))
    (out / "retrieval.md").write_text("**Retrieval**\n")
    data = ModelCard(model_card(folder)).data
    assert [one.metric_value for one in data.eval_results] == [60]
    assert data.eval_results[0].dataset_name == "shards/coco/test"


def test_a_hand_written_card_stays(folder, capsys):
    (folder / "README.md").write_text("mine\n")
    assert not write_model_card(folder)
    assert (folder / "README.md").read_text() == "mine\n"
    assert main(["card", "--model", str(folder)]) == 2
    assert "was written by hand" in capsys.readouterr().err
    (folder / "README.md").write_text(f"{MARK}\nold\n")
    assert main(["card", "--model", str(folder)]) == 0
    assert "# tiny" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (SnliVeConfig, {}),
        (Nlvr2Config, {}),
        (Nlvr2Config, {"images": 1, "panels": 3}),
        (Nlvr2AssignmentConfig, {}),
    ],
)
def test_the_command_on_the_card_works(tmp_path, monkeypatch, capsys, config, options):
    parts, _ = start_parts(str(tiny_folder(tmp_path / "start")), {})
    task = PairClassification(
        config.model_validate({"data": {"train": ["unused"]}, **options}), parts
    )
    task.save_model(tmp_path / "FOLDER", task.state_dict())
    for name in ("a.jpg", "b.jpg"):
        Image.new("RGB", (48, 16)).save(tmp_path / name)
    commands = [shlex.split(line) for line in model_card(tmp_path / "FOLDER").splitlines()
                if line.startswith("python -m evaluation predict")]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(commands[0][3:]) == 0
    assert set(capsys.readouterr().out.split()[::2]) == set(task.config.classes)
    assert ("jsonl" in commands[1]) == (config is Nlvr2AssignmentConfig)


def test_a_licence_stays_until_another_is_given(folder):
    write_model_card(folder, "apache-2.0")
    write_model_card(folder)
    assert ModelCard.load(folder / "README.md").data.license == "apache-2.0"
    write_model_card(folder, "mit")
    assert ModelCard.load(folder / "README.md").data.license == "mit"
