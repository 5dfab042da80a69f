"""The kernels of ACE-RPE's attention, compiled for GPUs that are not there, and their registers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from vlp.positions import anchor_attention

pytest.importorskip("triton")
from compiled_triton import usage

from vlp.positions import anchor_attention_triton, anchor_shift_triton

SIZES = {"GROUPS": 8, "MANY": 16, "PRECISION": "ieee", "BLOCK": 32, "POOLED": True}
ARCHITECTURES = [80, 90, 100]
TOKENS = {"text": (30, 257), "image": (257, 30)}
"""Queries and keys of the base model, by the side that asks."""
ALWAYS = {
    ("forward", "text", "contextual", 64, 90),
    ("backward", "text", "contextual", 64, 90),
    ("backward", "image", "contextual", 64, 90),
    ("forward", "text", "contextual", 128, 80),
    ("backward", "text", "contextual", 32, 100),
    ("forward", "image", "bias", 64, 80),
    ("backward", "text", "bias", 32, 90),
    ("backward", "image", "bias", 128, 100),
    ("path", "text", "bias", 64, 90),
}
"""Of all kernels, sides that ask, modes, head widths and architectures; the others are slow."""
CASES = [
    pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow)
    for case in product(
        ("forward", "backward", "path"), TOKENS, ("contextual", "bias"), (32, 64, 128),
        ARCHITECTURES,
    )
]  # fmt: skip
SPILLED = {
    ("backward", "text", "contextual", 128, 80): 32,
    ("backward", "text", "contextual", 128, 100): 8,
    ("backward", "image", "contextual", 128, 80): 8,
    ("backward", "image", "bias", 128, 90): 24,
    ("backward", "image", "bias", 32, 90): 8,
    ("forward", "text", "bias", 128, 90): 16,
    ("forward", "image", "contextual", 32, 100): 16,
    ("forward", "image", "bias", 32, 80): 16,
    ("forward", "text", "bias", 64, 80): 16,
}
"""Bytes of a thread at most, where there are any.

In most the compiler ends the registers at 168 or 128, so that one more program runs at a time.
Blocks of 16 tokens would spill nothing in the first, and give the tensor cores less to do.
"""


@pytest.mark.parametrize(("kernel", "asking", "mode", "width", "arch"), CASES)
def test_compiles_for_gpus_that_are_not_there(kernel, asking, mode, width, arch, tmp_path):
    queries, keys = TOKENS[asking]
    options = anchor_attention.block_sizes(
        queries, keys, width, torch.bfloat16, kernel == "forward"
    )
    backward = anchor_attention.block_sizes(queries, keys, width, torch.bfloat16, False)
    one = backward["KEYS"] >= keys
    options |= {"ONE_BLOCK": one, "HAS_REST": not one, "MASKED": asking == "image"}
    constants = SIZES | options | {"CHANNELS": width, "WIDE": width}
    constants["CONTEXTUAL"] = mode == "contextual"
    function = getattr(anchor_attention_triton, f"{kernel}_kernel")
    float32 = ("rows", "shares", "query_sum", "terms")
    states = ("query", "key", "value", "path", "query_mean", "key_mean", "out")
    states += ("rest", "above")
    gradients = ("query_gradient", "key_gradient", "value_gradient", "path_gradient")
    types = dict.fromkeys(states + gradients, "*bf16") | dict.fromkeys(float32, "*fp32")
    types |= {"mask": "*u8", "scale": "fp32"}
    even = ("query_pair", "key_pair", "value_pair", "path_pair", "path_query", "path_group")
    registers, spilled = usage(function, constants, types, arch, tmp_path, even)
    case = kernel, asking, mode, width, arch
    print(*case, f"{queries} x {keys}: {registers} registers, {spilled} bytes spilled")
    assert spilled <= SPILLED.get(case, 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["shift", "shift_backward"])
def test_kernels_of_the_shifts_spill_nothing(kernel, arch, tmp_path):
    function = getattr(anchor_shift_triton, f"{kernel}_kernel")
    tensors = [name for name in function.arg_names if name != "width"]
    types = dict.fromkeys(tensors, "*fp32")
    assert usage(function, SIZES, types, arch, tmp_path, ("width",))[1] == 0
