import json
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import CheckedFigure, run_check

CONFIG = Path(__file__).parents[2] / "configs/pretrain/base.yaml"


@pytest.mark.nightly
def test_every_part_runs_dry(tmp_path):
    assert run_check(CONFIG, tmp_path, dry=True) == 0
    lines = (tmp_path / "figures.jsonl").read_text().splitlines()
    figures = [json.loads(line) for line in lines]
    # A dry run has one number of pairs, and no others to time.
    assert {figure["part"] for figure in figures} == gpu.PARTS.keys() - {"C sizes"}
    measured = {figure["name"]: figure for figure in figures}
    ways = ("none", "blocks", "step")
    assert {f"pretraining, 4 pairs, {how}: launches" for how in ways} < measured.keys()
    assert measured["ZeRO-1, ranks: 2: weights after a resume"]["holds"]
    for how in ways:
        assert (tmp_path / f"trace_{how}_4.json.gz").stat().st_size > 1000
    assert (tmp_path / "check.md").read_text().count("\n| ") == 2 + len(figures)


def wrong(_):
    yield CheckedFigure("one and one", 3, "", at_most=2)


def failing(_):
    yield CheckedFigure("first", 1, "")
    raise KeyError("second")


@pytest.mark.nightly
@pytest.mark.parametrize("part", [wrong, failing])
def test_what_is_wrong_or_fails_ends_in_1(part, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PARTS", {"Z part": (part, 60)})
    assert run_check(CONFIG, tmp_path, dry=True, only="Z") == 1
    assert ("wrong: one and one: 3" in capsys.readouterr().err) == (part is wrong)
    (line,) = (tmp_path / "figures.jsonl").read_text().splitlines()
    assert json.loads(line)["holds"] == (part is failing)
    assert ("Z part: failed" in (tmp_path / "check.md").read_text()) == (part is failing)
    assert ("KeyError" in (tmp_path / "Z_part.log").read_text()) == (part is failing)
