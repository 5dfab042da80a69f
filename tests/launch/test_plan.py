import json
from pathlib import Path

import pytest
import yaml
from tests_support import TINY_MODEL

from launch.cli.main import main
from launch.cli.plan import meta_task, stage_memory
from vlp.config import load_config
from vlp.training.config import PretrainConfig

ROOT = Path(__file__).resolve().parents[2]
BASE = str(ROOT / "configs/pretrain/base.yaml")


@pytest.fixture
def config(tmp_path):
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


def planned(tmp_path, *arguments):
    file = tmp_path / "plan.json"
    assert main(["plan", *map(str, arguments), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_figures_of_a_run(config, tmp_path, capsys):
    result = planned(tmp_path, "--config", config, "--gpus", 24, "--pairs-per-second", 480)
    assert "1 2 3 4 6 8 12 24\n" in capsys.readouterr().out
    assert result["world_sizes"] == [1, 2, 3, 4, 6, 8, 12, 24]
    assert result["pairs_of_a_gpu"] == 4
    assert result["steps"] == 1000
    assert result["seconds"] == 1000 * 96 / 480
    assert result["memory_bytes"].keys() == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("gpus", "more", "said"),
    [
        (10, [], "8 or 12 can"),
        (48, [], "24 can"),
        (5, ["objectives.itm.group=5"], "no number can"),
        (8, ["training.batch=95"], "is not a multiple of data.canonical_streams"),
    ],
)
def test_what_cannot_start_is_refused(config, gpus, more, said, capsys):
    assert main(["plan", "--config", str(config), "--gpus", str(gpus), *more]) == 2
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_a_plan_has_the_measured_speed_of_the_base_model(tmp_path):
    """394 pairs/s on one H200 (docs/results/gpu.md); nothing is said of what was not measured."""
    one = ("--config", BASE, "--gpus", 1, "--pairs", 511_900, "training.epochs=1")
    result = planned(tmp_path, *one, "training.batch=128")
    assert result["parameters"]["trained"] == 164_962_110
    assert (result["steps"], result["pairs_per_second"]) == (4000, 394)
    assert result["seconds"] == pytest.approx(512_000 / 394)
    assert planned(tmp_path, *one, "training.compile=blocks")["pairs_per_second"] == 241
    assert planned(tmp_path, *one, "model.cross.layers=2")["pairs_per_second"] is None
    several = ("--config", BASE, "--gpus", 8)
    assert planned(tmp_path, *several)["seconds"] is None


def test_stages_cut_up_what_zero_says(config):
    loaded = load_config(config, PretrainConfig, [])
    task = meta_task(loaded)
    size = 4 * sum(p.numel() for p in task.parameters())
    teacher = {stage_memory(task, stage, 8, "bf16").teacher for stage in range(4)}
    assert len(teacher) == 1
    result = [stage_memory(task, stage, 8, "float32")[:3] for stage in range(4)]
    assert result == [
        (size, size, 2 * size),
        (size * 9 / 8, size, size / 4),
        (size * 9 / 8, size / 8, size / 4),
        (size / 4, size / 8, size / 4),
    ]
    assert teacher.pop() > stage_memory(task, 0, 8, "float32").teacher > 0
