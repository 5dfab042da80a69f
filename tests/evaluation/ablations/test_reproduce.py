"""`vlp reproduce`: results by name, and one that is run again beside its stored figures."""

from __future__ import annotations

import statistics

import pytest
import yaml

from evaluation.ablations.config import AblationConfig
from evaluation.ablations.grid import results
from evaluation.commands import ablations as module
from launch.__main__ import main
from vlp.config import load_config


def test_results_are_listed_and_a_wrong_name_is_told_the_nearest(capsys):
    assert main(["reproduce"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert "0.8 minutes a run" in lines["fourier_widgets"]
    assert "Not run: needs GPUs" in lines["irpe_detr_coco"]
    assert main(["reproduce", "fourier_widget"]) == 2
    assert "did you mean fourier_widgets?" in capsys.readouterr().err


def test_stored_tables_are_printed_with_the_plan(capsys):
    assert main(["reproduce", "irpe_tables", "--plan", "--only", "product"]) == 0
    said = capsys.readouterr().out
    assert "iRPE-K" in said
    assert said.splitlines()[-2:] == [
        "product/0 product/1 product/2", "3 runs, 2 side by side; above those to do"
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_result_is_run_again_beside_its_stored_figures(
    tiny_ablation, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "stored"
    folder.mkdir()
    entry = {"ablation": tiny_ablation.name, "about": "noise"}
    (folder / "tables.yaml").write_text(yaml.safe_dump({"tables": {"tiny": entry}}))
    (folder / "tiny.csv").write_text("variant,seed,loss,top1\nnone,0,1.0,40.0\nnone,1,1.0,60.0\n")
    monkeypatch.setattr(module, "RESULTS", folder / "tables.yaml")
    out = tmp_path / "again"
    assert main(["reproduce", "tiny", "--out", str(out), "--seeds", "0,1", "--only", "none"]) == 0
    said = capsys.readouterr().out
    stored, now = (line.split() for line in said.splitlines() if line.startswith("None"))
    config = load_config(tiny_ablation, AblationConfig, [f"output={out}"])
    mean = statistics.mean(figures["top1"] for figures in results(config, tiny_ablation).values())
    assert (stored[1], now[1]) == ("50.0", f"{mean:.1f}")
    assert stored[-1] == now[-1] == "70"
    assert (out / "report.md").is_file()
