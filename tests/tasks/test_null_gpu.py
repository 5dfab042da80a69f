"""Kernel launches, waits and memory of a step on a CUDA device that computes nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "pretrain": 2416,
    "retrieval": 1527,
    "grounding": 1527,
    "snli_ve": 927,
    "nlvr2": 1149,
    "vqa": 2101,
    "caption": 1012,
    "pretrain:base": 6078,
    "pretrain:unanchored": 5905,
}
"""Kernel launches of a step of 32 rows at most."""
BASE_GIB = 12.5
COMPILED = {"blocks": 5100, "step": 3500}
"""Kernel launches of the base model's compiled step, at most, by `training.compile`."""


@pytest.fixture(scope="module")
def steps(shared, tmp_path_factory):
    return counted(shared, tmp_path_factory.mktemp("null_gpu"), [*SIZES], 500)


def counted(shared, folder, cases, seconds):
    tool = shared / "tools" / "null_gpu" / "run.sh"
    if not tool.is_file() or torch.version.cuda is None or shutil.which("gcc") is None:
        pytest.skip("needs the null device, PyTorch for CUDA, and gcc")
    # PyTorch's wheels bring CUDA's headers without this one of its C++ library, whose macros choose
    # code for host and device.
    (folder / "nv").mkdir()
    macros = ("NV_IF_TARGET", "NV_IF_ELSE_TARGET", "NV_DISPATCH_TARGET")
    (folder / "nv" / "target").write_text("".join(f"#define {name}(...)\n" for name in macros))
    hidden = ("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {
        "PYTHON": sys.executable,
        "NULLGPU_BUILD": str(folder / "build"),
        "CPATH": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT)]),
    }
    run_tool(tool, ["-c", ""], environment | {"PATH": compiler(folder)}, 100)  # builds the device
    script = str(ROOT / "tests" / "tasks" / "null_gpu_steps.py")
    printed = run_tool(tool, [script, *cases], environment, seconds)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {one["case"]: one for one in found}


def compiler(folder):
    """Return a PATH whose gcc takes CUDA's headers of PyTorch before all others.

    Triton brings older ones beside PyTorch 2.11, and the device is written for PyTorch's.
    """
    site = Path(torch.__file__).parents[1]
    headers = next(site.glob("nvidia/**/cuda_runtime_api.h")).parent
    (folder / "bin").mkdir()
    gcc = folder / "bin" / "gcc"
    gcc.write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} -I "{headers}" "$@"\n')
    gcc.chmod(0o755)
    return os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])


def run_tool(tool, arguments, environment, seconds):
    done = subprocess.run(
        ["bash", str(tool), *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("case", SIZES)
def test_a_step_launches_no_more_kernels_and_only_a_logged_one_waits_once(steps, case):
    step = steps[case]
    assert step["synchronisations"] == {}
    assert sum(step["logged"].values()) == 1
    (line,) = step["logged"]
    assert "copy_to_cpu" in line
    assert 0 < step["launches"] <= SIZES[case]
    assert step["copies"].keys() == {"beside"}  # a batch is copied beside the kernels


@pytest.mark.nightly
def test_waits_are_those_of_which_pytorch_warns(steps):
    """So `python -m benchmarks gpu` counts them."""
    assert steps["warned"]["ordinary"] == []
    assert len(steps["warned"]["logged"]) == 1


@pytest.mark.nightly
def test_the_base_model_has_few_launches_for_ace_rpe_and_stays_within_its_memory(steps):
    without = steps["pretrain:unanchored"]["launches"]
    assert without < steps["pretrain:base"]["launches"] <= 1.03 * without
    assert 8 < steps["pretrain:base"]["gib"] <= BASE_GIB
    assert steps["contract"]["equal"]  # gradients of the input that is computed again


@pytest.mark.nightly
def test_a_batch_is_read_after_its_copy_and_its_memory_kept_until_then(steps):
    found = steps["copies"]
    assert found["finds_races"]
    assert found["used"] > 5
    assert found["freed"] == ["active_pending_free"] * found["used"]


@pytest.mark.nightly  # minutes of compiling
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_step_launches_few_kernels_and_waits_for_nothing(how, shared, tmp_path):
    step = counted(shared, tmp_path, [f"pretrain:base:{how}"], 5500)[f"pretrain:base:{how}"]
    print(f"torch {torch.__version__}, {how}: {step['launches']} launches, {step['gib']:.1f} GiB")
    assert step["synchronisations"] == {}
    assert step["launches"] <= COMPILED[how]
    assert step["gib"] <= 13
