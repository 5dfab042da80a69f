"""Kernels compiled by Triton for GPUs that are not there, and the registers that they take."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from vlp.positions.anchor_attention import block_sizes

TOKENS = {"text": (30, 257), "image": (257, 30)}
"""Queries and keys of the base model, by the side that asks."""
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Compiled(NamedTuple):
    registers: int
    spilled: int


def compile_kernel(function, constants, types, arch, even=()):
    """Compile a Triton kernel for a GPU of compute capability `arch` / 10.

    types: of arguments, such as `*bf16`, else `i32`; even: integers that are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
    options = {name: constants[name] for name in OPTIONS if name in constants}
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(found.asm["cubin"])
        told = subprocess.run(
            [tools / "cuobjdump", "-res-usage", binary], capture_output=True, text=True, check=True
        ).stdout
    return Compiled(*(int(re.findall(rf"{what}:(\d+)", told)[0]) for what in ("REG", "STACK")))


def anchor_kernel(kernel, asking, mode="contextual", width=64, arch=90):
    """Compile a kernel of attention, or `path_grad`, in bf16, with eight groups, for `TOKENS`."""
    from vlp.positions import anchor_kernels as anchor_attention_triton

    queries, keys = TOKENS[asking]
    options: dict[str, Any] = dict(
        block_sizes(queries, keys, 8, width, kernel == "attention_forward")
    )
    single = options["BLOCK_K"] >= keys
    options |= {"SINGLE_BLOCK": single, "HAS_RESIDUAL": not single, "MASKED": asking == "image"}
    options |= {"GROUPS": 8, "BLOCK_G": 8, "DOT_G": 16, "HEAD_DIM": width, "BLOCK_C": width}
    options |= {"CONTEXTUAL": mode == "contextual", "PRECISION": "ieee", "stride_pk": 1}
    half = ["query", "key", "value", "path", "query_mean", "key_mean", "out", "residual"]
    half += ["out_grad", "query_grad", "key_grad", "value_grad", "path_grad"]
    full = ["row_statistics", "pair_terms_grad", "query_sum", "terms"]
    types = dict.fromkeys(half, "*bf16") | dict.fromkeys(full, "*fp32")
    types |= {"mask": "*u8", "scale": "fp32"}
    even = ("stride_qb", "stride_kb", "stride_vb", "stride_pb", "stride_pq", "stride_pg")
    function = getattr(anchor_attention_triton, f"{kernel}_kernel")
    return compile_kernel(function, options, types, arch, (*even, "readable_keys"))
