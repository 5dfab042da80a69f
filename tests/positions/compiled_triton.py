"""Triton kernels compiled for GPUs that are not there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import triton


def usage(
    function: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    arch: int,
    folder: Path,
    even: Collection[str] = (),
) -> tuple[int, int]:
    """Return registers of a thread and bytes that it spills, as NVIDIA's tools say.

    Args:
        function: the kernel.
        constants: by name, also ones that it has not, and `num_warps`.
        types: of arguments, such as `*bf16`; others are `i32`.
        arch: compute capability times 10.
        folder: for what is compiled.
        even: integers that are multiples of 16, as pointers are.
    """
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "nvidia" not in backends:
        pytest.skip("this Triton has no compiler for NVIDIA")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in function.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (name in even and kind == "i32")
    }
    used = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(function, signature, used, aligned)
    options = {"num_warps": constants.get("num_warps", 4)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    told = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True)
    registers, spilled = (re.search(rf"{what}:(\d+)", told.stdout) for what in ("REG", "STACK"))
    assert registers
    assert spilled
    return int(registers[1]), int(spilled[1])
