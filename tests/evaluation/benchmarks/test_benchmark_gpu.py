"""`vlp check gpu` on a machine without a GPU, and the prediction of a step's time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from evaluation.benchmarks.gpu import check, kernels, roofline, waits
from evaluation.benchmarks.gpu.equal_work import ALL, EQUAL
from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting
from evaluation.benchmarks.pretrain_step import Trainee, random_batch
from vlp.config import load_config
from vlp.layers.attention import Attention
from vlp.positions import anchor_attention, anchor_encoding
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
    # A dry run has one number of pairs, and no others to time.
    assert parts == (check.PARTS.keys() | check.SEVERAL.keys()) - {"C sizes"}
    measured = {figure["name"] for figure in figures}
    assert {
        f"waits for the device in one {kind} step" for kind in ("ordinary", "logged")
    } < measured
    ways = ("none", "blocks", "step")
    assert {f"pretraining, 4 pairs, {how}: launches" for how in ways} < measured
    assert {f"ALBEF's sizes, 4 pairs, {name}" for name in (EQUAL, ALL)} < measured
    assert sum("scores differ" in name for name in measured) == 3  # layouts
    assert all(figure["holds"] for figure in figures if figure["correctness"])
    assert sum(figure["correctness"] for figure in figures) > 30
    for how in ways:
        assert (tmp_path / f"trace_{how}_4.json.gz").stat().st_size > 1000
    page = (tmp_path / "check.md").read_text()
    assert "dry run" in page
    assert f"torch {version('torch')}" in page
    assert page.count("\n| ") == 1 + len(figures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.run_check(CONFIG, tmp_path / "out") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def wrong(_: Setting) -> Iterator[CheckedFigure]:
    """A result that is wrong."""
    yield CheckedFigure("one and one", 3, "", at_most=2, correctness=True)


def slow(_: Setting) -> Iterator[CheckedFigure]:
    """A figure of speed below its promise."""
    yield CheckedFigure("speed", 1, "pairs/s", at_least=2)


def failing(_: Setting) -> Iterator[CheckedFigure]:
    """A part that fails after its first figure."""
    yield CheckedFigure("first", 1, "")
    raise KeyError("second")


@pytest.mark.integration
@pytest.mark.parametrize(("part", "status"), [(wrong, 1), (slow, 0), (failing, 1)])
def test_exit_status(
    part: Callable[[Setting], Iterator[CheckedFigure]],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "PARTS", {"Z part": check.Part(part, 60)})
    assert check.run_check(CONFIG, tmp_path, dry=True, only="Z") == status
    assert ("wrong: one and one: 3" in capsys.readouterr().err) == (part is wrong)
    (line,) = (tmp_path / "figures.jsonl").read_text().splitlines()
    assert json.loads(line)["holds"] == (part is failing)
    page = (tmp_path / "check.md").read_text()
    assert ("Z part: failed" in page) == (part is failing)
    assert ("KeyError" in (tmp_path / "Z_part.log").read_text()) == (part is failing)


@pytest.mark.integration
def test_kernels_are_compared_with_the_explicit_path(
    tmp_path: Path, tiny: PretrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of attention run in Triton's interpreter; an error in one is seen."""
    pytest.importorskip("triton")
    from interpreted_triton import interpreted

    monkeypatch.setattr(Attention, "_anchored", lambda self, states: self.fused is not False)
    setting = Setting(tiny, (4,), torch.device("cpu"), True, tmp_path)
    with interpreted():
        assert all(figure.holds for figure in kernels.kernels(setting))
        right = anchor_attention.anchored_attention
        monkeypatch.setattr(
            anchor_encoding, "anchored_attention", lambda *a, **o: 1.1 * right(*a, **o)
        )
        found = kernels.kernels(setting)
        assert not next(each for each in found if "from the explicit path" in each.name).holds
        assert not next(each for each in found if "error, in the explicit" in each.name).holds


@pytest.mark.parametrize(
    ("name", "failure", "harmless"),
    [
        ("C step", f"{check.LATE} 90 s", True),
        ("C step", "failed, see C_step.log", False),
        ("B kernels", f"{check.LATE} 240 s", False),
        (f"{check.COMPILING} step", "failed, see C_compiling_step.log", True),
    ],
)
def test_which_failures_say_nothing_of_correctness(name: str, failure: str, harmless: bool) -> None:
    assert name in check.PARTS
    assert check._harmless(name, failure) == harmless


@pytest.mark.parametrize("dry", [True, False])
def test_parts_that_measure_no_speed_run_beside_each_other(dry: bool) -> None:
    turns = list(check._turns(check.PARTS, dry))
    assert [name for names in turns for name in names] == list(check.PARTS)
    together = [names for names in turns if len(names) > 1]
    assert together == ([] if dry else [[n for n, part in check.PARTS.items() if part.beside]])


def test_waits_are_counted() -> None:
    numbers = torch.arange(3.0)
    with waits.counted_waits(torch.device("cpu")) as found:
        numbers.sum().item()
        numbers.square().sum()
        bool(numbers[0] > 1)
    assert len(found) == 2


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


@pytest.mark.integration
def test_work_grows_with_the_pairs(tiny: PretrainConfig) -> None:
    few, more = (roofline.count_step(tiny, rows, words=3)["fused"] for rows in (8, 16))
    assert 1.7 * few.flops < more.flops < 2.3 * few.flops


def predicted(rows: int, *changes: str) -> dict[str, roofline.Work]:
    """Work of a step of the base model, compiled as a whole."""
    public = ("model.text.weights=null", "model.image.weights=null", "training.compile=step")
    return roofline.predictions(load_config(CONFIG, PretrainConfig, (*public, *changes)), rows)


@pytest.mark.integration
def test_the_base_model_compiled_is_predicted_to_reach_its_share_of_the_peak() -> None:
    """The goal of docs/results/gpu.md, for an H100 and 64 pairs, at the far end as at the near."""
    works, gpu = predicted(64), roofline.GPUS["H100"]
    near, far = (
        works[end.name].flops / works[end.name].seconds(gpu, end) / gpu.flops
        for end in (roofline.FUSED, roofline.COMPILED)
    )
    assert 0.35 <= far < near < 0.75


@pytest.mark.integration
def test_ace_rpe_adds_few_bytes_to_a_step() -> None:
    """Inputs and results of operators, without what a kernel writes for itself."""
    moved = []
    for changes in ((), ("model.cross.position=[]",)):
        work = predicted(32, *changes)[roofline.WRITTEN.name]
        moved.append(work.product_bytes + work.other_bytes)
    assert moved[1] < moved[0] <= 1.02 * moved[1]


def test_a_time_is_bound_by_products_bytes_or_launches() -> None:
    gpu, (fused, _, written) = roofline.GPU(1e12, 1e9), roofline.ASSUMPTIONS
    assert roofline.Work(75e10, 0, 0, 1).seconds(gpu, fused) == pytest.approx(1)
    assert roofline.Work(1, 0, 85e7, 1).seconds(gpu, fused) == pytest.approx(1)
    assert roofline.Work(1, 0, 1, 1e6).seconds(gpu, written) == pytest.approx(1e6 * roofline.LAUNCH)
