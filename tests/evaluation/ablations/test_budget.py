"""Plans of ablations: order, estimates, budgets, equal time, and what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests_support import TINY_MODEL

from evaluation.__main__ import main
from evaluation.ablations.ablation import plan, results, run_ablation
from evaluation.ablations.budget import make_budget
from evaluation.ablations.config import AblationConfig, MeasuredConfig
from evaluation.ablations.measures import evaluate_images, last_losses
from evaluation.ablations.runs import RESULT
from evaluation.ablations.tables import report
from vlp.config import ConfigError, load_config
from vlp.training.config import PretrainConfig
from vlp.training.run_folder import read_log

ROOT = Path(__file__).resolve().parents[3]
PHOTOGRAPHS = ROOT / "configs/ablation/flickr8k_towers.yaml"
SOURCE = ROOT / "configs/ablation/x.yaml"
NONE = {"overrides": {"model.cross.position": []}}
PLAIN = {
    "measured": {"shards": ["shards/val"], "rerank": 4, "foils": 0},
    "seeds": [0, 1, 2],
    "jobs": 1,
    "training": {"config": "../pretrain/scenes_tiny.yaml"},
    "variants": {
        "few": {"seeds": 2, "overrides": {"model.cross.anchor.groups": 1}},
        "none": NONE,
        "ace": {},
        "none-time": {**NONE, "seeds": 2, "minutes": 3},
    },
    "tables": [
        {
            "title": "Table 1",
            "figures": {"R@1": "rerank/text_to_image/R@1"},
            "tested": {"both": ["rerank/text_to_image/R@1", "rerank/image_to_text/R@1"]},
            "reference": "none",
            "rows": [
                {"label": "None", "variant": "none"},
                {"label": "ACE", "variant": "ace"},
                {"label": "few", "variant": "few"},
            ],
        }
    ],
}


@pytest.fixture
def config(tmp_path):
    return AblationConfig.model_validate({**PLAIN, "output": str(tmp_path / "out")})


def result(steps=100, seconds=300.0, whole=360.0, recall=10.0):
    names = ("rerank/text_to_image/R@1", "rerank/image_to_text/R@1")
    return {
        "figures": dict.fromkeys(names, recall),
        "training": {"steps": steps, "seconds": seconds},
        "seconds": whole,
    }


def finish(run, **made):
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / RESULT).write_text(json.dumps({"settings": run.settings, **result(**made)}))


def test_main_rows_come_first_and_seed_by_seed(config):
    first = [("none", 0), ("ace", 0), ("none", 1), ("ace", 1), ("none", 2), ("ace", 2)]
    last = [("few", 0), ("none-time", 0), ("few", 1), ("none-time", 1)]
    assert config.runs() == first + last


def test_a_budget_keeps_what_fits_and_names_the_rest(config):
    found = {("none", 0): result()}
    budget = make_budget(config, found, limit=31)
    # Six minutes a run by the one that is done, and four of three minutes of training.
    assert budget.minutes == {"none": 6.0, "ace": 6.0, "few": 6.0, "none-time": 4.0}
    assert budget.left_out == [("few", 0), ("none-time", 0), ("few", 1), ("none-time", 1)]
    assert budget.total() == 30.0
    assert "31 minutes leave out 4 runs of few, none-time." in budget.text()
    twice = make_budget(config.model_copy(update={"jobs": 2}), found, limit=31)
    assert twice.left_out == []
    assert twice.total() == 25.0
    assert "leave out nothing" in twice.text()


def test_where_no_time_is_known_the_first_run_tells_it(config):
    budget = make_budget(config, {}, limit=30)
    assert (budget.known, budget.kept) == (False, {("none", 0)})
    assert "--minutes-a-run or a finished run tells" in budget.text()
    told = make_budget(config, {}, minutes_a_run=5, limit=30)
    assert told.known
    assert len(told.kept) == 6


def test_a_variants_own_runs_tell_its_time_first(config):
    found = {("none", 0): result(), ("ace", 0): result(whole=600)}
    minutes = make_budget(config, found, minutes_a_run=99).minutes
    assert (minutes["none"], minutes["ace"], minutes["few"]) == (6.0, 10.0, 8.0)


def test_equal_time_is_steps_by_the_first_runs_speed(config):
    runs = {run.name: run for run in plan(config, SOURCE)[1]}
    assert "none-time/0" not in runs
    finish(runs["none/0"], steps=100, seconds=300.0)
    runs = {run.name: run for run in plan(config, SOURCE)[1]}
    assert runs["none-time/1"].settings["overrides"]["training.steps"] == 60
    variants = {**PLAIN["variants"], "other": {"minutes": 3, "overrides": {"training.batch": 2}}}
    with pytest.raises(ValueError, match=r"variants\.other\.minutes: no variant without"):
        AblationConfig.model_validate({**PLAIN, "output": "x", "variants": variants})


def test_tables_show_holm_and_cost_and_store_them(config):
    found = {("none", seed): result(recall=10 + seed) for seed in range(3)}
    found |= {("ace", s): result(recall=12 + s * s, seconds=600) for s in range(3)}
    found |= {("few", s): result(recall=11 + s * 1.5) for s in range(2)}
    text = report(config, found)
    assert "p corrected for all 2 tests of this table" in text
    (line,) = [line for line in text.splitlines() if line.startswith("ACE")]
    assert "Holm" in line
    assert line.split()[-2:] == ["100", "10.0"]
    (table,) = json.loads((Path(config.output) / "report.json").read_text())
    none, ace, few = table["rows"]
    assert none["differences"] == {}
    assert ace["training"] == {"steps": 100, "seconds": 600}
    raw = [row["differences"]["both"]["p"] for row in (ace, few)]
    adjusted = [row["differences"]["both"]["adjusted"] for row in (ace, few)]
    smaller, larger = sorted(raw)
    assert sorted(adjusted) == pytest.approx([2 * smaller, max(2 * smaller, larger)])


def test_a_limit_is_refused_where_backbones_are_trained(config):
    with pytest.raises(ConfigError, match="--budget: the time of `backbones`"):
        make_budget(config.model_copy(update={"backbones": {"b": config.variants["ace"]}}), {},
                    limit=1)  # fmt: skip


def test_photographs_are_planned_and_every_variant_is_a_pretraining(tmp_path, capsys):
    command = ["ablate", "--config", PHOTOGRAPHS, "--plan", "--minutes-a-run", 20, "--budget", 900]
    assert main([*map(str, command), f"output={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out
    assert "14 variants with 5 seeds, 27 variants with 3 seeds" in said
    assert "14 variants with 5 seeds, 27 variants with 3 seeds" in said
    assert "92 runs to do in 893 minutes, 2 side by side" in said
    assert "encoder-features" in said.rpartition("leave out")[2]
    assert not (tmp_path / "out").exists()
    config = load_config(PHOTOGRAPHS, AblationConfig, [f"output={tmp_path}"])
    runs = plan(config, PHOTOGRAPHS)[1]
    assert len(runs) == 14 * 5 + 24 * 3  # those of equal time follow
    for run in runs:
        overrides = [f"{k}={json.dumps(v)}" for k, v in run.settings["overrides"].items()]
        load_config(ROOT / run.settings["config"], PretrainConfig, overrides)


def test_shipped_ablations_are_planned_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["ablate", "--config", "configs/ablation/cross_position.yaml", "--plan"]) == 0
    assert "runs to do" in capsys.readouterr().out


def test_retrieval_and_foils_are_measured(model_folder, scene_shards):
    measured = MeasuredConfig(shards=(str(scene_shards),), rerank=4, foils=9)
    figures = evaluate_images(model_folder, 1, measured)
    wanted = {f"{stage}/{way}/R@{k}" for stage in ("dual", "rerank")
              for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)}  # fmt: skip
    assert wanted | {"foils/match/all", "foils/dual/all"} <= set(figures)
    assert all(0 <= figure <= 100 for figure in figures.values())
    without = evaluate_images(model_folder, 1, measured.model_copy(update={"foils": 0}))
    assert without == {name: v for name, v in figures.items() if not name.startswith("foils")}


def test_losses_of_the_last_fifth_of_the_steps_are_measured(tmp_path):
    rows = [
        {"step": n, "loss/itm": n / 10, "loss/total": 1.0, "seconds": 3} for n in range(5, 55, 5)
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, '{"event": "stop"}', '{"step": 5']))
    assert read_log(tmp_path / "log.jsonl") == (rows, 2)
    assert last_losses(rows) == {"training/itm": (4.5 + 5.0) / 2, "training/total": 1.0}
    rows[-1]["loss/itm"] = None  # it was not finite
    rows.append({"step": 50, "validation/mean": 0.5, "validation/loss/total": 2.0})
    assert last_losses(rows) == {"training/itm": 4.5, "training/total": 1.0}
    assert read_log(tmp_path / "elsewhere") == ([], 0)
    assert last_losses([]) == {}


@pytest.mark.slow
def test_two_variants_are_pretrained_and_a_third_for_as_long(scene_shards, model_folder, tmp_path):
    words = json.loads((model_folder / "config.json").read_text())["text"]["vocab_size"]
    base = {
        "output": "x",
        "model": {**TINY_MODEL, "text": {**TINY_MODEL["text"], "vocab_size": words}},
        "data": {"sources": [{"path": str(scene_shards)}], "vocabulary": str(model_folder),
                 "canonical_streams": 1, "workers": 0},
        "objectives": {"itm": {"group": 8}, "mim": None, "teacher": None},
        "training": {"batch": 8, "epochs": None, "steps": 2, "precision": "float32",
                     "optimiser": {"warmup_steps": 0}},
    }  # fmt: skip
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    wanted = {**PLAIN, "output": str(tmp_path / "out"), "seeds": [0, 1], "jobs": 2}
    wanted["training"] = {"config": "base.yaml"}
    wanted["measured"] = {"shards": [str(scene_shards)], "rerank": 4, "foils": 9}
    wanted["variants"] = {
        "few": {},
        "none": NONE,
        "ace": {},
        "none-time": {**NONE, "minutes": 1e-9},
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(wanted))
    config = load_config(tmp_path / "x.yaml", AblationConfig)
    kept = [(name, seed) for name in ("none", "ace", "none-time") for seed in (0, 1)]
    kept.remove(("none-time", 1))
    found = run_ablation(config, tmp_path / "x.yaml", say=lambda line: None, kept=kept)
    assert set(found) == set(kept)
    assert found["ace", 1]["training"]["steps"] == 2
    assert found["none-time", 0]["training"]["steps"] == 1
    assert "foils/match/all" in found["none", 0]["figures"]
    assert results(config, tmp_path / "x.yaml") == found
    assert "ACE" in report(config, found)
