"""Comparisons of encodings: their plan, tables, and a whole one at the smallest size."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest
import yaml
from PIL import Image

from evaluation.ablations.ablation import check, plan, results, run_ablation
from evaluation.ablations.config import AblationConfig, StageConfig
from evaluation.ablations.runs import RESULT
from evaluation.ablations.tables import report, smallest_difference
from launch.__main__ import main
from vlp.config import ConfigError, load_config, parse_yaml

ROOT = Path(__file__).resolve().parents[3]
PLAIN = {
    "output": "runs/x",
    "training": {"config": "../vision/cifar10_vit_tiny.yaml"},
    "variants": {"none": {}, "ape": {"overrides": {"task.model.absolute": "keep"}}},
    "tables": [
        {
            "title": "Table 1",
            "figures": {"top-1": "top1", "loss": "loss"},
            "paper": ["C10"],
            "reference": "none",
            "rows": [
                {"label": "None", "variant": "none"},
                {"label": "APE", "variant": "ape", "paper": [87.41]},
            ],
        }
    ],
}
SOURCE = ROOT / "configs" / "ablation" / "x.yaml"


@pytest.fixture
def config(tmp_path):
    return AblationConfig.model_validate(PLAIN | {"output": str(tmp_path / "out")})


def found(config):
    return {
        (name, seed): {"figures": {"top1": base + seed, "loss": 1.0}}
        for name, base in (("none", 50.0), ("ape", 60.0))
        for seed in config.seeds
    }


def test_an_override_is_told_in_one_way():
    file = ROOT / "configs" / "ablation" / "fourier_widgets.yaml"
    given = load_config(file, AblationConfig, ["training.overrides={training.steps: 9}"])
    assert plan(given, file)[1][0].settings["overrides"]["training.steps"] == 9
    with pytest.raises(ConfigError, match=r"overrides='\{training.steps: ...\}' for the first"):
        load_config(file, AblationConfig, ["training.overrides.training.steps=9"])


def test_the_plan_goes_seed_by_seed(config, tmp_path):
    _, runs = plan(config, SOURCE)
    assert [run.name for run in runs[:3]] == ["none/0", "ape/0", "none/1"]
    assert runs[1].settings["overrides"] == {"task.model.absolute": "keep", "training.seed": 0}
    assert runs[0].settings["config"] == "configs/vision/cifar10_vit_tiny.yaml"
    place = tmp_path / "x.yaml"
    place.write_text("")
    elsewhere = config.model_copy(update={"training": StageConfig(config=str(place))})
    assert plan(elsewhere, SOURCE)[1][0].settings["config"] == str(place)
    assert [run.name for run in plan(config, SOURCE, ["ape"])[1]] == ["ape/0", "ape/1", "ape/2"]
    with pytest.raises(ConfigError, match="unknown variants rope; there are none, ape"):
        run_ablation(config, SOURCE, ["rope"])


def test_tables_have_means_tests_and_the_paper(config, tmp_path):
    text = report(config, found(config))
    lines = [line for line in text.splitlines() if line.startswith(("None", "APE"))]
    assert lines[0].split() == ["None", "51.0", "±", "1.0", "1.0", "±", "0.0", "3"]
    assert "61.0 ± 1.0" in lines[1]
    assert "+10.0 ± 0.0, p < 0.001" in lines[1]
    assert lines[1].endswith("87.41")
    rows = list(csv.reader((tmp_path / "out" / "figures.csv").open()))
    assert rows[0] == ["variant", "seed", "loss", "top1"]
    assert rows[1] == ["ape", "0", "1.0", "60.0"]
    assert len(rows) == 7
    with Image.open(tmp_path / "out" / "figures.png") as image:
        assert len(set(image.convert("L").getdata())) > 10
    assert "2 variants with 3 seeds" in smallest_difference(config)
    assert "–" in report(config, {})
    without = found(config)
    del without["ape", 1]["figures"]["top1"], without["none", 0]["figures"]["loss"]
    (line,) = [x for x in report(config, without).splitlines() if "APE" in x]
    assert "61.0 ± 1.4" in line
    assert "+10.0 ± 0.0" in line
    table = config.tables[0].model_copy(update={"decimals": 3})
    finer = config.model_copy(update={"tables": (table,), "expected_deviation": 0.02})
    text = report(finer, found(finer))
    (line,) = [x for x in text.splitlines() if x.startswith("APE")]
    assert "61.000 ± 1.000" in line
    assert "+10.000 ± 0.000" in line
    assert "0.062 points are the smallest" in smallest_difference(finer)


def test_what_cannot_be_is_named():
    table = PLAIN["tables"][0]
    for change, message in (
        ({"reference": "rope"}, "unknown variants rope"),
        ({"rows": [{"label": "A", "variant": "ape", "paper": [1, 2]}]}, "A has 2 figures"),
        ({"figures": {}}, "no figures"),
    ):
        with pytest.raises(ValueError, match=message):
            AblationConfig.model_validate(PLAIN | {"tables": [{**table, **change}]})


def commands(file):
    """Overrides of each command that the head of a configuration gives; "..." stands for the first.

    A command may go on in the next line.
    """
    lines = file.read_text().split("\noutput:")[0].split("\n")
    text = "".join(line.removeprefix("#  ") for line in lines if line.startswith("#   "))
    words = shlex.split(text.replace(" vlp ablate --config ", " ... "))
    starts = [number for number, word in enumerate(words) if word == "..."]
    assert starts[0] == 0 or words[0].startswith("OMP_NUM_THREADS="), words
    parts = [words[start + 1 : end] for start, end in zip(starts, [*starts[1:], None])]
    assert parts[0] == [f"configs/ablation/{file.name}"]
    return [[], *parts[1:]]


def test_the_overrides_of_heads_are_valid():
    files = [
        file
        for file in (ROOT / "configs" / "ablation").glob("*.yaml")
        if "vlp ablate --config" in file.read_text()
        and not {"corpus", "measured"} & parse_yaml(file.read_text()).keys()
    ]
    assert files
    given = [(file, overrides) for file in files for overrides in commands(file)]
    assert len(given) > len(files)
    for file, overrides in given:
        check(load_config(file, AblationConfig, overrides), file)


@pytest.mark.parametrize("flags", [[], ["--plan"]])
def test_the_last_variants_mistake_is_named_before_the_first_is_trained(flags, tmp_path, capsys):
    settings = PLAIN | {
        "output": str(tmp_path / "out"),
        "training": {"config": str(ROOT / "configs/vision/cifar10_vit_tiny.yaml")},
        "variants": PLAIN["variants"] | {"wrong": {"overrides": {"task.model.absolut": "keep"}}},
    }
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert main(["ablate", "--config", str(file), *flags]) == 2
    said = "variant wrong: its overrides: unknown key 'task.model.absolut'"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.integration
@pytest.mark.distributed
def test_a_whole_comparison_is_trained_evaluated_and_never_done_twice(tiny_ablation):
    config = load_config(tiny_ablation, AblationConfig)
    said: list[str] = []
    run_ablation(config, tiny_ablation, ["none"], said.append)
    assert said[0] == "2 runs, 0 of them done"
    done = results(config, tiny_ablation)
    assert set(done) == {("none", 0), ("none", 1)}
    assert 0 <= done["none", 0]["figures"]["top1"] <= 100
    assert done["none", 0]["training"]["steps"] == 2
    assert 0 < done["none", 0]["training"]["seconds"] < done["none", 0]["seconds"]
    (Path(config.output) / "none" / "1" / RESULT).unlink()
    again = run_ablation(config, tiny_ablation, ["none"], said.append)
    assert said[-2] == "2 runs, 1 of them done"
    assert again["none", 1]["figures"] == done["none", 1]["figures"]
