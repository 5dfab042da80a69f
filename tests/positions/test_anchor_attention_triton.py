"""The kernels of ACE-RPE's attention, compiled for GPUs that are not there, and their registers."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton")
from compiled_kernels import TOKENS, anchor_kernel, compile_kernel

from vlp.positions import anchor_kernels as anchor_shift_triton

ARCHITECTURES = [80, 90, 100]
CASES = list(
    product(
        ("forward", "backward", "path"), TOKENS, ("contextual", "bias"), (32, 64, 128),
        ARCHITECTURES,
    )
)  # fmt: skip
pytestmark = pytest.mark.nightly
SPILLED = {"contextual": 104, "bias": 16}
"""Bytes of a thread at most, which stay in the first cache.

Forward the compiler is told to end the registers at 168, so that one more program runs at a time;
backward a thread takes all 255 to hold the paths of all groups.
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("kernel", "asking", "mode", "width", "arch"), CASES)
def test_compiles_for_gpus_that_are_not_there(kernel, asking, mode, width, arch):
    found = anchor_kernel(kernel, asking, mode, width, arch)
    case = f"{kernel} {asking} {mode} {width} {arch}, {TOKENS[asking]}"
    print(f"{case}: {found.registers} registers, {found.spilled} bytes spilled")
    assert found.spilled <= SPILLED[mode]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["shift", "shift_backward"])
def test_kernels_of_the_shifts_spill_nothing(kernel, arch):
    function = getattr(anchor_shift_triton, f"{kernel}_kernel")
    tensors = [name for name in function.arg_names if name != "width"]
    sizes = {"GROUPS": 8, "MANY": 16, "BLOCK": 32, "POOLED": True}
    types = dict.fromkeys(tensors, "*fp32")
    assert compile_kernel(function, sizes, types, arch, ("width",)).spilled == 0
