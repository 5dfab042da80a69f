"""ACE-RPE's attention kernels compiled for GPUs that are not there, and what they would take.

    python -m evaluation.benchmarks.gpu.compiled

Triton compiles for any GPU of NVIDIA, and its tools tell registers, shared memory and machine
instructions. A warp runs an instruction every `CYCLES` cycles, as long as it waits for the one
before, and programs on a multiprocessor do not slow each other. So four kernels that took 163, 137,
333 and 264 µs of an H200 (64 pairs, 12 heads of 64 channels, 257 and 30 tokens) are predicted to
take 164, 167, 363 and 288, by the one number that was fitted to them. Prints a table.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlp.positions.anchor_attention import block_sizes

CYCLES = 7.3
"""Between two instructions of a warp."""
CLOCK, MULTIPROCESSORS = 1.75e9, 132
REGISTERS, SHARED, WARPS = 65536, 233472, 64
"""Of a multiprocessor."""
TOKENS = {"text": (30, 257), "image": (257, 30)}
"""Queries and keys of the base model, by the side that asks."""
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Compiled(NamedTuple):
    """Registers and spilled bytes of a thread, bytes of a program, and machine instructions."""

    registers: int
    spilled: int
    shared: int
    listing: str


def compile_kernel(
    function: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    arch: int,
    even: Collection[str] = (),
) -> Compiled:
    """Compile a Triton kernel for a GPU.

    Args:
        function: the kernel.
        constants: by name, also ones that it has not, and options of the compiler.
        types: of arguments, such as `*bf16`; others are `i32`.
        arch: compute capability times 10.
        even: integers that are multiples of 16, as pointers are.
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
        told, listing = (
            subprocess.run(
                [tools / tool, option, binary], capture_output=True, text=True, check=True
            ).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    registers, spilled = (int(re.findall(rf"{what}:(\d+)", told)[0]) for what in ("REG", "STACK"))
    return Compiled(registers, spilled, found.metadata.shared, listing)


def anchor_kernel(
    kernel: str, asking: str, mode: str = "contextual", width: int = 64, arch: int = 90
) -> Compiled:
    """Compile a kernel of ACE-RPE's attention in bf16, with eight groups, for `TOKENS`.

    Args:
        kernel: `forward`, `backward` or `path`.
        asking: the side that asks, `text` or `image`.
        mode: `contextual` or `bias`.
        width: channels of a head.
        arch: compute capability times 10.
    """
    from vlp.positions import anchor_kernels as anchor_attention_triton

    queries, keys = TOKENS[asking]
    options: dict[str, Any] = dict(block_sizes(queries, keys, 8, width, kernel == "forward"))
    one = options["KEYS"] >= keys
    options |= {"ONE_BLOCK": one, "HAS_REST": not one, "MASKED": asking == "image"}
    options |= {"GROUPS": 8, "EACH": 8, "MANY": 16, "CHANNELS": width, "WIDE": width}
    options |= {"CONTEXTUAL": mode == "contextual", "PRECISION": "ieee", "path_key": 1}
    half = ["query", "key", "value", "path", "query_mean", "key_mean", "out", "rest", "above"]
    half += ["query_gradient", "key_gradient", "value_gradient", "path_gradient"]
    full = ["rows", "shares", "query_sum", "terms"]
    types = dict.fromkeys(half, "*bf16") | dict.fromkeys(full, "*fp32")
    types |= {"mask": "*u8", "scale": "fp32"}
    even = ("query_pair", "key_pair", "value_pair", "path_pair", "path_query", "path_group", "room")
    function = getattr(anchor_attention_triton, f"{kernel}_kernel")
    return compile_kernel(function, options, types, arch, even)


def instructions(listing: str, trips: Sequence[int]) -> int:
    """Count the instructions that a warp runs; loops run so often, from the outermost."""
    labels: dict[str, int] = {}
    jumps, number = [], 0
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = number
        elif re.search(r"/\*[0-9a-f]{4,}\*/\s+\S.*;", line):
            if jump := re.search(r"BRA.*(\.L_x_\d+)", line):
                jumps.append((number, jump[1]))
            number += 1
    loops = [(labels[to], at) for at, to in jumps if labels.get(to, number) < at - 2]
    return sum(_runs(place, loops, trips) for place in range(number))


def predicted(kernel: str, asking: str, pairs: int = 64, heads: int = 12) -> dict[str, float]:
    """Predict the time of a kernel on an H100 or H200 from its instructions.

    Args:
        kernel: `forward` or `backward`, in contextual mode, heads of 64 channels.
        asking: the side that asks, `text` or `image`.
        pairs: of a batch.
        heads: of a layer.
    """
    compiled = anchor_kernel(kernel, asking)
    queries, keys = TOKENS[asking]
    blocks = block_sizes(queries, keys, 8, 64, kernel == "forward")
    of_queries, of_keys = -(-queries // blocks["QUERIES"]), -(-keys // blocks["KEYS"])
    forward = kernel == "forward"
    trips = [of_keys] if forward else [of_keys, of_queries]
    programs = pairs * heads * (of_queries if forward else 1) / MULTIPROCESSORS
    registers = -(-compiled.registers // 8) * 8 * 32 * blocks["num_warps"]
    beside = min(REGISTERS // registers, SHARED // (compiled.shared + 1024))
    beside = min(beside, WARPS // blocks["num_warps"])
    of_warp = instructions(compiled.listing, trips)
    seconds = programs / beside * of_warp * CYCLES / CLOCK
    return {
        "registers": compiled.registers,
        "spilled": compiled.spilled,
        "programs": beside,
        "instructions": of_warp,
        "microseconds": 1e6 * seconds,
    }


def _runs(place: int, loops: Sequence[tuple[int, int]], trips: Sequence[int]) -> int:
    depth = sum(first <= place <= last for first, last in loops)
    runs = 1
    for times in trips[:depth]:
        runs *= times
    return runs


def _lines() -> Iterator[str]:
    yield "| kernel | asking | registers | bytes spilled | programs | instructions | µs |"
    yield "|---|---|---|---|---|---|---|"
    for kernel in ("forward", "backward"):
        for asking in TOKENS:
            found = predicted(kernel, asking)
            yield "| " + " | ".join([kernel, asking, *(f"{x:,.0f}" for x in found.values())]) + " |"


def main() -> int:
    """Run the command."""
    for line in _lines():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
