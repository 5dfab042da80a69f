"""Triton kernels of ACE-RPE: the windowed path (Eq. 7), and cross-attention with paths.

`TRITON_INTERPRET=1`, set before this module is imported, runs them on a CPU, for tests.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _entries(
    tokens: tl.tensor, groups: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS_LAST: tl.constexpr, BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return pair, patch, token and group of this program's entries, in the order of memory."""
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
    """Return a distance in patches; evaluated while a kernel is compiled."""
    if metric == "euclidean":
        return (down * down + right * right) ** 0.5
    if metric == "manhattan":
        return abs(down) + abs(right)
    return max(abs(down), abs(right))


@triton.jit
def path_forward_kernel(
    distance: tl.tensor, words: tl.tensor,
    path: tl.tensor, reachable: tl.tensor, winner: tl.tensor,
    distance_pair: tl.tensor, distance_patch: tl.tensor, distance_token: tl.tensor,
    distance_group: tl.tensor,
    path_pair: tl.tensor, path_patch: tl.tensor, path_token: tl.tensor, path_group: tl.tensor,
    tokens: tl.tensor, groups: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TEXT: tl.constexpr, PATCH: tl.constexpr,
    METRIC: tl.constexpr, STEPS: tl.constexpr, GROUPS_LAST: tl.constexpr, TYPE: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, SAVE_WINNER: tl.constexpr,
) -> None:  # fmt: skip
    """Write the paths of a block of entries, and the step to the nearest source of each."""
    pair, patch, token, group, inside = _entries(tokens, groups, ROWS, COLUMNS, GROUPS_LAST, BLOCK)
    row, column = patch // COLUMNS, patch % COLUMNS
    target = inside
    if MASKED:
        words += pair * tokens
        target = inside & (tl.load(words + token, mask=inside, other=0) != 0)
    source = distance + pair * distance_pair
    source += patch * distance_patch + token * distance_token + group * distance_group
    best = tl.full((BLOCK,), float("inf"), TYPE)
    winning_step = tl.full((BLOCK,), STEPS, tl.int32)
    side: tl.constexpr = 2 * PATCH + 1
    for text_step in range(-TEXT, TEXT + 1):
        source_token = token + text_step
        text_distance = tl.abs(source_token - token).to(TYPE)
        is_word = target & (source_token >= 0) & (source_token < tokens)
        if MASKED:
            is_word = is_word & (tl.load(words + source_token, mask=is_word, other=0) != 0)
        for down in tl.static_range(-PATCH, PATCH + 1):
            in_rows = is_word & (row + down >= 0) & (row + down < ROWS)
            for right in tl.static_range(-PATCH, PATCH + 1):
                in_window = in_rows & (column + right >= 0) & (column + right < COLUMNS)
                offset = (down * COLUMNS + right) * distance_patch + text_step * distance_token
                value = tl.load(source + offset, mask=in_window, other=float("inf")).to(TYPE)
                value = (value + text_distance) + _length(down, right, METRIC)
                is_nearer = value < best
                best = tl.where(is_nearer, value, best)
                if SAVE_WINNER:
                    step = ((text_step + TEXT) * side + down + PATCH) * side + right + PATCH
                    winning_step = tl.where(is_nearer, step, winning_step)
    has_path = best < float("inf")
    address = pair * path_pair + patch * path_patch + token * path_token + group * path_group
    tl.store(path + address, tl.where(has_path, best, 0.0), mask=inside)
    tl.store(reachable + address, has_path, mask=inside)
    if SAVE_WINNER:
        tl.store(winner + address, winning_step, mask=inside)


@triton.jit
def path_backward_kernel(
    path_gradient: tl.tensor, winner: tl.tensor, gradient: tl.tensor,
    path_pair: tl.tensor, path_patch: tl.tensor, path_token: tl.tensor, path_group: tl.tensor,
    gradient_pair: tl.tensor, gradient_patch: tl.tensor, gradient_token: tl.tensor,
    gradient_group: tl.tensor, tokens: tl.tensor, groups: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TEXT: tl.constexpr, PATCH: tl.constexpr,
    METRIC: tl.constexpr, STEPS: tl.constexpr, GROUPS_LAST: tl.constexpr, TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of a block of sources, from the entries where they are the nearest."""
    # Without atomics, so that equal inputs give equal gradients: a source looks at every entry
    # around it for the step that leads back.
    pair, patch, token, group, inside = _entries(tokens, groups, ROWS, COLUMNS, GROUPS_LAST, BLOCK)
    row, column = patch // COLUMNS, patch % COLUMNS
    address = pair * gradient_pair
    address += patch * gradient_patch + token * gradient_token + group * gradient_group
    upstream = path_gradient + pair * path_pair
    upstream += patch * path_patch + token * path_token + group * path_group
    total = tl.full((BLOCK,), 0.0, TYPE)
    side: tl.constexpr = 2 * PATCH + 1
    for text_step in range(-TEXT, TEXT + 1):
        is_word = inside & (token - text_step >= 0) & (token - text_step < tokens)
        for down in tl.static_range(-PATCH, PATCH + 1):
            in_rows = is_word & (row - down >= 0) & (row - down < ROWS)
            for right in tl.static_range(-PATCH, PATCH + 1):
                in_window = in_rows & (column - right >= 0) & (column - right < COLUMNS)
                patch_step = down * COLUMNS + right
                winner_address = (
                    winner + address - (patch_step * gradient_patch + text_step * gradient_token)
                )
                winning_step = tl.load(winner_address, mask=in_window, other=STEPS).to(tl.int32)
                step = ((text_step + TEXT) * side + down + PATCH) * side + right + PATCH
                is_source = in_window & (winning_step == step)
                offset = patch_step * path_patch + text_step * path_token
                total += tl.load(upstream - offset, mask=is_source, other=0.0).to(TYPE)
    tl.store(gradient + address, total, mask=inside)


@triton.jit
def _select_role(role: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor) -> tl.tensor:
    """Return the tensor of a role, by its address."""
    address = tl.where(role == 0, query.to(tl.int64), key.to(tl.int64))
    address = tl.where(role == 2, value.to(tl.int64), address)
    return address.to(query.dtype)


@triton.jit
def shift_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor,
    query_weight: tl.tensor, key_weight: tl.tensor, value_weight: tl.tensor,
    terms: tl.tensor, width: tl.tensor,
    GROUPS: tl.constexpr, DOT_G: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr,
) -> None:  # fmt: skip
    """Write a block of one role's S, and for the value its table: (4, G, width)."""
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
def shift_backward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor,
    query_weight: tl.tensor, key_weight: tl.tensor, value_weight: tl.tensor,
    terms_grad: tl.tensor,
    query_grad: tl.tensor, key_grad: tl.tensor, value_grad: tl.tensor,
    query_weight_grad: tl.tensor, key_weight_grad: tl.tensor, value_weight_grad: tl.tensor,
    width: tl.tensor,
    GROUPS: tl.constexpr, DOT_G: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr,
) -> None:  # fmt: skip
    """Write a block of columns of the gradients of one role's table and weight."""
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


# Added to the logits of masked keys: a row without keys gives a mean, not NaN.
HIDDEN = tl.constexpr(-1e38)


@triton.jit
def _load(
    states: tl.tensor, token: tl.tensor, tokens: tl.tensor, width: tl.tensor,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load one head's channels of some tokens, 0 outside: (BLOCK, BLOCK_C)."""
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
    """Return the rounding residual of float32 numbers of any shape."""
    return (x - x.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _delta(
    weight: tl.tensor, weight_grad: tl.tensor, out: tl.tensor, residual: tl.tensor,
    out_grad: tl.tensor, token: tl.tensor, tokens: tl.tensor, width: tl.tensor,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SINGLE_BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the mean gradient of each row's weights, (QUERIES,)."""
    # A block without all keys takes it from the output times its gradient.
    if SINGLE_BLOCK:
        delta = tl.sum(weight * weight_grad, 1)
    else:
        output = _load(out, token, tokens, width, CHANNELS, BLOCK_C).to(tl.float32)
        if HAS_RESIDUAL:
            output += _load(residual, token, tokens, width, CHANNELS, BLOCK_C).to(tl.float32)
        delta = tl.sum(out_grad.to(tl.float32) * output, 1)
    return delta


@triton.jit
def _load_paths(
    path: tl.tensor, first_query: tl.tensor, k_ids: tl.tensor, queries: tl.tensor,
    keys: tl.tensor, readable: tl.tensor,
    path_query: tl.tensor, path_key: tl.tensor, path_group: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load the paths of a block in all groups, 0 outside: (BLOCK_G, QUERIES, KEYS)."""
    # Wide loads of keys side by side may pass the last key, up to `readable`. In this order of
    # rows a thread holds all groups of its keys.
    row = tl.arange(0, BLOCK_G * QUERIES)[:, None]
    q_ids, group, k_ids = first_query + row % QUERIES, row // QUERIES, k_ids[None, :]
    inside = (group < GROUPS) & (q_ids < queries) & (k_ids < readable)
    address = group * path_group + q_ids * path_query + k_ids * path_key
    paths = tl.load(path + address, mask=inside, other=0.0)
    return tl.where(k_ids < keys, paths, 0.0).reshape(BLOCK_G, QUERIES, KEYS)


@triton.jit
def _logits(
    query: tl.tensor, key: tl.tensor, paths: tl.tensor, slopes: tl.tensor, mask: tl.tensor,
    k_ids: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return scaled logits of a block with mask and the bias of Eq. 9 (this head's `slopes`)."""
    logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if not CONTEXTUAL:
        group = tl.arange(0, BLOCK_G)[:, None, None]
        slope = tl.load(slopes + group * heads, mask=group < GROUPS, other=0.0).to(tl.float32)
        logits += tl.sum(paths.to(tl.float32) * slope, 0)
    if MASKED:
        allowed = tl.load(mask + k_ids, mask=k_ids < keys, other=0)
        logits += tl.where(allowed != 0, 0.0, HIDDEN)[None, :]
    return tl.where(k_ids[None, :] < keys, logits, float("-inf"))


@triton.jit
def forward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, path: tl.tensor, mask: tl.tensor,
    query_mean: tl.tensor, key_mean: tl.tensor, terms: tl.tensor,
    out: tl.tensor, residual: tl.tensor, statistics: tl.tensor,
    query_pair: tl.tensor, key_pair: tl.tensor, value_pair: tl.tensor,
    path_pair: tl.tensor, path_query: tl.tensor, path_key: tl.tensor, path_group: tl.tensor,
    readable: tl.tensor, queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, DOT_G: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Write the output (B, Q, width), and each row's largest logit and sum of exponentials.

    With `HAS_RESIDUAL`, write the output's rounding error, too, and sum with unrounded weights.
    """
    head = tl.program_id(0) % heads
    block = (tl.program_id(0) // heads) % tl.cdiv(queries, QUERIES)
    pair = (tl.program_id(0) // heads // tl.cdiv(queries, QUERIES)).to(tl.int64)
    width = heads * CHANNELS
    column = head * CHANNELS
    q_ids = block * QUERIES + tl.arange(0, QUERIES)
    groups = tl.arange(0, DOT_G)
    key += pair * key_pair + column
    value += pair * value_pair + column
    path += pair * path_pair
    q = _load(query + pair * query_pair + column, q_ids, queries, width, CHANNELS, BLOCK_C)
    dtype = q.dtype
    if CONTEXTUAL:
        query_mean += pair * queries * GROUPS
        key_mean += pair * keys * GROUPS
        terms += column
        shift = _load(terms, groups, GROUPS, width, CHANNELS, BLOCK_C).to(dtype)
        query_means = _load(query_mean, q_ids, queries, GROUPS, GROUPS, DOT_G).to(dtype)
        q = (q + tl.dot(query_means, shift, input_precision=PRECISION)).to(dtype)
        terms += GROUPS * width
        key_terms = _load(terms, groups, GROUPS, width, CHANNELS, BLOCK_C).to(dtype)
        terms += GROUPS * width
        value_terms = _load(terms, groups, GROUPS, width, CHANNELS, BLOCK_C).to(dtype)
    row_max = tl.full((QUERIES,), float("-inf"), tl.float32)
    row_sum = tl.zeros((QUERIES,), tl.float32)
    accumulator = tl.zeros((QUERIES, BLOCK_C), tl.float32)
    path_sum = tl.zeros((BLOCK_G, QUERIES), tl.float32)  # sum_j a_ij P_ij
    for start in range(0, keys, KEYS):
        k_ids = start + tl.arange(0, KEYS)
        k = _load(key, k_ids, keys, width, CHANNELS, BLOCK_C)
        v = _load(value, k_ids, keys, width, CHANNELS, BLOCK_C)
        if CONTEXTUAL:
            key_means = _load(key_mean, k_ids, keys, GROUPS, GROUPS, DOT_G).to(dtype)
            k = (k + tl.dot(key_means, key_terms, input_precision=PRECISION)).to(dtype)
            v = (v + tl.dot(key_means, value_terms, input_precision=PRECISION)).to(dtype)
        paths = _load_paths(
            path, block * QUERIES, k_ids, queries, keys, readable,
            path_query, path_key, path_group, GROUPS, BLOCK_G, QUERIES, KEYS,
        )  # fmt: skip
        logits = _logits(
            q, k, paths, terms + head, mask + pair * keys, k_ids, keys, heads, scale,
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
        embed = _load(terms + GROUPS * width, groups, GROUPS, width, CHANNELS, BLOCK_C).to(dtype)
        # `tl.dot` adds up over at least 16.
        if DOT_G > BLOCK_G:
            padding = tl.zeros((BLOCK_G, QUERIES), tl.float32)
            path_sum = tl.join(path_sum, padding).trans(2, 0, 1).reshape(DOT_G, QUERIES)
        accumulator += tl.dot(tl.trans(path_sum).to(dtype), embed, input_precision=PRECISION)
        if HAS_RESIDUAL:
            accumulator += tl.dot(
                tl.trans(_residual(path_sum, dtype)), embed, input_precision=PRECISION
            )
    offset = pair * queries * width + column
    _store(out + offset, accumulator.to(dtype), q_ids, queries, width, CHANNELS, BLOCK_C)
    if HAS_RESIDUAL:
        _store(
            residual + offset,
            _residual(accumulator, dtype),
            q_ids,
            queries,
            width,
            CHANNELS,
            BLOCK_C,
        )
    statistics += (pair * heads + head) * 2 * queries + q_ids
    tl.store(statistics, row_max, mask=q_ids < queries)
    tl.store(statistics + queries, row_sum, mask=q_ids < queries)


@triton.jit
def backward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, path: tl.tensor, mask: tl.tensor,
    query_mean: tl.tensor, key_mean: tl.tensor, terms: tl.tensor,
    out: tl.tensor, residual: tl.tensor, statistics: tl.tensor, out_grad: tl.tensor,
    query_grad: tl.tensor, key_grad: tl.tensor, value_grad: tl.tensor,
    query_sum: tl.tensor, term_grads: tl.tensor,
    query_pair: tl.tensor, key_pair: tl.tensor, value_pair: tl.tensor,
    path_pair: tl.tensor, path_query: tl.tensor, path_key: tl.tensor, path_group: tl.tensor,
    readable: tl.tensor, queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, DOT_G: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SINGLE_BLOCK: tl.constexpr, CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of the states, and each pair's share in that of the terms.

    `out_grad` is the gradient of the output, `term_grads` is (B, 4, G, width) or (B, G, heads).
    """
    # Where the keys fill several blocks, the gradient of the queries adds up in `query_sum`,
    # float32, which this program alone touches.
    head = tl.program_id(0) % heads
    pair = (tl.program_id(0) // heads).to(tl.int64)
    width = heads * CHANNELS
    column = head * CHANNELS
    groups, group_ids = tl.arange(0, DOT_G), tl.arange(0, BLOCK_G)
    query += pair * query_pair + column
    key += pair * key_pair + column
    value += pair * value_pair + column
    path += pair * path_pair
    offset = pair * queries * width + column
    statistics += (pair * heads + head) * 2 * queries
    dtype = query.dtype.element_ty
    if CONTEXTUAL:
        query_mean += pair * queries * GROUPS
        key_mean += pair * keys * GROUPS
        terms += column
        query_terms_sum = tl.zeros((DOT_G, BLOCK_C), tl.float32)
        term_grads += pair * 4 * GROUPS * width + column
        table_sum = tl.zeros((BLOCK_G, BLOCK_C), tl.float32)
    else:
        slope_sum = tl.zeros((BLOCK_G,), tl.float32)
    for key_start in tl.range(0, keys, KEYS, disable_licm=True):
        k_ids = key_start + tl.arange(0, KEYS)
        k = _load(key, k_ids, keys, width, CHANNELS, BLOCK_C)
        v = _load(value, k_ids, keys, width, CHANNELS, BLOCK_C)
        if CONTEXTUAL:
            key_means = _load(key_mean, k_ids, keys, GROUPS, GROUPS, DOT_G).to(dtype)
            # Read when needed, as there are few registers to spare.
            key_terms = terms + GROUPS * width
            shift = _load(key_terms, groups, GROUPS, width, CHANNELS, BLOCK_C).to(dtype)
            k = (k + tl.dot(key_means, shift, input_precision=PRECISION)).to(dtype)
            shift = _load(key_terms + GROUPS * width, groups, GROUPS, width, CHANNELS, BLOCK_C).to(
                dtype
            )
            v = (v + tl.dot(key_means, shift, input_precision=PRECISION)).to(dtype)
        k_grad = tl.zeros((KEYS, BLOCK_C), tl.float32)
        v_grad = tl.zeros((KEYS, BLOCK_C), tl.float32)
        for start in tl.range(0, queries, QUERIES, disable_licm=True):
            q_ids = start + tl.arange(0, QUERIES)
            paths = _load_paths(
                path, start, k_ids, queries, keys, readable, path_query, path_key, path_group,
                GROUPS, BLOCK_G, QUERIES, KEYS,
            )  # fmt: skip
            q = _load(query, q_ids, queries, width, CHANNELS, BLOCK_C)
            if CONTEXTUAL:
                query_means = _load(query_mean, q_ids, queries, GROUPS, GROUPS, DOT_G).to(dtype)
                shift = _load(terms, groups, GROUPS, width, CHANNELS, BLOCK_C).to(dtype)
                q = (q + tl.dot(query_means, shift, input_precision=PRECISION)).to(dtype)
            row_max = tl.load(statistics + q_ids, mask=q_ids < queries, other=0.0)
            row_sum = tl.load(statistics + queries + q_ids, mask=q_ids < queries, other=1.0)
            logits = _logits(
                q, k, paths, terms + head, mask + pair * keys, k_ids, keys, heads, scale,
                GROUPS, BLOCK_G, CONTEXTUAL, MASKED, PRECISION,
            )  # fmt: skip
            weight = tl.exp(logits - row_max[:, None]) * (1 / row_sum)[:, None]
            out_tile = _load(out_grad + offset, q_ids, queries, width, CHANNELS, BLOCK_C)
            v_grad += tl.dot(tl.trans(weight.to(dtype)), out_tile, input_precision=PRECISION)
            weight_grad = tl.dot(out_tile, tl.trans(v), input_precision=PRECISION)
            if CONTEXTUAL:
                embed = _load(
                    terms + 3 * GROUPS * width, group_ids, GROUPS, width, CHANNELS, BLOCK_C
                )
                slopes = tl.dot(embed.to(dtype), tl.trans(out_tile), input_precision=PRECISION)
                path_tile = paths.to(tl.float32)
                path_sum = tl.sum(path_tile * weight[None, :, :], 2).to(dtype)
                weight_grad += tl.sum(path_tile * slopes[:, :, None], 0)
                table_sum += tl.dot(path_sum, out_tile, input_precision=PRECISION)
            delta = _delta(
                weight, weight_grad, out + offset, residual + offset, out_tile, q_ids,
                queries, width, CHANNELS, BLOCK_C, HAS_RESIDUAL, SINGLE_BLOCK,
            )  # fmt: skip
            logits_grad = weight * (weight_grad - delta[:, None])
            if not CONTEXTUAL:
                slope_sum += tl.sum(tl.sum(paths.to(tl.float32) * logits_grad[None, :, :], 2), 1)
            product_grad = (logits_grad * scale).to(dtype)
            k_grad += tl.dot(tl.trans(product_grad), q, input_precision=PRECISION)
            q_sum = tl.dot(product_grad, k, input_precision=PRECISION)
            if not SINGLE_BLOCK:
                if key_start > 0:
                    q_sum += _load(query_sum + offset, q_ids, queries, width, CHANNELS, BLOCK_C)
                _store(query_sum + offset, q_sum, q_ids, queries, width, CHANNELS, BLOCK_C)
            if SINGLE_BLOCK or key_start + KEYS >= keys:
                q_grad = q_sum.to(dtype)
                _store(query_grad + offset, q_grad, q_ids, queries, width, CHANNELS, BLOCK_C)
                if CONTEXTUAL:
                    means = tl.trans(query_means)
                    query_terms_sum += tl.dot(means, q_grad, input_precision=PRECISION)
        k_grad, v_grad = k_grad.to(dtype), v_grad.to(dtype)
        key_offset = pair * keys * width + column
        _store(key_grad + key_offset, k_grad, k_ids, keys, width, CHANNELS, BLOCK_C)
        _store(value_grad + key_offset, v_grad, k_ids, keys, width, CHANNELS, BLOCK_C)
        if CONTEXTUAL:
            key_means = tl.trans(key_means)
            k_grad = tl.dot(key_means, k_grad, input_precision=PRECISION)
            v_grad = tl.dot(key_means, v_grad, input_precision=PRECISION)
            key_terms_grad = term_grads + GROUPS * width
            value_terms_grad = key_terms_grad + GROUPS * width
            if key_start > 0:
                k_grad += _load(key_terms_grad, groups, GROUPS, width, CHANNELS, BLOCK_C)
                v_grad += _load(value_terms_grad, groups, GROUPS, width, CHANNELS, BLOCK_C)
            _store(key_terms_grad, k_grad, groups, GROUPS, width, CHANNELS, BLOCK_C)
            _store(value_terms_grad, v_grad, groups, GROUPS, width, CHANNELS, BLOCK_C)
        if not SINGLE_BLOCK:
            # Another thread may add to what a thread has stored.
            tl.debug_barrier()
    if CONTEXTUAL:
        _store(term_grads, query_terms_sum, groups, GROUPS, width, CHANNELS, BLOCK_C)
        _store(
            term_grads + 3 * GROUPS * width, table_sum, group_ids, GROUPS, width, CHANNELS, BLOCK_C
        )
    else:
        term_grads += (pair * GROUPS + group_ids) * heads + head
        tl.store(term_grads, slope_sum, mask=group_ids < GROUPS)


@triton.jit
def path_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, path: tl.tensor, mask: tl.tensor,
    query_mean: tl.tensor, key_mean: tl.tensor, terms: tl.tensor,
    out: tl.tensor, residual: tl.tensor, statistics: tl.tensor,
    out_grad: tl.tensor, path_grad: tl.tensor,
    query_pair: tl.tensor, key_pair: tl.tensor, value_pair: tl.tensor,
    path_pair: tl.tensor, path_query: tl.tensor, path_key: tl.tensor, path_group: tl.tensor,
    readable: tl.tensor, queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, DOT_G: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SINGLE_BLOCK: tl.constexpr, CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of one group's paths, (B, Q, K, G) contiguous: a sum over the heads."""
    # A program owns a block of one pair's paths and computes the weights anew for each head.
    program, key_blocks = tl.program_id(0), tl.cdiv(keys, KEYS)
    group = program % GROUPS
    key_block, block = (program // GROUPS) % key_blocks, program // GROUPS // key_blocks
    first_query = (block % tl.cdiv(queries, QUERIES)) * QUERIES
    q_ids = first_query + tl.arange(0, QUERIES)
    pair = (block // tl.cdiv(queries, QUERIES)).to(tl.int64)
    k_ids = key_block * KEYS + tl.arange(0, KEYS)
    inside = (q_ids[:, None] < queries) & (k_ids[None, :] < keys)
    path += pair * path_pair
    paths = _load_paths(
        path, first_query, k_ids, queries, keys, readable, path_query, path_key, path_group,
        GROUPS, BLOCK_G, QUERIES, KEYS,
    )  # fmt: skip
    width = heads * CHANNELS
    groups, channel = tl.arange(0, DOT_G), tl.arange(0, BLOCK_C)
    dtype = query.dtype.element_ty
    sum_of_heads = tl.zeros((QUERIES, KEYS), tl.float32)
    for head in range(0, heads):
        column = head * CHANNELS
        q = _load(query + pair * query_pair + column, q_ids, queries, width, CHANNELS, BLOCK_C)
        k = _load(key + pair * key_pair + column, k_ids, keys, width, CHANNELS, BLOCK_C)
        if CONTEXTUAL:
            head_terms = terms + column
            shift = _load(head_terms, groups, GROUPS, width, CHANNELS, BLOCK_C).to(dtype)
            mean = query_mean + pair * queries * GROUPS
            mean = _load(mean, q_ids, queries, GROUPS, GROUPS, DOT_G).to(dtype)
            q = (q + tl.dot(mean, shift, input_precision=PRECISION)).to(dtype)
            shift = _load(head_terms + GROUPS * width, groups, GROUPS, width, CHANNELS, BLOCK_C).to(
                dtype
            )
            mean = key_mean + pair * keys * GROUPS
            mean = _load(mean, k_ids, keys, GROUPS, GROUPS, DOT_G).to(dtype)
            k = (k + tl.dot(mean, shift, input_precision=PRECISION)).to(dtype)
        logits = _logits(
            q, k, paths, terms + head, mask + pair * keys, k_ids, keys, heads, scale,
            GROUPS, BLOCK_G, CONTEXTUAL, MASKED, PRECISION,
        )  # fmt: skip
        row = statistics + (pair * heads + head) * 2 * queries + q_ids
        row_max = tl.load(row, mask=q_ids < queries, other=0.0)
        row_sum = tl.load(row + queries, mask=q_ids < queries, other=1.0)
        weight = tl.exp(logits - row_max[:, None]) / row_sum[:, None]
        offset = pair * queries * width + column
        out_tile = _load(out_grad + offset, q_ids, queries, width, CHANNELS, BLOCK_C)
        if CONTEXTUAL:
            embed = terms + (3 * GROUPS + group) * width + column + channel
            embed = tl.load(embed, mask=channel < CHANNELS, other=0.0).to(tl.float32)
            slope = tl.sum(out_tile.to(tl.float32) * embed[None, :], 1)
            sum_of_heads += weight * slope[:, None]
        else:
            v = _load(value + pair * value_pair + column, k_ids, keys, width, CHANNELS, BLOCK_C)
            weight_grad = tl.dot(out_tile, tl.trans(v), input_precision=PRECISION)
            delta = _delta(
                weight, weight_grad, out + offset, residual + offset, out_tile, q_ids,
                queries, width, CHANNELS, BLOCK_C, HAS_RESIDUAL, SINGLE_BLOCK,
            )  # fmt: skip
            weight_grad -= delta[:, None]
            slope = tl.load(terms + group * heads + head).to(tl.float32)
            sum_of_heads += weight * weight_grad * slope
    address = path_grad + (pair * queries + q_ids[:, None]) * keys * GROUPS
    tl.store(address + k_ids[None, :] * GROUPS + group, sum_of_heads, mask=inside)
