"""Stored tables: the registry, the JSON beside the pages, and a table that is run again."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest
import yaml

from evaluation.ablations import stored_tables as module
from evaluation.ablations.page_tables import PAGES, page_json, page_tables
from evaluation.ablations.stored_tables import NULL, REGISTRY, paired_tests, records, stored_tables
from launch.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
STORED = [name for name, table in stored_tables().items() if table.results()]
T_TWO_DEGREES = 4.302652729911275
"""The 97.5 % quantile of Student's t with two degrees of freedom, from a printed table."""


def test_every_configuration_and_every_stored_figure_is_in_the_registry():
    known = stored_tables()
    configurations = {file.name for file in REGISTRY.parent.parent.glob("*.yaml")}
    assert {table.entry.ablation for table in known.values()} - {None} == configurations
    assert {file.stem for file in REGISTRY.parent.glob("*.csv")} == set(STORED)
    assert {file.stem for file in RESULTS.glob("*.json")} == {*STORED, *PAGES}
    for name, table in known.items():
        assert (name in STORED) is not bool(table.entry.not_run)


@pytest.mark.parametrize("name", STORED)
def test_the_json_is_the_generators_and_says_why_a_field_is_null(name):
    table = stored_tables()[name]
    text = (RESULTS / f"{name}.json").read_text(encoding="utf-8")
    assert text == table.to_json(), "run `vlp reproduce --write docs/results`"
    found = json.loads(text)
    wanted = {"paper", "compared", "command", "hardware", "minutes", "seeds", "interval"}
    assert wanted <= found.keys()
    for each in found["figures"]:
        assert {"ours", "paper", "difference", "seeds", "interval"} <= each.keys()
    for fields in (found, *found["figures"], *found["tests"]):
        assert {key for key, value in fields.items() if value is None} <= NULL.keys()
    config = table.config()
    assert {variant for variant, _ in table.results()} <= config.variants.keys()
    run = {row.label for each in config.tables for row in each.rows
           if any(row.variant == variant for variant, _ in table.results())}  # fmt: skip
    assert run <= {each["row"] for each in found["figures"] if each["ours"] is not None}
    if config.corpus is not None and name != "anchors":
        assert any(each["figure"] == "all swaps" and each["ours"] for each in found["figures"])


@pytest.mark.parametrize("page", PAGES)
def test_the_json_of_a_page_has_its_tables(page):
    markdown = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    text = (RESULTS / f"{page}.json").read_text(encoding="utf-8")
    assert text == page_json(markdown), "run `vlp reproduce --write docs/results`"
    assert json.loads(text) == page_tables(markdown)
    assert f"({page}.json)" in markdown


def test_a_pages_cells_become_numbers_where_they_are():
    page = """# Page
## Other
## Place
| | R@1, `dev` | against [None](none.md) |
|---|---|---|
| **ours** | **1,024.5** [−1.0, 2.0] | −0.5 ± 0.2, p 0.03 |
| theirs | 12 % | 1.0 / 2.0 |

| none | |
|---|---|
| | p 0.1 |
"""
    first, second = page_tables(page)
    assert first == {
        "headings": ["Page", "Place"],
        "columns": ["", "R@1, dev", "against None"],
        "rows": [
            [
                "ours",
                {"value": 1024.5, "interval": [-1.0, 2.0]},
                {"value": -0.5, "deviation": 0.2, "p": "0.03"},
            ],
            ["theirs", 12.0, "1.0 / 2.0"],
        ],
    }
    assert second["rows"] == [[None, "p 0.1"]]


def test_figures_agree_with_the_stored_ones():
    with (REGISTRY.parent / "irpe_tables.csv").open(encoding="utf-8") as lines:
        rows = {(row["variant"], row["seed"]): float(row["top1"]) for row in csv.DictReader(lines)}
    table = stored_tables()["irpe_tables"]
    found = {
        (each["table"].partition(":")[0], each["row"], each["figure"]): each
        for each in records(table.config(), table.results())
    }
    values = [rows["product", str(seed)] for seed in range(3)]
    gaps = [rows["product", str(seed)] - rows["ape", str(seed)] for seed in range(3)]
    own = found["iRPE, Table 5", "iRPE-K", "top-1"]
    half = T_TWO_DEGREES * statistics.stdev(values) / 3**0.5
    mean = statistics.mean(values)
    assert own["interval"] == pytest.approx([mean - half, mean + half], abs=1e-4)
    assert own["ours"] == pytest.approx(mean, abs=1e-4)
    assert own["difference"] == pytest.approx(mean - 80.9, abs=1e-4)
    assert own["seeds"] == [0, 1, 2]
    half = T_TWO_DEGREES * statistics.stdev(gaps) / 3**0.5
    (paired,) = [
        each
        for each in paired_tests(table.config(), table.results())
        if each["table"].startswith("iRPE, Table 5") and each["row"] == "iRPE-K"
    ]
    assert (paired["reference"], paired["seeds"]) == ("ape", 3)
    assert paired["interval"] == pytest.approx(
        [statistics.mean(gaps) - half, statistics.mean(gaps) + half], abs=1e-4
    )
    missing = found["iRPE, Table 5", "Trans-XL's", "top-1"]
    assert (missing["ours"], missing["paper"], missing["difference"]) == (None, 80.8, None)


def test_tables_are_listed_and_a_wrong_name_is_told_the_nearest(capsys):
    assert main(["reproduce"]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines() if line}
    assert "54 runs" in lines["fourier_widgets"]
    assert " 43 " in lines["fourier_widgets"]
    assert "not run" in lines["irpe_detr_coco"]
    assert "vlp evaluate all" in lines["ace_paper"]
    assert main(["reproduce", "fourier_widget"]) == 2
    assert "did you mean fourier_widgets?" in capsys.readouterr().err
    assert main(["reproduce", "ace_paper"]) == 2
    assert "its command is vlp evaluate all" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.distributed
def test_a_table_is_run_again_beside_its_stored_figures(
    tiny_ablation, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "stored"
    folder.mkdir()
    entry = {"ablation": tiny_ablation.name, "compared": "noise", "minutes": [1, 2]}
    (folder / "tables.yaml").write_text(yaml.safe_dump({"tables": {"tiny": entry}}))
    (folder / "tiny.csv").write_text("variant,seed,loss,top1\nnone,0,1.0,40.0\nnone,1,1.0,60.0\n")
    monkeypatch.setattr(module, "REGISTRY", folder / "tables.yaml")
    out = tmp_path / "again"
    assert main(["reproduce", "tiny", "--out", str(out), "--seeds", "0,1", "--only", "none"]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.split()[:2] == ["None", "top-1"]]
    _, _, stored, now, gap, paper, seeds = line.split()
    done = [json.loads((out / "none" / seed / "result.json").read_text()) for seed in "01"]
    mean = statistics.mean(result["figures"]["top1"] for result in done)
    assert (stored, paper, seeds) == ("50.00", "70", "2")
    assert float(now) == pytest.approx(mean, abs=0.006)
    assert float(gap) == pytest.approx(mean - 50, abs=0.006)
    assert "APE" not in said.partition("now − stored")[2]
    assert (out / "report.md").is_file()
