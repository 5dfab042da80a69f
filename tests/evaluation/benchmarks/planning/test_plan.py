"""`vlp plan`: its answers, exit codes and figures, on a tiny configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests_support import TINY_MODEL

from evaluation.benchmarks.gpu.roofline import GPU, GPUS
from evaluation.benchmarks.planning.fake_step import meta_task
from evaluation.benchmarks.planning.plan import ENGINES, with_training
from evaluation.benchmarks.planning.states import states
from launch.__main__ import main
from vlp.config import load_config
from vlp.training.config import PretrainConfig

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    values = {
        "model": TINY_MODEL,
        "data": {"sources": ["none"], "canonical_streams": 24},
        "objectives": {
            "contrastive": {"token": {"group": 4}},
            "itm": {"group": 4},
            "teacher": {"queue": 8},
        },
        "training": {"batch": 96, "steps": 1000},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_plan_has_a_table_and_all_figures_as_json(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", "--config", str(config), "--gpus", "24", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "predictions, not measurements" in said
    assert "of 80 GB: fits" in said
    assert "1 2 3 4 6 8 12 24\n" in said
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["world_sizes"] == [1, 2, 3, 4, 6, 8, 12, 24]
    assert found["fits"]
    low, high = found["total_bytes"]
    assert low < high
    assert [low, high] == [sum(ends) for ends in zip(*found["memory_bytes"].values())]
    near, far = found["step_seconds"]
    assert near < far
    assert found["pairs_per_second"] == pytest.approx([96 / near, 96 / far])
    assert found["engines"].keys() == ENGINES.keys()
    assert {"contrastive keys", "gradients", "updated parameters"} <= {
        one["name"] for one in found["collectives"]
    }


@pytest.mark.parametrize(
    ("gpus", "more", "said"),
    [
        (10, [], "nearest numbers of GPUs that can: 8 12"),
        (48, [], "nearest numbers of GPUs that can: 24"),
        (5, ["objectives.itm.group=5"], "none can"),
        (8, ["--gpu", "H1000"], "--gpu H1000: unknown GPU; did you mean H100?"),
        (8, ["training.batch=95"], "is not a multiple of data.canonical_streams"),
    ],
)
def test_what_cannot_start_is_answered_at_once(
    config: Path, gpus: int, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config", str(config), "--gpus", str(gpus), *more]) == 2
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


@pytest.mark.integration
def test_what_does_not_fit_is_told_what_to_change(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = GPU(1e12, 1e11, memory=3e9 + 5e6)  # 3 GB are CUDA's
    monkeypatch.setitem(GPUS, "A100", small)
    base = ["plan", "--config", str(config), "--gpus", "1", "--gpu", "A100"]
    assert main(base) == 2
    said = capsys.readouterr().out
    found = [line.split(":")[0] for line in said.splitlines() if line.endswith("ms a step")]
    assert "of 3 GB: does not fit" in said or "of 3 GB: may not fit" in said
    fitting = [line for line in found if line.endswith(" fits")]
    assert len(fitting) == 1
    changes = fitting[0].removesuffix(" fits").split()
    assert main([*base, *changes]) == 0


@pytest.mark.integration
def test_32768_pairs_fit_64_gpus_of_80_gb_with_recomputed_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ["plan", "--config", str(ROOT / "configs/pretrain/base.yaml"), "--gpus", "64"]
    batch = "training.batch=32768"
    assert main([*base, batch]) == 2
    said = capsys.readouterr().out
    assert "training.activation_checkpointing=blocks fits" in said
    assert re.search(r"10⁹ pairs, h +[\d.,]+ +[\d.,]+\n", said)
    assert main([*base, batch, "training.activation_checkpointing=blocks"]) == 0


def test_engines_that_cut_states_up_need_less(config: Path) -> None:
    loaded = load_config(config, PretrainConfig, [])
    task = meta_task(loaded)
    size = 4 * sum(p.numel() for p in task.parameters())

    def needed(ranks: int, **training: Any) -> dict[str, float]:
        parts = states(task, with_training(loaded, **training).training, ranks)
        return {part.name: part.high for part in parts}

    whole = needed(8, engine="ddp")
    assert whole["parameters"] == whole["gradients"] == size
    assert whole["optimiser"] == 2 * size
    assert "buckets of gradients" not in needed(1, engine="ddp")
    zero1, zero3 = (
        needed(8, engine="deepspeed", deepspeed="zero1"),
        needed(8, engine="deepspeed", deepspeed="zero3"),
    )
    for cut in (zero1, zero3):
        assert cut["optimiser"] == size / 4
    assert zero1["parameters"] == size * 9 / 8
    assert zero1["teacher"] < 1.5 * size
