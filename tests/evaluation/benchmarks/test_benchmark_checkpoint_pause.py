"""The benchmark of a checkpoint's pause: what it times is written, and its figures are computed."""

from __future__ import annotations

import json

import pytest

from evaluation.benchmarks.checkpoint_pause import computed, main, measure


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_save_in_the_background_returns_before_it_is_written(form, tmp_path):
    size, found = measure(0.05, form, 2, tmp_path)
    assert size == pytest.approx(5e7, rel=0.3)
    assert len(found.waited) == len(found.background) == len(found.written) == 2
    assert min(found.waited) > min(found.background) > 0
    assert 0 < found.gap <= max(found.written) + 1
    (left,) = tmp_path.iterdir()
    assert left.name == "step_6"
    assert sum(path.stat().st_size for path in left.iterdir()) == pytest.approx(size, rel=0.01)


def test_seven_billion_parameters_are_divided_among_ranks():
    found = computed(2e9)
    assert found[64] == (7e9 * 12 / 64, 7e9 * 12 / 64 / 2e9)
    assert found[8][1] == 8 * found[64][1]


def test_figures_are_printed(capsys, tmp_path):
    arguments = ["--gigabytes", "0.02", "--rounds", "1", "--folder", str(tmp_path), "--device"]
    assert main([*arguments, "cpu"]) == 0
    out = capsys.readouterr().out
    figures = {
        each["name"]: each for each in map(json.loads, out[out.index("\n{") :].strip().split("\n"))
    }
    rate = figures["checkpoint_pause/rate"]["value"] * 1e9
    last = figures["checkpoint_pause/7b_on_64_ranks"]
    assert last["value"] == pytest.approx(7e9 * 12 / 64 / rate)
    assert last["target"] == 1.0
    assert not list(tmp_path.iterdir())
