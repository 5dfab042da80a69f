"""`vlp check gpu` on a machine without a GPU, and the prediction of a step's time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from evaluation.benchmarks.gpu import check, roofline
from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting
from evaluation.benchmarks.pretrain_step import Trainee, random_batch
from vlp.config import load_config
from vlp.training.config import PretrainConfig

CONFIG = Path(__file__).parents[3] / "configs/pretrain/base.yaml"


@pytest.fixture
def tiny() -> PretrainConfig:
    public = ("model.text.weights=null", "model.image.weights=null")
    return load_config(CONFIG, PretrainConfig, (*public, *check._TINY))


@pytest.mark.integration
def test_every_part_runs_dry(tmp_path: Path) -> None:
    assert check.run_check(CONFIG, tmp_path, dry=True) == 0
    lines = (tmp_path / "figures.jsonl").read_text().splitlines()
    figures = [json.loads(line) for line in lines]
    parts = {figure["part"] for figure in figures}
    assert parts == check.PARTS.keys() | check.SEVERAL.keys()
    assert all(figure["holds"] for figure in figures if figure["correctness"])
    assert sum(figure["correctness"] for figure in figures) > 15
    assert (tmp_path / "trace.json.gz").stat().st_size > 1000
    page = (tmp_path / "check.md").read_text()
    assert "dry run" in page
    assert page.count("\n| ") == 1 + len(figures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.run_check(CONFIG, tmp_path / "out") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_is_named(tmp_path: Path, tiny: PretrainConfig) -> None:
    setting = Setting(tiny, (4,), torch.device("cpu"), True, tmp_path)
    figures, failure = check._in_process("Z", check.PARTS["A device"], setting)
    assert figures == []
    assert failure is not None
    assert "KeyError: 'Z'" in (tmp_path / "Z.log").read_text()


def test_a_figure_holds_its_promise_or_not() -> None:
    assert CheckedFigure("", 2, "", at_least=2).holds
    assert not CheckedFigure("", 2, "", at_least=3).holds
    assert not CheckedFigure("", 2, "", at_most=1).holds
    assert not CheckedFigure("", float("nan"), "", at_most=1).holds
    assert CheckedFigure("loss", 2, "x", at_most=1).cells() == ["loss", "at most 1", "2 x", "NO"]


def test_the_prediction_counts_the_products_of_a_step(tiny: PretrainConfig) -> None:
    config = tiny.model_copy(
        update={"objectives": tiny.objectives.model_copy(update={"mlm": None})}
    )
    work = roofline.count_step(config, 4, words=3)
    trainee = Trainee(config, torch.device("cpu"))
    trainee.task.is_compiled = True  # its texts keep their padding, as they do on a GPU
    with FlopCounterMode(display=False) as counter:
        trainee.task(random_batch(config.inputs, 4, 3), 1).loss.backward()
    (flops,) = {each.flops for each in work.values()}
    # The explicit form has products of paths and tables that the kernel's count leaves out.
    assert 0.97 * counter.get_total_flops() < flops <= counter.get_total_flops()
    moved = [work[each.name].other_bytes for each in roofline.ASSUMPTIONS]
    assert moved == sorted(moved)
    assert 0 < moved[0] < moved[1] < moved[2]


def test_work_grows_with_the_pairs(tiny: PretrainConfig) -> None:
    few, more = (roofline.count_step(tiny, rows, words=3)["fused"] for rows in (8, 16))
    assert 1.7 * few.flops < more.flops < 2.3 * few.flops


def test_a_time_is_bound_by_products_bytes_or_launches() -> None:
    gpu, (fused, _, written) = roofline.GPU(1e12, 1e9), roofline.ASSUMPTIONS
    assert roofline.Work(75e10, 0, 0, 1).seconds(gpu, fused) == pytest.approx(1)
    assert roofline.Work(1, 0, 85e7, 1).seconds(gpu, fused) == pytest.approx(1)
    assert roofline.Work(1, 0, 1, 1e6).seconds(gpu, written) == pytest.approx(1e6 * roofline.LAUNCH)
