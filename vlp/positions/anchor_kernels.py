"""Triton kernels of ACE-RPE: the windowed path (Eq. 7), and cross-attention with paths.

`TRITON_INTERPRET=1`, set before this module is imported, runs them on a CPU, for tests. Strides are
named by tensor and axis: `stride_pq` is the stride of the path (B, Q, K, G) along Q.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _entries(
    tokens: tl.tensor, groups: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS_LAST: tl.constexpr, BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return pair, patch, token and group of a program's entries, and a mask of valid entries."""
    patches = ROWS * COLUMNS
    blocks = (patches * tokens * groups + BLOCK - 1) // BLOCK
    pair = tl.program_id(0) // blocks
    entry = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < patches * tokens * groups
    if GROUPS_LAST:
        group = entry % groups
        token = (entry // groups) % tokens
        patch = entry // (groups * tokens)
    else:
        token = entry % tokens
        patch = (entry // tokens) % patches
        group = entry // (tokens * patches)
    return pair.to(tl.int64), patch, token, group, inside


@triton.constexpr_function
def _length(down: int, right: int, metric: str) -> float:
    """Return the length of a step between patches; evaluated at compile time."""
    if metric == "euclidean":
        return (down * down + right * right) ** 0.5
    if metric == "manhattan":
        return abs(down) + abs(right)
    return max(abs(down), abs(right))


@triton.jit
def path_forward_kernel(
    distance: tl.tensor, word_mask: tl.tensor,
    path: tl.tensor, reachable: tl.tensor, winner: tl.tensor,
    stride_db: tl.tensor, stride_dm: tl.tensor, stride_dn: tl.tensor, stride_dg: tl.tensor,
    stride_pb: tl.tensor, stride_pm: tl.tensor, stride_pn: tl.tensor, stride_pg: tl.tensor,
    tokens: tl.tensor, groups: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TEXT_REACH: tl.constexpr, PATCH_REACH: tl.constexpr,
    METRIC: tl.constexpr, ENTRIES: tl.constexpr, GROUPS_LAST: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, SAVE_WINNER: tl.constexpr,
) -> None:  # fmt: skip
    """Write the paths of a block of entries, and the window entry where each path's anchor is."""
    pair, patch, token, group, inside = _entries(tokens, groups, ROWS, COLUMNS, GROUPS_LAST, BLOCK)
    row, column = patch // COLUMNS, patch % COLUMNS
    target = inside
    if MASKED:
        word_mask += pair * tokens
        target = inside & (tl.load(word_mask + token, mask=inside, other=0) != 0)
    source = distance + pair * stride_db
    source += patch * stride_dm + token * stride_dn + group * stride_dg
    best = tl.full((BLOCK,), float("inf"), DTYPE)
    winning_entry = tl.full((BLOCK,), ENTRIES, tl.int32)
    side: tl.constexpr = 2 * PATCH_REACH + 1
    for text_step in range(-TEXT_REACH, TEXT_REACH + 1):
        source_token = token + text_step
        text_distance = tl.abs(source_token - token).to(DTYPE)
        is_word = target & (source_token >= 0) & (source_token < tokens)
        if MASKED:
            is_word = is_word & (tl.load(word_mask + source_token, mask=is_word, other=0) != 0)
        for down in tl.static_range(-PATCH_REACH, PATCH_REACH + 1):
            in_rows = is_word & (row + down >= 0) & (row + down < ROWS)
            window_row = (text_step + TEXT_REACH) * side + down + PATCH_REACH
            for right in tl.static_range(-PATCH_REACH, PATCH_REACH + 1):
                in_window = in_rows & (column + right >= 0) & (column + right < COLUMNS)
                offset = (down * COLUMNS + right) * stride_dm + text_step * stride_dn
                value = tl.load(source + offset, mask=in_window, other=float("inf")).to(DTYPE)
                value = (value + text_distance) + _length(down, right, METRIC)
                is_nearer = value < best
                best = tl.where(is_nearer, value, best)
                if SAVE_WINNER:
                    entry = window_row * side + right + PATCH_REACH
                    winning_entry = tl.where(is_nearer, entry, winning_entry)
    has_path = best < float("inf")
    address = pair * stride_pb + patch * stride_pm + token * stride_pn + group * stride_pg
    tl.store(path + address, tl.where(has_path, best, 0.0), mask=inside)
    tl.store(reachable + address, has_path, mask=inside)
    if SAVE_WINNER:
        tl.store(winner + address, winning_entry, mask=inside)


@triton.jit
def path_backward_kernel(
    path_grad: tl.tensor, winner: tl.tensor, distance_grad: tl.tensor,
    stride_pb: tl.tensor, stride_pm: tl.tensor, stride_pn: tl.tensor, stride_pg: tl.tensor,
    stride_gb: tl.tensor, stride_gm: tl.tensor, stride_gn: tl.tensor, stride_gg: tl.tensor,
    tokens: tl.tensor, groups: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TEXT_REACH: tl.constexpr, PATCH_REACH: tl.constexpr,
    METRIC: tl.constexpr, ENTRIES: tl.constexpr, GROUPS_LAST: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of a block of distances: sums over the paths that start from them."""
    # Without atomics, so that equal inputs give equal gradients: each distance checks all entries
    # around it for a winning entry that leads to it.
    pair, patch, token, group, inside = _entries(tokens, groups, ROWS, COLUMNS, GROUPS_LAST, BLOCK)
    row, column = patch // COLUMNS, patch % COLUMNS
    address = pair * stride_gb
    address += patch * stride_gm + token * stride_gn + group * stride_gg
    path_grad += pair * stride_pb
    path_grad += patch * stride_pm + token * stride_pn + group * stride_pg
    total = tl.full((BLOCK,), 0.0, DTYPE)
    side: tl.constexpr = 2 * PATCH_REACH + 1
    for text_step in range(-TEXT_REACH, TEXT_REACH + 1):
        is_word = inside & (token - text_step >= 0) & (token - text_step < tokens)
        for down in tl.static_range(-PATCH_REACH, PATCH_REACH + 1):
            in_rows = is_word & (row - down >= 0) & (row - down < ROWS)
            window_row = (text_step + TEXT_REACH) * side + down + PATCH_REACH
            for right in tl.static_range(-PATCH_REACH, PATCH_REACH + 1):
                in_window = in_rows & (column - right >= 0) & (column - right < COLUMNS)
                patch_step = down * COLUMNS + right
                winner_address = winner + address - (patch_step * stride_gm + text_step * stride_gn)
                winning_entry = tl.load(winner_address, mask=in_window, other=ENTRIES).to(tl.int32)
                entry = window_row * side + right + PATCH_REACH
                is_source = in_window & (winning_entry == entry)
                offset = patch_step * stride_pm + text_step * stride_pn
                total += tl.load(path_grad - offset, mask=is_source, other=0.0).to(DTYPE)
    tl.store(distance_grad + address, total, mask=inside)


@triton.jit
def _select_role(role: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor) -> tl.tensor:
    """Return the pointer of role 0 (query), 1 (key) or 2 (value)."""
    address = tl.where(role == 0, query.to(tl.int64), key.to(tl.int64))
    address = tl.where(role == 2, value.to(tl.int64), address)
    return address.to(query.dtype)


@triton.jit
def terms_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor,
    query_weight: tl.tensor, key_weight: tl.tensor, value_weight: tl.tensor,
    terms: tl.tensor, width: tl.tensor,
    GROUPS: tl.constexpr, DOT_G: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr,
) -> None:  # fmt: skip
    """Write a block of columns of one role's part of `contextual_terms`, (4, G, width)."""
    role = tl.program_id(0) % 3
    table = _select_role(role, query, key, value)
    weight = _select_role(role, query_weight, key_weight, value_weight)
    group = tl.arange(0, DOT_G)[:, None]
    outputs = (tl.program_id(0) // 3) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((DOT_G, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        inputs = start + tl.arange(0, BLOCK)[None, :]
        table_tile = tl.load(
            table + group * width + inputs, (group < GROUPS) & (inputs < width), 0.0
        )
        inside = (outputs[:, None] < width) & (inputs < width)
        weight_tile = tl.load(weight + outputs[:, None] * width + inputs, inside, 0.0)
        total += tl.dot(
            table_tile.to(tl.float32), tl.trans(weight_tile.to(tl.float32)), input_precision="ieee"
        )
    in_table = (group < GROUPS) & (outputs[None, :] < width)
    address = (role * GROUPS + group) * width + outputs[None, :]
    if role == 2:
        if not POOLED:
            total *= 0.0
        table_tile = tl.load(table + group * width + outputs[None, :], in_table, 0.0)
        tl.store(terms + GROUPS * width + address, table_tile.to(tl.float32), in_table)
    tl.store(terms + address, total, in_table)


@triton.jit
def terms_backward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor,
    query_weight: tl.tensor, key_weight: tl.tensor, value_weight: tl.tensor,
    terms_grad: tl.tensor,
    query_grad: tl.tensor, key_grad: tl.tensor, value_grad: tl.tensor,
    query_weight_grad: tl.tensor, key_weight_grad: tl.tensor, value_weight_grad: tl.tensor,
    width: tl.tensor,
    GROUPS: tl.constexpr, DOT_G: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr,
) -> None:  # fmt: skip
    """Write a block of columns of the gradients of a role's table and weight."""
    role = tl.program_id(0) % 3
    table = _select_role(role, query, key, value)
    weight = _select_role(role, query_weight, key_weight, value_weight)
    table_grad = _select_role(role, query_grad, key_grad, value_grad)
    weight_grad = _select_role(role, query_weight_grad, key_weight_grad, value_weight_grad)
    group = tl.arange(0, DOT_G)[:, None]
    inputs = ((tl.program_id(0) // 3) * BLOCK + tl.arange(0, BLOCK))[None, :]
    in_table = (group < GROUPS) & (inputs < width)
    table_tile = tl.load(table + group * width + inputs, in_table, 0.0).to(tl.float32)
    total = tl.zeros((DOT_G, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        outputs = start + tl.arange(0, BLOCK)
        in_terms = (group < GROUPS) & (outputs[None, :] < width)
        upstream = tl.load(
            terms_grad + (role * GROUPS + group) * width + outputs[None, :], in_terms, 0.0
        )
        if not POOLED:
            upstream = tl.where(role == 2, 0.0, upstream)
        address = outputs[:, None] * width + inputs
        inside = (outputs[:, None] < width) & (inputs < width)
        weight_tile = tl.load(weight + address, inside, 0.0).to(tl.float32)
        total += tl.dot(upstream, weight_tile, input_precision="ieee")
        weight_sum = tl.dot(tl.trans(upstream), table_tile, input_precision="ieee")
        tl.store(weight_grad + address, weight_sum, inside)
    in_value_table = in_table & (role == 2)
    total += tl.load(terms_grad + (3 * GROUPS + group) * width + inputs, in_value_table, 0.0)
    tl.store(table_grad + group * width + inputs, total, in_table)


# Added to the logits of masked keys. Finite: without any key the values are averaged, not NaN.
MASK_BIAS = tl.constexpr(-1e38)


@triton.jit
def _load(
    states: tl.tensor, token: tl.tensor, tokens: tl.tensor, width: tl.tensor,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load a head's channels of the tokens with indices `token`, 0 outside: (BLOCK, BLOCK_C)."""
    channel = tl.arange(0, BLOCK_C)
    inside = (token[:, None] < tokens) & (channel[None, :] < CHANNELS)
    return tl.load(states + token[:, None] * width + channel[None, :], mask=inside, other=0.0)


@triton.jit
def _store(
    states: tl.tensor, x: tl.tensor, token: tl.tensor, tokens: tl.tensor, width: tl.tensor,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    channel = tl.arange(0, BLOCK_C)
    inside = (token[:, None] < tokens) & (channel[None, :] < CHANNELS)
    tl.store(states + token[:, None] * width + channel[None, :], x, mask=inside)


@triton.jit
def _residual(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the rounding error of float32 numbers in `dtype`, of any shape."""
    return (x - x.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _delta(
    weight: tl.tensor, weight_grad: tl.tensor, out: tl.tensor, residual: tl.tensor,
    out_grad: tl.tensor, token: tl.tensor, tokens: tl.tensor, width: tl.tensor,
    HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SINGLE_BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return sum_j a_ij da_ij of each query i for weights a and their gradient da: (BLOCK_Q,)."""
    # With several blocks of keys, as the equal product of the output and its gradient.
    if SINGLE_BLOCK:
        delta = tl.sum(weight * weight_grad, 1)
    else:
        output = _load(out, token, tokens, width, HEAD_DIM, BLOCK_C).to(tl.float32)
        if HAS_RESIDUAL:
            output += _load(residual, token, tokens, width, HEAD_DIM, BLOCK_C).to(tl.float32)
        delta = tl.sum(out_grad.to(tl.float32) * output, 1)
    return delta


@triton.jit
def _load_paths(
    path_pointer: tl.tensor, first_query: tl.tensor, k_ids: tl.tensor, queries: tl.tensor,
    keys: tl.tensor, readable_keys: tl.tensor,
    stride_pq: tl.tensor, stride_pk: tl.tensor, stride_pg: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load the paths of a block in all groups, 0 outside: (BLOCK_G, BLOCK_Q, BLOCK_K)."""
    # Rows are (group, query), group slowest: one thread holds all groups of a key. Vectorised loads
    # may read past the last key, up to `readable_keys`; the values there are set to 0 below.
    row = tl.arange(0, BLOCK_G * BLOCK_Q)[:, None]
    q_ids, group, k_row = first_query + row % BLOCK_Q, row // BLOCK_Q, k_ids[None, :]
    inside = (group < GROUPS) & (q_ids < queries) & (k_row < readable_keys)
    address = group * stride_pg + q_ids * stride_pq + k_row * stride_pk
    paths = tl.load(path_pointer + address, mask=inside, other=0.0)
    return tl.where(k_row < keys, paths, 0.0).reshape(BLOCK_G, BLOCK_Q, BLOCK_K)


@triton.jit
def _logits(
    query: tl.tensor, key: tl.tensor, paths: tl.tensor, slopes: tl.tensor, mask: tl.tensor,
    k_ids: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a block of scaled logits with the mask and, in bias mode, this head's bias (Eq. 9)."""
    logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if not CONTEXTUAL:
        group = tl.arange(0, BLOCK_G)[:, None, None]
        slope = tl.load(slopes + group * heads, mask=group < GROUPS, other=0.0).to(tl.float32)
        logits += tl.sum(paths.to(tl.float32) * slope, 0)
    if MASKED:
        allowed = tl.load(mask + k_ids, mask=k_ids < keys, other=0)
        logits += tl.where(allowed != 0, 0.0, MASK_BIAS)[None, :]
    return tl.where(k_ids[None, :] < keys, logits, float("-inf"))


@triton.jit
def attention_forward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, path: tl.tensor, mask: tl.tensor,
    query_mean: tl.tensor, key_mean: tl.tensor, terms: tl.tensor,
    out: tl.tensor, residual: tl.tensor, row_statistics: tl.tensor,
    stride_qb: tl.tensor, stride_kb: tl.tensor, stride_vb: tl.tensor, stride_pb: tl.tensor,
    stride_pq: tl.tensor, stride_pk: tl.tensor, stride_pg: tl.tensor, readable_keys: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, DOT_G: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Write the output (B, Q, width), and each query's largest logit and sum of exponentials.

    With `HAS_RESIDUAL` also write the output's rounding error, and sum with unrounded weights.
    """
    head = tl.program_id(0) % heads
    block = (tl.program_id(0) // heads) % tl.cdiv(queries, BLOCK_Q)
    pair = (tl.program_id(0) // heads // tl.cdiv(queries, BLOCK_Q)).to(tl.int64)
    width = heads * HEAD_DIM
    column = head * HEAD_DIM
    q_ids = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    groups = tl.arange(0, DOT_G)
    key += pair * stride_kb + column
    value += pair * stride_vb + column
    path += pair * stride_pb
    q = _load(query + pair * stride_qb + column, q_ids, queries, width, HEAD_DIM, BLOCK_C)
    dtype = q.dtype
    slopes = terms + head  # in bias mode
    if CONTEXTUAL:
        query_mean += pair * queries * GROUPS
        key_mean += pair * keys * GROUPS
        terms += column
        query_terms = _load(terms, groups, GROUPS, width, HEAD_DIM, BLOCK_C).to(dtype)
        query_means = _load(query_mean, q_ids, queries, GROUPS, GROUPS, DOT_G).to(dtype)
        q = (q + tl.dot(query_means, query_terms, input_precision=PRECISION)).to(dtype)
        terms += GROUPS * width
        key_terms = _load(terms, groups, GROUPS, width, HEAD_DIM, BLOCK_C).to(dtype)
        terms += GROUPS * width
        value_terms = _load(terms, groups, GROUPS, width, HEAD_DIM, BLOCK_C).to(dtype)
    row_max = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), tl.float32)
    accumulator = tl.zeros((BLOCK_Q, BLOCK_C), tl.float32)
    path_sum = tl.zeros((BLOCK_G, BLOCK_Q), tl.float32)  # sum_j a_ij P_ij
    for start in range(0, keys, BLOCK_K):
        k_ids = start + tl.arange(0, BLOCK_K)
        k = _load(key, k_ids, keys, width, HEAD_DIM, BLOCK_C)
        v = _load(value, k_ids, keys, width, HEAD_DIM, BLOCK_C)
        if CONTEXTUAL:
            key_means = _load(key_mean, k_ids, keys, GROUPS, GROUPS, DOT_G).to(dtype)
            k = (k + tl.dot(key_means, key_terms, input_precision=PRECISION)).to(dtype)
            v = (v + tl.dot(key_means, value_terms, input_precision=PRECISION)).to(dtype)
        paths = _load_paths(
            path, block * BLOCK_Q, k_ids, queries, keys, readable_keys,
            stride_pq, stride_pk, stride_pg, GROUPS, BLOCK_G, BLOCK_Q, BLOCK_K,
        )  # fmt: skip
        logits = _logits(
            q, k, paths, slopes, mask + pair * keys, k_ids, keys, heads, scale,
            GROUPS, BLOCK_G, CONTEXTUAL, MASKED, PRECISION,
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        rescale = tl.exp(row_max - new_max)
        weight = tl.exp(logits - new_max[:, None])
        row_max = new_max
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        accumulator *= rescale[:, None]
        accumulator += tl.dot(weight.to(dtype), v, input_precision=PRECISION)
        if HAS_RESIDUAL:
            accumulator += tl.dot(_residual(weight, dtype), v, input_precision=PRECISION)
        if CONTEXTUAL:
            path_sum *= rescale[None, :]
            path_sum += tl.sum(paths.to(tl.float32) * weight[None, :, :], 2)
    accumulator /= row_sum[:, None]
    if CONTEXTUAL:
        path_sum /= row_sum[None, :]
        table = _load(terms + GROUPS * width, groups, GROUPS, width, HEAD_DIM, BLOCK_C).to(dtype)
        # `tl.dot` needs an inner dimension of at least 16.
        if DOT_G > BLOCK_G:
            padding = tl.zeros((BLOCK_G, BLOCK_Q), tl.float32)
            path_sum = tl.join(path_sum, padding).trans(2, 0, 1).reshape(DOT_G, BLOCK_Q)
        accumulator += tl.dot(tl.trans(path_sum).to(dtype), table, input_precision=PRECISION)
        if HAS_RESIDUAL:
            accumulator += tl.dot(
                tl.trans(_residual(path_sum, dtype)), table, input_precision=PRECISION
            )
    offset = pair * queries * width + column
    _store(out + offset, accumulator.to(dtype), q_ids, queries, width, HEAD_DIM, BLOCK_C)
    if HAS_RESIDUAL:
        rounding = _residual(accumulator, dtype)
        _store(residual + offset, rounding, q_ids, queries, width, HEAD_DIM, BLOCK_C)
    row_statistics += (pair * heads + head) * 2 * queries + q_ids
    tl.store(row_statistics, row_max, mask=q_ids < queries)
    tl.store(row_statistics + queries, row_sum, mask=q_ids < queries)


@triton.jit
def attention_backward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, path: tl.tensor, mask: tl.tensor,
    query_mean: tl.tensor, key_mean: tl.tensor, terms: tl.tensor,
    out: tl.tensor, residual: tl.tensor, row_statistics: tl.tensor, out_grad: tl.tensor,
    query_grad: tl.tensor, key_grad: tl.tensor, value_grad: tl.tensor,
    query_sum: tl.tensor, pair_terms_grad: tl.tensor,
    stride_qb: tl.tensor, stride_kb: tl.tensor, stride_vb: tl.tensor, stride_pb: tl.tensor,
    stride_pq: tl.tensor, stride_pk: tl.tensor, stride_pg: tl.tensor, readable_keys: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, DOT_G: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SINGLE_BLOCK: tl.constexpr, CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of query, key and value, and each pair's part of the terms' gradient."""
    # A program computes one head of one pair. With several blocks of keys it sums the gradient of
    # the queries in `query_sum`, float32. `pair_terms_grad`: (B, 4, G, width), bias (B, G, heads).
    head = tl.program_id(0) % heads
    pair = (tl.program_id(0) // heads).to(tl.int64)
    width = heads * HEAD_DIM
    column = head * HEAD_DIM
    groups, group_ids = tl.arange(0, DOT_G), tl.arange(0, BLOCK_G)
    query += pair * stride_qb + column
    key += pair * stride_kb + column
    value += pair * stride_vb + column
    path += pair * stride_pb
    offset = pair * queries * width + column
    row_statistics += (pair * heads + head) * 2 * queries
    dtype = query.dtype.element_ty
    if CONTEXTUAL:
        query_mean += pair * queries * GROUPS
        key_mean += pair * keys * GROUPS
        terms += column
        query_terms_sum = tl.zeros((DOT_G, BLOCK_C), tl.float32)
        pair_terms_grad += pair * 4 * GROUPS * width + column
        table_sum = tl.zeros((BLOCK_G, BLOCK_C), tl.float32)
    else:
        slope_sum = tl.zeros((BLOCK_G,), tl.float32)
    for key_start in tl.range(0, keys, BLOCK_K, disable_licm=True):
        k_ids = key_start + tl.arange(0, BLOCK_K)
        k = _load(key, k_ids, keys, width, HEAD_DIM, BLOCK_C)
        v = _load(value, k_ids, keys, width, HEAD_DIM, BLOCK_C)
        if CONTEXTUAL:
            key_means = _load(key_mean, k_ids, keys, GROUPS, GROUPS, DOT_G).to(dtype)
            # Terms are loaded just before use, as registers are scarce.
            key_terms = terms + GROUPS * width
            term_tile = _load(key_terms, groups, GROUPS, width, HEAD_DIM, BLOCK_C).to(dtype)
            k = (k + tl.dot(key_means, term_tile, input_precision=PRECISION)).to(dtype)
            term_tile = _load(
                key_terms + GROUPS * width, groups, GROUPS, width, HEAD_DIM, BLOCK_C
            ).to(dtype)
            v = (v + tl.dot(key_means, term_tile, input_precision=PRECISION)).to(dtype)
        k_grad = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
        v_grad = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
        for start in tl.range(0, queries, BLOCK_Q, disable_licm=True):
            q_ids = start + tl.arange(0, BLOCK_Q)
            paths = _load_paths(
                path, start, k_ids, queries, keys, readable_keys, stride_pq, stride_pk, stride_pg,
                GROUPS, BLOCK_G, BLOCK_Q, BLOCK_K,
            )  # fmt: skip
            q = _load(query, q_ids, queries, width, HEAD_DIM, BLOCK_C)
            if CONTEXTUAL:
                query_means = _load(query_mean, q_ids, queries, GROUPS, GROUPS, DOT_G).to(dtype)
                term_tile = _load(terms, groups, GROUPS, width, HEAD_DIM, BLOCK_C).to(dtype)
                q = (q + tl.dot(query_means, term_tile, input_precision=PRECISION)).to(dtype)
            row_max = tl.load(row_statistics + q_ids, mask=q_ids < queries, other=0.0)
            row_sum = tl.load(row_statistics + queries + q_ids, mask=q_ids < queries, other=1.0)
            logits = _logits(
                q, k, paths, terms + head, mask + pair * keys, k_ids, keys, heads, scale,
                GROUPS, BLOCK_G, CONTEXTUAL, MASKED, PRECISION,
            )  # fmt: skip
            weight = tl.exp(logits - row_max[:, None]) * (1 / row_sum)[:, None]
            out_tile = _load(out_grad + offset, q_ids, queries, width, HEAD_DIM, BLOCK_C)
            v_grad += tl.dot(tl.trans(weight.to(dtype)), out_tile, input_precision=PRECISION)
            weight_grad = tl.dot(out_tile, tl.trans(v), input_precision=PRECISION)
            if CONTEXTUAL:
                table = _load(
                    terms + 3 * GROUPS * width, group_ids, GROUPS, width, HEAD_DIM, BLOCK_C
                )
                sum_grad = tl.dot(table.to(dtype), tl.trans(out_tile), input_precision=PRECISION)
                path_tile = paths.to(tl.float32)
                path_sum = tl.sum(path_tile * weight[None, :, :], 2).to(dtype)
                weight_grad += tl.sum(path_tile * sum_grad[:, :, None], 0)
                table_sum += tl.dot(path_sum, out_tile, input_precision=PRECISION)
            delta = _delta(
                weight, weight_grad, out + offset, residual + offset, out_tile, q_ids,
                queries, width, HEAD_DIM, BLOCK_C, HAS_RESIDUAL, SINGLE_BLOCK,
            )  # fmt: skip
            logits_grad = weight * (weight_grad - delta[:, None])
            if not CONTEXTUAL:
                slope_sum += tl.sum(tl.sum(paths.to(tl.float32) * logits_grad[None, :, :], 2), 1)
            product_grad = (logits_grad * scale).to(dtype)
            k_grad += tl.dot(tl.trans(product_grad), q, input_precision=PRECISION)
            q_sum = tl.dot(product_grad, k, input_precision=PRECISION)
            if not SINGLE_BLOCK:
                if key_start > 0:
                    q_sum += _load(query_sum + offset, q_ids, queries, width, HEAD_DIM, BLOCK_C)
                _store(query_sum + offset, q_sum, q_ids, queries, width, HEAD_DIM, BLOCK_C)
            if SINGLE_BLOCK or key_start + BLOCK_K >= keys:
                q_grad = q_sum.to(dtype)
                _store(query_grad + offset, q_grad, q_ids, queries, width, HEAD_DIM, BLOCK_C)
                if CONTEXTUAL:
                    means = tl.trans(query_means)
                    query_terms_sum += tl.dot(means, q_grad, input_precision=PRECISION)
        k_grad, v_grad = k_grad.to(dtype), v_grad.to(dtype)
        key_offset = pair * keys * width + column
        _store(key_grad + key_offset, k_grad, k_ids, keys, width, HEAD_DIM, BLOCK_C)
        _store(value_grad + key_offset, v_grad, k_ids, keys, width, HEAD_DIM, BLOCK_C)
        if CONTEXTUAL:
            key_means = tl.trans(key_means)
            k_grad = tl.dot(key_means, k_grad, input_precision=PRECISION)
            v_grad = tl.dot(key_means, v_grad, input_precision=PRECISION)
            key_terms_grad = pair_terms_grad + GROUPS * width
            value_terms_grad = key_terms_grad + GROUPS * width
            if key_start > 0:
                k_grad += _load(key_terms_grad, groups, GROUPS, width, HEAD_DIM, BLOCK_C)
                v_grad += _load(value_terms_grad, groups, GROUPS, width, HEAD_DIM, BLOCK_C)
            _store(key_terms_grad, k_grad, groups, GROUPS, width, HEAD_DIM, BLOCK_C)
            _store(value_terms_grad, v_grad, groups, GROUPS, width, HEAD_DIM, BLOCK_C)
        if not SINGLE_BLOCK:
            # In the next block of keys another thread may load what a thread has stored here.
            tl.debug_barrier()
    if CONTEXTUAL:
        _store(pair_terms_grad, query_terms_sum, groups, GROUPS, width, HEAD_DIM, BLOCK_C)
        table_grad = pair_terms_grad + 3 * GROUPS * width
        _store(table_grad, table_sum, group_ids, GROUPS, width, HEAD_DIM, BLOCK_C)
    else:
        pair_terms_grad += (pair * GROUPS + group_ids) * heads + head
        tl.store(pair_terms_grad, slope_sum, mask=group_ids < GROUPS)


@triton.jit
def path_grad_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, path: tl.tensor, mask: tl.tensor,
    query_mean: tl.tensor, key_mean: tl.tensor, terms: tl.tensor,
    out: tl.tensor, residual: tl.tensor, row_statistics: tl.tensor,
    out_grad: tl.tensor, path_grad: tl.tensor,
    stride_qb: tl.tensor, stride_kb: tl.tensor, stride_vb: tl.tensor, stride_pb: tl.tensor,
    stride_pq: tl.tensor, stride_pk: tl.tensor, stride_pg: tl.tensor, readable_keys: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, DOT_G: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SINGLE_BLOCK: tl.constexpr, CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of one group's paths, (B, Q, K, G) contiguous: a sum over the heads."""
    # A program computes a block of one pair's paths, and again the weights of each head.
    program, key_blocks = tl.program_id(0), tl.cdiv(keys, BLOCK_K)
    group = program % GROUPS
    key_block, block = (program // GROUPS) % key_blocks, program // GROUPS // key_blocks
    first_query = (block % tl.cdiv(queries, BLOCK_Q)) * BLOCK_Q
    q_ids = first_query + tl.arange(0, BLOCK_Q)
    pair = (block // tl.cdiv(queries, BLOCK_Q)).to(tl.int64)
    k_ids = key_block * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (q_ids[:, None] < queries) & (k_ids[None, :] < keys)
    path += pair * stride_pb
    paths = _load_paths(
        path, first_query, k_ids, queries, keys, readable_keys, stride_pq, stride_pk, stride_pg,
        GROUPS, BLOCK_G, BLOCK_Q, BLOCK_K,
    )  # fmt: skip
    width = heads * HEAD_DIM
    groups, channel = tl.arange(0, DOT_G), tl.arange(0, BLOCK_C)
    dtype = query.dtype.element_ty
    sum_of_heads = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    for head in range(0, heads):
        column = head * HEAD_DIM
        q = _load(query + pair * stride_qb + column, q_ids, queries, width, HEAD_DIM, BLOCK_C)
        k = _load(key + pair * stride_kb + column, k_ids, keys, width, HEAD_DIM, BLOCK_C)
        if CONTEXTUAL:
            head_terms = terms + column
            term_tile = _load(head_terms, groups, GROUPS, width, HEAD_DIM, BLOCK_C).to(dtype)
            mean = query_mean + pair * queries * GROUPS
            mean = _load(mean, q_ids, queries, GROUPS, GROUPS, DOT_G).to(dtype)
            q = (q + tl.dot(mean, term_tile, input_precision=PRECISION)).to(dtype)
            term_tile = _load(
                head_terms + GROUPS * width, groups, GROUPS, width, HEAD_DIM, BLOCK_C
            ).to(dtype)
            mean = key_mean + pair * keys * GROUPS
            mean = _load(mean, k_ids, keys, GROUPS, GROUPS, DOT_G).to(dtype)
            k = (k + tl.dot(mean, term_tile, input_precision=PRECISION)).to(dtype)
        logits = _logits(
            q, k, paths, terms + head, mask + pair * keys, k_ids, keys, heads, scale,
            GROUPS, BLOCK_G, CONTEXTUAL, MASKED, PRECISION,
        )  # fmt: skip
        row = row_statistics + (pair * heads + head) * 2 * queries + q_ids
        row_max = tl.load(row, mask=q_ids < queries, other=0.0)
        row_sum = tl.load(row + queries, mask=q_ids < queries, other=1.0)
        weight = tl.exp(logits - row_max[:, None]) / row_sum[:, None]
        offset = pair * queries * width + column
        out_tile = _load(out_grad + offset, q_ids, queries, width, HEAD_DIM, BLOCK_C)
        if CONTEXTUAL:
            table_row = terms + (3 * GROUPS + group) * width + column + channel
            table_row = tl.load(table_row, mask=channel < HEAD_DIM, other=0.0).to(tl.float32)
            slope = tl.sum(out_tile.to(tl.float32) * table_row[None, :], 1)
            sum_of_heads += weight * slope[:, None]
        else:
            v = _load(value + pair * stride_vb + column, k_ids, keys, width, HEAD_DIM, BLOCK_C)
            weight_grad = tl.dot(out_tile, tl.trans(v), input_precision=PRECISION)
            delta = _delta(
                weight, weight_grad, out + offset, residual + offset, out_tile, q_ids,
                queries, width, HEAD_DIM, BLOCK_C, HAS_RESIDUAL, SINGLE_BLOCK,
            )  # fmt: skip
            weight_grad -= delta[:, None]
            slope = tl.load(terms + group * heads + head).to(tl.float32)
            sum_of_heads += weight * weight_grad * slope
    address = path_grad + (pair * queries + q_ids[:, None]) * keys * GROUPS
    tl.store(address + k_ids[None, :] * GROUPS + group, sum_of_heads, mask=inside)
