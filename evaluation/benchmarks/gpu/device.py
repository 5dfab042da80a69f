"""Part A: versions, and the rates that this GPU reaches by itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch

from evaluation.benchmarks import harness
from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting

PACKAGES = ("torch", "triton", "deepspeed", "timm", "transformers", "vlp")
ROUNDS = 10


def product_rate(setting: Setting) -> float:
    """Measure the FLOP/s of one large bf16 product, the best of some rounds."""
    side = 256 if setting.dry else 8192
    a, b = (torch.randn(side, side, device=setting.device).bfloat16() for _ in range(2))
    return 2 * side**3 / _fastest(setting, partial(torch.matmul, a, b))


def bandwidth(setting: Setting) -> float:
    """Measure the bytes/s of memory that a copy reads and writes."""
    source = torch.randn(1 << (16 if setting.dry else 28), device=setting.device)
    return 2 * source.nbytes / _fastest(setting, partial(torch.empty_like(source).copy_, source))


def _fastest(setting: Setting, work: partial[torch.Tensor]) -> float:
    return min(harness.seconds(work, setting.device) for _ in range(ROUNDS))


def measure(setting: Setting) -> Iterator[CheckedFigure]:
    """Print versions; yield rates."""
    print(harness.device_name(setting.device), *versions(), sep="\n")
    yield CheckedFigure("bf16 product", product_rate(setting) / 1e12, "TFLOP/s")
    yield CheckedFigure("memory", bandwidth(setting) / 1e9, "GB/s")


def versions() -> list[str]:
    """List versions of Python, packages, CUDA, cuDNN and the driver; some may be missing."""
    found: dict[str, object] = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
    found["driver"] = _driver()
    return [f"{name} {number or 'missing'}" for name, number in found.items()]


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    question = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(question, capture_output=True, text=True, timeout=30, check=False)
    return told.stdout.partition("\n")[0].strip() if told.returncode == 0 else None
