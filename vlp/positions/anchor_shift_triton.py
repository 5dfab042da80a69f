"""S = W_role W^T of a layer's three projections, with gradients; see `anchor_attention`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _chosen(role: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor) -> tl.tensor:
    """The tensor of a role, by its address."""
    address = tl.where(role == 0, query.to(tl.int64), key.to(tl.int64))
    address = tl.where(role == 2, value.to(tl.int64), address)
    return address.to(query.dtype)


@triton.jit
def shift_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor,
    of_query: tl.tensor, of_key: tl.tensor, of_value: tl.tensor,
    terms: tl.tensor, width: tl.tensor,
    GROUPS: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr,
) -> None:  # fmt: skip
    """Write a block of one role's S, and beside the value's its table: (4, G, width)."""
    role = tl.program_id(0) % 3
    table = _chosen(role, query, key, value)
    weight = _chosen(role, of_query, of_key, of_value)
    group = tl.arange(0, MANY)[:, None]
    out = (tl.program_id(0) // 3) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((MANY, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        into = start + tl.arange(0, BLOCK)[None, :]
        rows = tl.load(table + group * width + into, (group < GROUPS) & (into < width), 0.0)
        inside = (out[:, None] < width) & (into < width)
        block = tl.load(weight + out[:, None] * width + into, inside, 0.0)
        total += tl.dot(rows.to(tl.float32), tl.trans(block.to(tl.float32)), input_precision="ieee")
    known = (group < GROUPS) & (out[None, :] < width)
    place = (role * GROUPS + group) * width + out[None, :]
    if role == 2:
        if not POOLED:
            total *= 0.0
        rows = tl.load(table + group * width + out[None, :], known, 0.0)
        tl.store(terms + GROUPS * width + place, rows.to(tl.float32), known)
    tl.store(terms + place, total, known)


@triton.jit
def shift_backward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor,
    of_query: tl.tensor, of_key: tl.tensor, of_value: tl.tensor,
    above: tl.tensor,
    query_gradient: tl.tensor, key_gradient: tl.tensor, value_gradient: tl.tensor,
    of_query_gradient: tl.tensor, of_key_gradient: tl.tensor, of_value_gradient: tl.tensor,
    width: tl.tensor,
    GROUPS: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr,
) -> None:  # fmt: skip
    """Write a block of columns of the gradients of one role's table and weight."""
    role = tl.program_id(0) % 3
    table = _chosen(role, query, key, value)
    weight = _chosen(role, of_query, of_key, of_value)
    table_gradient = _chosen(role, query_gradient, key_gradient, value_gradient)
    weight_gradient = _chosen(role, of_query_gradient, of_key_gradient, of_value_gradient)
    group = tl.arange(0, MANY)[:, None]
    into = ((tl.program_id(0) // 3) * BLOCK + tl.arange(0, BLOCK))[None, :]
    here = (group < GROUPS) & (into < width)
    rows = tl.load(table + group * width + into, here, 0.0).to(tl.float32)
    total = tl.zeros((MANY, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        out = start + tl.arange(0, BLOCK)
        known = (group < GROUPS) & (out[None, :] < width)
        given = tl.load(above + (role * GROUPS + group) * width + out[None, :], known, 0.0)
        if not POOLED:
            given = tl.where(role == 2, 0.0, given)
        place = out[:, None] * width + into
        inside = (out[:, None] < width) & (into < width)
        block = tl.load(weight + place, inside, 0.0).to(tl.float32)
        total += tl.dot(given, block, input_precision="ieee")
        found = tl.dot(tl.trans(given), rows, input_precision="ieee")
        tl.store(weight_gradient + place, found, inside)
    beside = here & (role == 2)
    total += tl.load(above + (3 * GROUPS + group) * width + into, beside, 0.0)
    tl.store(table_gradient + group * width + into, total, here)
