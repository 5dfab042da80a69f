"""Ablations of models that are fine-tuned for a downstream task."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pair_shards import entailment_shards, tiny_folder

from evaluation.ablations.ablation import plan, results, run_ablation, run_folders
from evaluation.ablations.config import AblationConfig
from evaluation.ablations.tables import report
from vlp.config import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def file(tmp_path):
    """A configuration of one variant, on shards of its own."""
    train = entailment_shards(tmp_path / "train", 16)
    val = entailment_shards(tmp_path / "val", 8)
    overrides = {
        "init_from": str(tiny_folder(tmp_path / "start")),
        "task.data.train": [str(train)],
        "task.data.validation": [],
        "task.data.canonical_streams": 1,
        "training.batch": 8,
        "training.steps": 2,
        "training.log_every": 1,
        "training.precision": "float32",
    }
    plain = {
        "output": str(tmp_path / "out"),
        "fine_tuned": {"task": "snli_ve", "shards": [str(val)]},
        "seeds": [0, 1],
        "jobs": 1,
        "training": {"config": str(ROOT / "configs/finetune/scenes_snli_ve.yaml")},
        "variants": {"plain": {"overrides": overrides}},
        "tables": [
            {
                "title": "Entailment",
                "figures": {"accuracy": "accuracy"},
                "reference": "plain",
                "rows": [{"label": "plain", "variant": "plain"}],
            }
        ],
    }
    place = tmp_path / "x.yaml"
    place.write_text(yaml.safe_dump(plain))
    return place


@pytest.mark.integration
@pytest.mark.distributed
def test_variants_are_fine_tuned_and_have_their_tasks_figures(file):
    config = load_config(file, AblationConfig)
    run_ablation(config, file, say=lambda _: None)
    found = results(config, file)
    assert set(found) == {("plain", 0), ("plain", 1)}
    assert 0 <= found["plain", 0]["figures"]["accuracy"] <= 100
    assert found["plain", 1]["training"]["steps"] == 2
    text = report(config, found, run_folders(config, file))
    assert "plain" in text
    out = Path(config.output)
    for name in ("report.md", "report.tex", "figures.csv", "figures.png", "curves.png"):
        assert (out / name).stat().st_size > 100


def test_the_plan_names_the_command_and_the_shards(file):
    config = load_config(file, AblationConfig)
    run = plan(config, file)[1][0]
    assert (run.script, run.words) == ("finetune.py", ("snli_ve",))
    assert run.settings["fine_tuned"]["task"] == "snli_ve"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fine_tuned.task=vqq", "task 'vqq' is unknown; did you mean vqa"),
        ("measured={shards: [x]}", "`measured` is of pretraining and `fine_tuned` of a task"),
        ("corpus={}", "`corpus` has its own evaluation"),
    ],
)
def test_what_does_not_go_together_is_named(file, change, message):
    with pytest.raises(ConfigError, match=message):
        load_config(file, AblationConfig, [change])
