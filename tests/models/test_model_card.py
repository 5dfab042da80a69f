import shlex

import pytest
from huggingface_hub import ModelCard
from pair_shards import entailment_shards, tiny_folder
from PIL import Image

from evaluation.__main__ import main
from evaluation.downstream.task_evaluation import evaluate_task
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
    data = ModelCard(model_card(model, "apache-2.0")).data
    assert (data.license, data.library_name) == ("apache-2.0", "vlp")
    assert {"ace-rpe", "snli_ve"} <= set(data.tags)
    values = {one.metric_type: one.metric_value for one in data.eval_results}
    assert values["accuracy"] == pytest.approx(100 * result.figures["accuracy"].value, abs=0.01)
    plain = ModelCard(model_card(tmp_path / "start")).data
    assert plain.pipeline_tag == "zero-shot-image-classification"
    assert plain.eval_results is None


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
