from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_tools.scenes import CORPUS_VERSION
from evaluation.ablations.ablation import _make_corpus, check, plan, results, run_ablation
from evaluation.ablations.config import AblationConfig, CorpusConfig
from evaluation.ablations.layouts import COLUMNS, SWAPS
from evaluation.ablations.runs import RESULT, SETTINGS
from evaluation.ablations.seed_tests import detectable, difference
from evaluation.ablations.tables import (
    gates,
    report,
    smallest_difference,
    swaps_difference,
    tables,
)
from vlp.config import ConfigError, load_config
from vlp.data.shards.shard_index import ShardIndex

ROOT = Path(__file__).resolve().parents[3]
STAGE = {
    "config": "../pretrain/scenes_tiny.yaml",
    "part": "twins",
    "overrides": {"training.steps": 2},
}
PLAIN = {
    "output": "out",
    "corpus": {},
    "seeds": [0, 1, 2],
    "pretraining": {**STAGE, "part": "train"},
    "backbones": {"anchor": {}, "unused": {}},
    "training": STAGE,
    "variants": {
        "none": {"backbone": "anchor", "overrides": {"model.cross.position": []}},
        "ape": {"backbone": "anchor", "overrides": {"model.cross.position": ["ape"]}},
    },
    "gates": [{"variant": "ape", "reference": "none"}],
    "tables": [
        {
            "title": "Table 1",
            "paper": ["F30K TR", "F30K IR"],
            "reference": "none",
            "rows": [
                {"label": "None", "variant": "none", "paper": [94.3, 83.0]},
                {"label": "APE", "variant": "ape", "paper": [94.5, 83.2]},
                {"label": "APE, shuffled", "variant": "ape", "view": "shuffled"},
            ],
        }
    ],
}  # fmt: skip

TABLE = PLAIN["tables"][0]


@pytest.fixture
def config(tmp_path):
    return AblationConfig.model_validate({**PLAIN, "output": str(tmp_path / "out")})


def figures(swaps: float) -> dict:
    names = [
        name.format(view=view, scorer=scorer)
        for name in COLUMNS.values()
        for view in ("image", "shuffled")
        for scorer in ("match", "words")
    ]
    own = {SWAPS.format(view="image", scorer="match"): swaps}
    return {"figures": {**dict.fromkeys(names, 50.0), **own}}


def test_the_plan_has_every_seed_of_what_is_used(config):
    backbones, variants = plan(config, Path("configs/ablation/x.yaml"))
    assert [run.name for run in backbones] == [f"backbone/anchor/{seed}" for seed in (0, 1, 2)]
    assert [run.name for run in variants[:3]] == [
        "variant/none/0",
        "variant/ape/0",
        "variant/none/1",
    ]
    one = variants[1].settings["overrides"]
    assert one["init_from"] == f"{config.output}/backbone/anchor/0/model"
    assert one["model.cross.position"] == ["ape"]
    assert one["training.seed"] == 0
    assert one["data.sources"] == [{"path": "shards/ablation/twins"}]
    assert "init_from" not in backbones[0].settings["overrides"]


def test_some_variants_can_be_run_alone(config):
    _, variants = plan(config, Path("configs/ablation/x.yaml"), ["ape"])
    assert [run.name for run in variants] == [f"variant/ape/{seed}" for seed in (0, 1, 2)]
    with pytest.raises(ConfigError, match="unknown variants rpe; there are none, ape"):
        run_ablation(config, Path("configs/ablation/x.yaml"), ["rpe"])


@pytest.mark.parametrize(
    "change", [{"version": CORPUS_VERSION - 1}, {"version": None}, {"seed": 1}]
)
def test_a_corpus_of_another_version_or_other_settings_is_refused(config, change, tmp_path):
    corpus = config.corpus.model_copy(update={"folder": str(tmp_path / "corpus")})
    kept = {**corpus.model_dump(exclude_none=True), "version": CORPUS_VERSION, **change}
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "ablation.json").write_text(json.dumps(kept))
    with pytest.raises(ConfigError, match="older version"):
        run_ablation(config.model_copy(update={"corpus": corpus}), Path("configs/ablation/x.yaml"))


@pytest.mark.integration
def test_a_corpus_can_be_of_chosen_swaps_alone(tmp_path):
    folder = tmp_path / "corpus"
    corpus = CorpusConfig(
        folder=str(folder), train=0, val=4, twins=8, swaps=4, kinds=("distance",), vocabulary=64
    )
    said: list[str] = []
    _make_corpus(corpus, said.append)
    _make_corpus(corpus, said.append)  # it is there
    assert said == [f"generating {folder}"]
    assert (folder / "vocabulary").exists()
    swap = ShardIndex.open(folder / "swaps").read(0, 0).annotation.scene["swap"]
    assert swap["kind"] == "distance"
    with pytest.raises(ConfigError, match="other settings"):
        _make_corpus(corpus.model_copy(update={"kinds": None}), said.append)


def test_columns_are_those_that_the_corpus_has(config):
    one = figures(50.0)
    del one["figures"][COLUMNS["binding"].format(view="image", scorer="match")]
    found = {(name, seed): one for name in ("none", "ape") for seed in (0, 1, 2)}
    (table,) = tables(config, found)
    assert "relation" in table.head
    assert "binding" not in table.head
    assert {len(row) for row in table.rows} == {len(table.head)}


def test_the_scorer_may_be_the_head_of_masked_words(config):
    found = {(name, seed): figures(50.0) for name in ("none", "ape") for seed in (0, 1, 2)}
    for seed in (0, 1, 2):
        found["ape", seed]["figures"][SWAPS.format(view="image", scorer="words")] = 70.0 + seed
    assert swaps_difference(found, "ape", "none", "match").mean == 0
    assert swaps_difference(found, "ape", "none", "words").mean == 21
    (table,) = tables(config, found)
    assert "ITM" not in table.head
    (table,) = tables(config.model_copy(update={"scorer": "words"}), found)
    assert "ITM" in table.head
    assert "71.0 ± 1.0" in table.rows[1]


def test_a_table_may_be_about_anchors(config):
    table = {**TABLE, "about": "anchors"}
    config = AblationConfig.model_validate({**PLAIN, "tables": [table], "seeds": [0, 1]})
    names = ["dual/text_to_image/R@1", "dual/image_to_text/R@1", "pointing/colour", "paths/spread"]
    found = {}
    for seed in (0, 1):
        for variant, gain in (("none", 0), ("ape", 2)):
            own = [60 + gain, 70, 90 + 5 * gain + seed * gain, 1 + gain / 8]
            found[variant, seed] = {"figures": {**figures(50)["figures"], **dict(zip(names, own))}}
        del found["none", seed]["figures"]["paths/spread"]  # it has no ACE-RPE
    (table,) = tables(config, found)
    none, ape, shuffled = table.rows
    assert none[table.head.index("spread")] == "–"
    assert ape[table.head.index("spread")] == "1.25 ± 0.00"
    assert ape[table.head.index("colour words − none")].startswith("+11.0 ± 1.4")
    assert ape[table.head.index("R@1 − none")].startswith("+1.0 ± 0.0")
    assert "shape words" not in table.head  # nobody has them
    shown = [head for head, cell in zip(table.head, shuffled) if cell]
    assert shown == ["", "seeds"]  # anchors are asked of images as they are
    assert "Differences of colour words varied by 1.4 points" in table.text()


def test_finished_runs_are_read_and_others_refused(config):
    source = Path("configs/ablation/x.yaml")
    run = plan(config, source)[1][0]
    run.folder.mkdir(parents=True)
    (run.folder / RESULT).write_text(json.dumps({"settings": run.settings, **figures(60)}))
    assert results(config, source) == {("none", 0): {"settings": run.settings, **figures(60)}}
    other = config.model_copy(update={"training": config.training.model_copy(
        update={"overrides": {"training.steps": 3}})})  # fmt: skip
    with pytest.raises(ConfigError, match="of other settings"):
        results(other, source)


def test_a_run_is_refused_when_its_training_changed(tmp_path):
    """Whether it is finished, trained, or cut off, and whichever file says what it trains."""
    (tmp_path / "base.yaml").write_text(
        "data: {sources: [a], canonical_streams: 4}\ntraining: {batch: 16, steps: 9}\n"
    )
    (tmp_path / "own.yaml").write_text("inherit: base.yaml\ndata: {workers: 2}\n")
    plain = {
        "output": str(tmp_path / "out"),
        "measured": {"shards": ["a"]},
        "training": {"config": "own.yaml", "overrides": {"training.steps": 2}},
        "variants": {"none": {}, "ape": {}},
        "tables": [{**TABLE, "figures": {"loss": "training/total"}}],
    }
    config, source = AblationConfig.model_validate(plain), tmp_path / "x.yaml"
    run = plan(config, source)[1][0]
    told = run.settings["configuration"]
    assert told["training"] == {"batch": 16, "steps": 2, "seed": 0}
    run.folder.mkdir(parents=True)
    result = {"settings": run.settings, **figures(60)}
    without = {key: v for key, v in run.settings.items() if key != "configuration"}
    older = {"settings": without, **figures(60)}
    for name, text, stored in (
        (SETTINGS, run.settings, {}),
        (RESULT, result, {("none", 0): result}),
        (RESULT, older, {("none", 0): older}),  # of a version that did not store it
    ):
        (run.folder / name).write_text(json.dumps(text))
        (tmp_path / "own.yaml").write_text("inherit: base.yaml\ndata: {workers: 2}\n")
        assert results(config, source) == stored
        # An override stands over the steps, and no training depends on the others.
        (tmp_path / "own.yaml").write_text(
            "inherit: base.yaml\noutput: x\ndata: {workers: 3}\ntraining: {steps: 8}\n"
        )
        assert results(config, source) == stored
        (tmp_path / "own.yaml").write_text("inherit: base.yaml\ntraining: {batch: 32}\n")
        if text is older:
            assert results(config, source) == stored
            continue
        message = r"none/0 holds a run of other settings \(training.batch: saved 16, now 32\)"
        with pytest.raises(ConfigError, match=message):
            results(config, source)
    (run.folder / RESULT).unlink()
    other = config.model_copy(update={"training": config.training.model_copy(
        update={"overrides": {"training.steps": 3}})})  # fmt: skip
    with pytest.raises(ConfigError, match="of other settings: delete it, or change output"):
        check(other, source)


def test_differences_are_paired():
    rng = np.random.default_rng(0)
    base = rng.normal(size=5) * 20
    found = difference(base + np.array([1.0, 1.5, 0.5, 1.2, 0.8]), base)
    assert found.mean == pytest.approx(1.0)
    t = 1.0 / (found.deviation / math.sqrt(5))
    # Two-sided p of t with 4 degrees of freedom, in closed form.
    cdf = 0.5 + (t / math.sqrt(4 + t * t)) * (1 + 2 / (4 + t * t)) / 2
    assert found.p == pytest.approx(2 * (1 - cdf), rel=1e-6)
    assert difference([1.0], [0.0]).seeds == 1
    assert str(difference([1.0], [0.0])) == "–"
    assert difference([1.0, 2.0], [1.0, 2.0]).p == 1.0


def test_the_smallest_difference_is_what_a_simulation_finds(config):
    deviation, seeds = 2.0, 5
    least = detectable(deviation, seeds)
    rng = np.random.default_rng(0)
    found = [
        difference(rng.normal(least, deviation, seeds), np.zeros(seeds)).p < 0.05
        for _ in range(2000)
    ]
    assert np.mean(found) == pytest.approx(0.8, abs=0.04)
    with pytest.raises(ValueError, match="two seeds"):
        detectable(1.0, 1)
    assert "2 variants with 3 seeds" in smallest_difference(config)


def test_tables_show_means_tests_and_the_paper(config):
    found = {("none", seed): figures(50 + seed) for seed in range(3)}
    found |= {("ape", seed): figures(60 + seed + 0.1 * seed**2) for seed in range(3)}
    (table,) = tables(config, found)
    none, ape, shuffled = table.rows
    assert none[0] == "None"
    assert none[table.head.index("all swaps")] == "51.0 ± 1.0"
    assert none[-2:] == ["94.3", "83"]
    assert ape[-5].startswith("+10.2 ± 0.2, p < 0.001")
    assert shuffled[-5].startswith("-1.0 ± 1.0")  # its own view, against the reference's images
    assert shuffled[-4:] == ["", "3", "", ""]
    assert all(len(row) == len(table.head) for row in table.rows)
    (line,) = gates(config, found)
    assert line.startswith("The split separates ape from none")
    assert "Table 1" in report(config, found)
    assert "does NOT separate" in gates(config, found | {("ape", 2): figures(10)})[0]
    assert swaps_difference(found, "ape", "none", "match").seeds == 3
    assert "–" in report(config, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gates": [{"variant": "rpe", "reference": "none"}]}, "unknown variants rpe"),
        ({"variants": {**PLAIN["variants"], "x": {"backbone": "none"}}}, "backbone 'none'"),
        ({"seeds": [0]}, "at least 2"),
        ({"pretraining": None}, "backbones need"),
        (
            {"tables": [{**TABLE, "rows": [{"label": "A", "variant": "ape", "paper": [1]}]}]},
            "A has 1 figures",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        AblationConfig.model_validate(PLAIN | change)


def test_the_configurations_in_the_box_are_valid():
    files = sorted((ROOT / "configs" / "ablation").glob("*.yaml"))
    assert len(files) > 15
    for file in files:
        check(load_config(file, AblationConfig), file)


@pytest.mark.slow
def test_a_whole_ablation_resumes_after_it_was_cut_off(tmp_path):
    """Corpus, backbones, variants, figures and tables, at the smallest size."""
    small = {
        "model.text.width": 16, "model.image.width": 16, "model.text.layers": 1,
        "model.image.layers": 1, "model.cross.layers": 1, "model.image.image_size": 32,
        "training.batch": 16, "training.checkpoint_every": 2, "training.optimiser.warmup_steps": 1,
        "objectives.itm.group": 8, "model.embed_dim": 16,
    }  # fmt: skip
    stage = {
        "config": str(ROOT / "configs/pretrain/scenes_tiny.yaml"),
        "overrides": {**small, "training.steps": 3},
    }
    corpus = {"folder": str(tmp_path / "corpus"), "train": 64, "val": 8, "twins": 64, "swaps": 8}
    corpus["image_size"] = 32
    plain = {
        **PLAIN,
        "output": str(tmp_path / "out"),
        "seeds": [0, 1],
        "corpus": corpus,
        "pretraining": {**stage, "part": "train"},
        "training": {**stage, "part": "twins"},
    }
    file = tmp_path / "ablation.yaml"
    file.write_text(yaml.safe_dump(plain))
    config = load_config(file, AblationConfig)
    said: list[str] = []
    found = run_ablation(config, file, say=said.append)
    assert set(found) == {(name, seed) for name in ("none", "ape") for seed in (0, 1)}
    assert "APE" in report(config, found)
    before = found["ape", 1]
    (Path(config.output) / "variant/ape/1" / RESULT).unlink()
    again = run_ablation(config, file, say=said.append)
    assert again["ape", 1]["figures"] == before["figures"]
    assert said[-2] == "4 runs, 3 of them done"
