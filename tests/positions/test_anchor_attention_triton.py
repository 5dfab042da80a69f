"""The kernels of ACE-RPE's attention, compiled for GPUs that are not there, and their registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from vlp.positions import anchor_attention

triton = pytest.importorskip("triton")
from vlp.positions import anchor_attention_triton, anchor_shift_triton  # noqa: E402

SIZES = {
    "GROUPS": 8,
    "MANY": 16,
    "CHANNELS": 64,
    "WIDE": 64,
    "PRECISION": "ieee",
    "BLOCK": 32,
    "POOLED": True,
}
"""Of the base model: width 768, 12 heads; 257 image and 30 text tokens."""


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    ("kernel", "text_queries"), [("forward", True), ("backward", True), ("backward", False)]
)
def test_compiles_for_gpus_that_are_not_there_without_spills(
    kernel, text_queries, arch, tmp_path, monkeypatch
):
    queries, keys = (30, 257) if text_queries else (257, 30)
    options = anchor_attention.block_sizes(queries, keys, 64, torch.bfloat16, kernel == "forward")
    single = {"ONE_BLOCK": options["KEYS"] >= keys, "MASKED": not text_queries}
    constants = SIZES | options | single | {"CONTEXTUAL": True}
    function = getattr(anchor_attention_triton, f"{kernel}_kernel")
    registers, spilled = usage(function, constants, arch, tmp_path, monkeypatch)
    print(
        f"{kernel}, {queries} x {keys}, sm_{arch}: {registers} registers, {spilled} bytes spilled"
    )
    assert spilled == 0


@pytest.mark.parametrize("kernel", ["shift", "shift_backward", "path"])
def test_the_other_kernels_compile(kernel, tmp_path, monkeypatch):
    constants = SIZES | {"QUERIES": 32, "KEYS": 32, "CONTEXTUAL": False, "MASKED": True}
    module = anchor_attention_triton if kernel == "path" else anchor_shift_triton
    function = getattr(module, f"{kernel}_kernel")
    assert usage(function, constants, 90, tmp_path, monkeypatch)[1] == 0


def usage(function, constants, arch, folder, monkeypatch):
    """Registers of a thread and bytes it spills, as NVIDIA's tools say."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "nvidia" not in backends:
        pytest.skip("this Triton has no compiler for NVIDIA")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    integers = {"width", "queries", "keys", "heads", "path_query", "path_key", "path_group"}
    float32 = {"rows", "shares", "query_sum", "terms"}
    signature, aligned = {}, {}
    options = {"num_warps": constants.get("num_warps", 4)}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "scale":
            signature[name] = "fp32"
        elif name in integers or name.endswith("_pair"):
            signature[name] = "i32"
        else:
            kind = "fp32" if name in float32 or "POOLED" in function.arg_names else "bf16"
            signature[name] = "*u8" if name == "mask" else f"*{kind}"
        if name in signature and signature[name] not in ("constexpr", "fp32"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    for name in ("queries", "keys", "heads", "path_key"):
        if name in signature:
            aligned.pop((function.arg_names.index(name),))
    used = {name: value for name, value in constants.items() if name in function.arg_names}
    source = ASTSource(function, signature, used, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    told = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True)
    return tuple(int(re.search(rf"{what}:(\d+)", told.stdout)[1]) for what in ("REG", "STACK"))
