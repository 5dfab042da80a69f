import json
import math
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from evaluation.ablations.config import AblationConfig, MeasuredConfig
from evaluation.ablations.figures import evaluate_images, last_losses
from evaluation.ablations.tables import (
    QUERIES,
    bootstrap,
    holm,
    image_recall,
    lay_out,
    paired_t_test,
    paired_tests,
    read_figures,
    report,
    to_frame,
    values_of,
)
from evaluation.latex import latex_table
from launch.cli.main import main
from vlp.training.run_folder import read_log

T_TWO_DEGREES = 4.302652729911275
"""The 97.5 % quantile of Student's t with two degrees of freedom, from a printed table."""
PLAIN = {
    "output": "out",
    "scenes": "shards",
    "training": {"config": "x.yaml"},
    "variants": {"none": {}, "ape": {}, "rpe": {}},
    "tables": [
        {
            "title": "Table 1, 50 %",
            "figures": {"all swaps": "swaps/{view}/all", "R@1 t→i": "t2i", "unknown": "x"},
            "tested": {"all swaps": ["swaps/{view}/all"], "R@1": ["t2i", "i2t"]},
            "paper": ["TR", "IR"],
            "reference": "none",
            "rows": [
                {"label": "None", "variant": "none", "paper": [94.3, 83.0]},
                {"label": "APE & more", "variant": "ape", "paper": [94.5, 83.2]},
                {"label": "APE, shuffled", "variant": "ape", "view": "shuffled"},
                {"label": "RPE", "variant": "rpe"},
            ],
        }
    ],
}


@pytest.fixture
def config(tmp_path):
    return AblationConfig.model_validate({**PLAIN, "output": str(tmp_path / "out")})


def run(swaps, shuffled=50.0, t2i=10.0, i2t=20.0):
    return {"swaps/image/all": swaps, "swaps/shuffled/all": shuffled, "t2i": t2i, "i2t": i2t}


def figures():
    found = {("none", seed): run(50.0 + seed) for seed in range(3)}
    found |= {("ape", seed): run(60.0 + seed + 0.1 * seed**2, i2t=22.0) for seed in range(3)}
    return to_frame(found | {("rpe", 1): run(51.0)})


def rejected(p, level):
    """Holm's procedure by its definition: test the smallest p first, and stop at the first miss."""
    found, left = set(), dict(enumerate(p))
    while left:
        smallest = min(left, key=left.get)
        if left[smallest] > level / len(left):
            break
        found.add(smallest)
        del left[smallest]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_an_adjusted_p_is_the_smallest_level_that_rejects(seed):
    p = np.random.default_rng(seed).uniform(0, 0.3, 7).round(2).tolist()  # with ties
    adjusted = holm(p)
    for number, each in enumerate(adjusted):
        assert each >= p[number]
        if each < 1:
            assert number in rejected(p, each + 1e-9)
            assert number not in rejected(p, each - 1e-9)


def test_a_difference_is_tested_by_students_t():
    gaps = [1.0, 1.5, 0.5, 1.2, 0.8]
    found = paired_t_test(gaps)
    assert found["mean"] == pytest.approx(1.0)
    t = 1.0 / (found["deviation"] / math.sqrt(5))
    # Two-sided p of t with 4 degrees of freedom, in closed form.
    cdf = 0.5 + (t / math.sqrt(4 + t * t)) * (1 + 2 / (4 + t * t)) / 2
    assert found["p"] == pytest.approx(2 * (1 - cdf), rel=1e-6)
    assert (found["low"] + found["high"]) / 2 == pytest.approx(1.0)
    three = paired_t_test([1.0, 2.0, 4.0])
    half = T_TWO_DEGREES * statistics.stdev([1, 2, 4]) / 3**0.5
    assert (three["high"] - three["low"]) / 2 == pytest.approx(half)
    assert (paired_t_test([0.0, 0.0])["p"], paired_t_test([1.0, 1.0])["p"]) == (1.0, 0.0)


def test_recall_is_read_by_seed_and_image(tmp_path):
    for seed, ranks in ((0, [1, 9, 2, 1, 7]), (1, [1, 1, 1, 1, 1])):
        rows = ["direction,image,caption,match"]
        kinds = ["text_to_image,a,0", "text_to_image,a,1", "image_to_text,a,"]
        kinds += ["text_to_image,b,0", "image_to_text,b,"]
        rows += [f"{kind},{rank}" for kind, rank in zip(kinds, ranks)]
        folder = tmp_path / "ace" / str(seed)
        folder.mkdir(parents=True)
        (folder / QUERIES).write_text("\n".join(rows))
    names = ["match/text_to_image/R@1", "match/image_to_text/R@1"]
    assert image_recall(tmp_path, "ace", [0, 1], names).tolist() == [[25, 50], [100, 100]]
    assert image_recall(tmp_path, "ace", [1, 2], names) is None


def test_a_bootstrap_covers_seeds_and_images():
    random = np.random.default_rng(1)
    images = random.normal(1, 10, (1, 400)).repeat(3, axis=0)
    found = bootstrap(images)  # seeds agree: the interval is that of images
    half = 1.96 * images[0].std() / 20
    assert found["low"] == pytest.approx(images.mean() - half, abs=0.1)
    assert found["high"] == pytest.approx(images.mean() + half, abs=0.1)
    assert found["p"] == pytest.approx(
        2 * statistics.NormalDist().cdf(-images.mean() / half * 1.96), abs=0.02
    )
    apart = images + np.array([[-6.0], [0.0], [6.0]])
    assert bootstrap(apart)["high"] - bootstrap(apart)["low"] > 2.5 * (found["high"] - found["low"])
    constant = bootstrap(np.full((2, 5), 3.0))
    assert constant == {"low": 3.0, "high": 3.0, "p": pytest.approx(2e-4, rel=1e-3)}


def test_rows_are_paired_with_the_reference_in_their_own_view(config):
    tests = paired_tests(config.tables[0], figures()).set_index(["row", "figure"])
    # The shuffled row has no R@1, RPE too few seeds, and None is the reference.
    assert set(tests.index) == {
        ("APE & more", "all swaps"), ("APE & more", "R@1"), ("APE, shuffled", "all swaps")
    }  # fmt: skip
    ape = tests.loc["APE & more", "all swaps"]
    assert (ape["mean"], ape["seeds"]) == (pytest.approx(10 + 0.5 / 3), 3)
    assert tests.loc["APE & more", "R@1"]["mean"] == 1.0  # of both directions
    assert tests.loc["APE, shuffled", "all swaps"]["mean"] == pytest.approx(-1.0)
    assert tests["holm"].tolist() == pytest.approx(holm(tests["p"].tolist()))


def test_tables_show_means_tests_and_the_paper(config):
    table = lay_out(config.tables[0], figures())
    none, ape, shuffled, rpe = (dict(zip(table.head, row)) for row in table.rows)
    assert (none["all swaps"], none["− none"], none["paper: IR"]) == ("51.0 ± 1.0", "", "83")
    assert none["unknown"] == "–"
    assert ape["− none"].startswith("+10.2 [9.6, 10.7], p < 0.001, Holm < 0.001")
    assert ape["R@1 − none"] == "+1.0 [1.0, 1.0], p < 0.001, Holm < 0.001"
    assert shuffled["− none"].startswith("-1.0 [")
    assert (shuffled["R@1 t→i"], shuffled["R@1 − none"], shuffled["seeds"]) == ("", "", "3")
    assert (rpe["all swaps"], rpe["− none"], rpe["seeds"]) == ("51.0", "–", "1")
    assert "for all 3 tests" in table.notes[0]


def test_a_figure_that_a_run_lacks_leaves_out_its_seed(config):
    found = figures()
    found.loc[("ape", 2), "i2t"] = float("nan")
    assert values_of(found, "ape", ["t2i", "i2t"]).index.tolist() == [0, 1]
    tests = paired_tests(config.tables[0], found).set_index(["row", "figure"])
    assert tests.loc["APE & more", "R@1"]["seeds"] == 2


def test_the_report_is_text_latex_and_csv(config):
    report(config, figures())
    out = Path(config.output)
    assert "| APE & more |" in (out / "report.md").read_text()
    tex = (out / "report.tex").read_text()
    assert r"51.0 $\pm$ 1.0" in tex
    assert latex_table(lay_out(config.tables[0], figures())) in tex
    pd.testing.assert_frame_equal(read_figures(out / "figures.csv"), figures())
    assert len(pd.read_csv(out / "tests.csv")) == 3
    assert "–" in report(config, to_frame({}))


def test_retrieval_by_three_rankings_and_foils_are_measured(model_folder, scene_shards, tmp_path):
    (tmp_path / "model").symlink_to(model_folder)
    measured = MeasuredConfig(shards=(str(scene_shards),), rerank=4, foils=9)
    figures = evaluate_images(tmp_path, measured)
    ways = ("text_to_image", "image_to_text")
    stages = ("dual", "rerank", "match")
    wanted = {f"{stage}/{way}/R@{k}" for stage in stages for way in ways for k in (1, 5, 10)}
    assert wanted | {"foils/match/all", "foils/dual/all"} <= set(figures)
    assert all(0 <= figure <= 100 for figure in figures.values())
    # Each figure is the share of queries whose first right answer has such a rank.
    queries = pd.read_csv(tmp_path / "queries.csv")
    assert queries.columns.tolist() == ["direction", "image", "caption", *stages]
    for way, own in queries.groupby("direction"):
        for stage in stages:
            for k in (1, 5, 10):
                share = 100 * (own[stage] <= k).mean()
                assert abs(share - figures[f"{stage}/{way}/R@{k}"]) < 1e-9
    without = evaluate_images(tmp_path, measured.model_copy(update={"foils": 0}))
    assert without == {name: v for name, v in figures.items() if not name.startswith("foils")}


def test_losses_of_the_last_fifth_of_the_steps_are_measured(tmp_path):
    rows = [
        {"step": n, "loss/itm": n / 10, "loss/total": 1.0, "seconds": 3} for n in range(5, 55, 5)
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, '{"event": "stop"}', '{"step": 5']))
    assert read_log(tmp_path / "log.jsonl") == (rows, 2)
    assert last_losses(rows, []) == {"training/itm": (4.5 + 5.0) / 2, "training/total": 1.0}
    rows[-1]["loss/itm"] = None  # it was not finite
    rows.append({"step": 50, "validation/mean": 0.5, "validation/loss/total": 2.0})
    assert last_losses(rows, []) == {"training/itm": 4.5, "training/total": 1.0}
    assert read_log(tmp_path / "elsewhere") == ([], 0)
    assert last_losses([], []) == {}


def test_a_line_after_a_resume_counts_as_much_as_its_steps():
    rows = [{"step": step, "samples": 1, "loss/total": 1.0} for step in (80, 90, 100)]
    rows[2]["loss/total"] = 4.0  # of steps 99 and 100 alone
    assert last_losses(rows, []) == {"training/total": 2.5}
    assert last_losses(rows, [40, 98]) == {"training/total": pytest.approx((1 + 0.2 * 4) / 1.2)}


def test_stored_tables_are_printed_with_the_plan(capsys):
    assert main(["reproduce", "irpe_tables", "--plan", "--only", "product"]) == 0
    said = capsys.readouterr().out
    assert "iRPE-K" in said
    assert said.splitlines()[-2:] == [
        "product/0 product/1 product/2", "3 runs, 2 side by side; above those to do"
    ]  # fmt: skip
