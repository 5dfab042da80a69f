"""Triton kernels of ACE-RPE: the windowed path (Eq. 7), and cross-attention with paths.

A path program looks at every source in the window of each (patch, token, group) entry of a block;
forward notes the winning step in one byte, and backward asks every entry around a source whether
that source had won. Without atomics equal inputs give equal gradients. `TRITON_INTERPRET=1`, set
before this module is imported, runs both on a CPU, for tests.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _entries(
    tokens: tl.tensor,
    groups: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
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
    distance: tl.tensor,
    words: tl.tensor,
    path: tl.tensor,
    reachable: tl.tensor,
    winner: tl.tensor,
    distance_pair: tl.tensor,
    distance_patch: tl.tensor,
    distance_token: tl.tensor,
    distance_group: tl.tensor,
    path_pair: tl.tensor,
    path_patch: tl.tensor,
    path_token: tl.tensor,
    path_group: tl.tensor,
    tokens: tl.tensor,
    groups: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TEXT: tl.constexpr,
    PATCH: tl.constexpr,
    METRIC: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS_LAST: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    NOTE_WINNER: tl.constexpr,
) -> None:
    """Write the paths of a block of entries, and the step of the window that won."""
    pair, patch, token, group, inside = _entries(tokens, groups, ROWS, COLUMNS, GROUPS_LAST, BLOCK)
    row, column = patch // COLUMNS, patch % COLUMNS
    target = inside
    if MASKED:
        words += pair * tokens
        target = inside & (tl.load(words + token, mask=inside, other=0) != 0)
    source = distance + pair * distance_pair
    source += patch * distance_patch + token * distance_token + group * distance_group
    best = tl.full((BLOCK,), float("inf"), TYPE)
    won = tl.full((BLOCK,), STEPS, tl.int32)
    side: tl.constexpr = 2 * PATCH + 1
    for along in range(-TEXT, TEXT + 1):
        near = token + along
        steps_along = tl.abs(near - token).to(TYPE)
        real = target & (near >= 0) & (near < tokens)
        if MASKED:
            real = real & (tl.load(words + near, mask=real, other=0) != 0)
        for down in tl.static_range(-PATCH, PATCH + 1):
            line = real & (row + down >= 0) & (row + down < ROWS)
            for right in tl.static_range(-PATCH, PATCH + 1):
                there = line & (column + right >= 0) & (column + right < COLUMNS)
                offset = (down * COLUMNS + right) * distance_patch + along * distance_token
                value = tl.load(source + offset, mask=there, other=float("inf")).to(TYPE)
                value = (value + steps_along) + _length(down, right, METRIC)
                nearer = value < best
                best = tl.where(nearer, value, best)
                if NOTE_WINNER:
                    step = ((along + TEXT) * side + down + PATCH) * side + right + PATCH
                    won = tl.where(nearer, step, won)
    found = best < float("inf")
    place = pair * path_pair + patch * path_patch + token * path_token + group * path_group
    tl.store(path + place, tl.where(found, best, 0.0), mask=inside)
    tl.store(reachable + place, found, mask=inside)
    if NOTE_WINNER:
        tl.store(winner + place, won, mask=inside)


@triton.jit
def path_backward_kernel(
    path_gradient: tl.tensor,
    winner: tl.tensor,
    gradient: tl.tensor,
    path_pair: tl.tensor,
    path_patch: tl.tensor,
    path_token: tl.tensor,
    path_group: tl.tensor,
    gradient_pair: tl.tensor,
    gradient_patch: tl.tensor,
    gradient_token: tl.tensor,
    gradient_group: tl.tensor,
    tokens: tl.tensor,
    groups: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TEXT: tl.constexpr,
    PATCH: tl.constexpr,
    METRIC: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS_LAST: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the gradients of a block of sources, from the entries where they won."""
    pair, patch, token, group, inside = _entries(tokens, groups, ROWS, COLUMNS, GROUPS_LAST, BLOCK)
    row, column = patch // COLUMNS, patch % COLUMNS
    place = pair * gradient_pair
    place += patch * gradient_patch + token * gradient_token + group * gradient_group
    above = path_gradient + pair * path_pair
    above += patch * path_patch + token * path_token + group * path_group
    total = tl.full((BLOCK,), 0.0, TYPE)
    side: tl.constexpr = 2 * PATCH + 1
    for along in range(-TEXT, TEXT + 1):
        real = inside & (token - along >= 0) & (token - along < tokens)
        for down in tl.static_range(-PATCH, PATCH + 1):
            line = real & (row - down >= 0) & (row - down < ROWS)
            for right in tl.static_range(-PATCH, PATCH + 1):
                there = line & (column - right >= 0) & (column - right < COLUMNS)
                back = down * COLUMNS + right
                noted = winner + place - (back * gradient_patch + along * gradient_token)
                won = tl.load(noted, mask=there, other=STEPS).to(tl.int32)
                step = ((along + TEXT) * side + down + PATCH) * side + right + PATCH
                hit = there & (won == step)
                offset = back * path_patch + along * path_token
                total += tl.load(above - offset, mask=hit, other=0.0).to(TYPE)
    tl.store(gradient + place, total, mask=inside)


@triton.jit
def _chosen(role: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor) -> tl.tensor:
    """Return the tensor of a role, by its address."""
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
    """Write a block of one role's S, and for the value its table: (4, G, width)."""
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


HIDDEN = tl.constexpr(-1e38)
"""Added to the logits of masked keys: a row without keys gives a mean, not NaN."""


@triton.jit
def _tile(
    states: tl.tensor, token: tl.tensor, tokens: tl.tensor, width: tl.tensor,
    CHANNELS: tl.constexpr, WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load one head's channels of some tokens, 0 outside: (BLOCK, WIDE)."""
    channel = tl.arange(0, WIDE)
    inside = (token[:, None] < tokens) & (channel[None, :] < CHANNELS)
    return tl.load(states + token[:, None] * width + channel[None, :], mask=inside, other=0.0)


@triton.jit
def _store(
    states: tl.tensor, x: tl.tensor, token: tl.tensor, tokens: tl.tensor, width: tl.tensor,
    CHANNELS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    channel = tl.arange(0, WIDE)
    inside = (token[:, None] < tokens) & (channel[None, :] < CHANNELS)
    tl.store(states + token[:, None] * width + channel[None, :], x, mask=inside)


@triton.jit
def _rest(x: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Return the rounding residual of float32 numbers of any shape."""
    return (x - x.to(kind).to(tl.float32)).to(kind)


@triton.jit
def _level(
    weight: tl.tensor, of_weight: tl.tensor, out: tl.tensor, rest: tl.tensor, of_out: tl.tensor,
    token: tl.tensor, tokens: tl.tensor, width: tl.tensor, CHANNELS: tl.constexpr,
    WIDE: tl.constexpr, HAS_REST: tl.constexpr, ONE_BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the mean gradient of each row's weights, (QUERIES,), over a block with all keys.

    Without all keys it is output times its gradient.
    """
    if ONE_BLOCK:
        level = tl.sum(weight * of_weight, 1)
    else:
        found = _tile(out, token, tokens, width, CHANNELS, WIDE).to(tl.float32)
        if HAS_REST:
            found += _tile(rest, token, tokens, width, CHANNELS, WIDE).to(tl.float32)
        level = tl.sum(of_out.to(tl.float32) * found, 1)
    return level


@triton.jit
def _paths(
    path: tl.tensor, first: tl.tensor, answering: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    room: tl.tensor, path_query: tl.tensor, path_key: tl.tensor, path_group: tl.tensor,
    GROUPS: tl.constexpr, EACH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load the paths of a block in all groups, 0 outside: (EACH, QUERIES, KEYS).

    Wide loads of keys side by side may pass the last key, up to `room`. In this order of rows a
    thread holds all groups of its keys.
    """
    row = tl.arange(0, EACH * QUERIES)[:, None]
    asking, group, answering = first + row % QUERIES, row // QUERIES, answering[None, :]
    inside = (group < GROUPS) & (asking < queries) & (answering < room)
    here = group * path_group + asking * path_query + answering * path_key
    found = tl.load(path + here, mask=inside, other=0.0)
    return tl.where(answering < keys, found, 0.0).reshape(EACH, QUERIES, KEYS)


@triton.jit
def _logits(
    query: tl.tensor, key: tl.tensor, paths: tl.tensor, slopes: tl.tensor, mask: tl.tensor,
    asking: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, EACH: tl.constexpr, CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return scaled logits of a block with mask and the bias of Eq. 9 (this head's `slopes`)."""
    logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if not CONTEXTUAL:
        group = tl.arange(0, EACH)[:, None, None]
        slope = tl.load(slopes + group * heads, mask=group < GROUPS, other=0.0).to(tl.float32)
        logits += tl.sum(paths.to(tl.float32) * slope, 0)
    if MASKED:
        real = tl.load(mask + asking, mask=asking < keys, other=0)
        logits += tl.where(real != 0, 0.0, HIDDEN)[None, :]
    return tl.where(asking[None, :] < keys, logits, float("-inf"))


@triton.jit
def forward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, path: tl.tensor, mask: tl.tensor,
    query_mean: tl.tensor, key_mean: tl.tensor, terms: tl.tensor,
    out: tl.tensor, rest: tl.tensor, rows: tl.tensor,
    query_pair: tl.tensor, key_pair: tl.tensor, value_pair: tl.tensor,
    path_pair: tl.tensor, path_query: tl.tensor, path_key: tl.tensor, path_group: tl.tensor,
    room: tl.tensor, queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, EACH: tl.constexpr, MANY: tl.constexpr, CHANNELS: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_REST: tl.constexpr,
    CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Write the output (B, Q, width), and each row's largest logit and sum of exponentials.

    With `HAS_REST`, write the output's rounding error, too, and sum with unrounded weights.
    """
    head = tl.program_id(0) % heads
    block = (tl.program_id(0) // heads) % tl.cdiv(queries, QUERIES)
    pair = (tl.program_id(0) // heads // tl.cdiv(queries, QUERIES)).to(tl.int64)
    width = heads * CHANNELS
    column = head * CHANNELS
    asks = block * QUERIES + tl.arange(0, QUERIES)
    groups = tl.arange(0, MANY)
    key += pair * key_pair + column
    value += pair * value_pair + column
    path += pair * path_pair
    asked = _tile(query + pair * query_pair + column, asks, queries, width, CHANNELS, WIDE)
    kind = asked.dtype
    if CONTEXTUAL:
        query_mean += pair * queries * GROUPS
        key_mean += pair * keys * GROUPS
        terms += column
        shift = _tile(terms, groups, GROUPS, width, CHANNELS, WIDE).to(kind)
        query_means = _tile(query_mean, asks, queries, GROUPS, GROUPS, MANY).to(kind)
        asked = (asked + tl.dot(query_means, shift, input_precision=PRECISION)).to(kind)
        terms += GROUPS * width
        of_keys = _tile(terms, groups, GROUPS, width, CHANNELS, WIDE).to(kind)
        terms += GROUPS * width
        of_values = _tile(terms, groups, GROUPS, width, CHANNELS, WIDE).to(kind)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    gathered = tl.zeros((QUERIES, WIDE), tl.float32)
    along = tl.zeros((EACH, QUERIES), tl.float32)  # sum_j a_ij P_ij
    for start in range(0, keys, KEYS):
        answers = start + tl.arange(0, KEYS)
        k = _tile(key, answers, keys, width, CHANNELS, WIDE)
        v = _tile(value, answers, keys, width, CHANNELS, WIDE)
        if CONTEXTUAL:
            key_means = _tile(key_mean, answers, keys, GROUPS, GROUPS, MANY).to(kind)
            k = (k + tl.dot(key_means, of_keys, input_precision=PRECISION)).to(kind)
            v = (v + tl.dot(key_means, of_values, input_precision=PRECISION)).to(kind)
        paths = _paths(
            path, block * QUERIES, answers, queries, keys, room, path_query, path_key, path_group,
            GROUPS, EACH, QUERIES, KEYS,
        )  # fmt: skip
        logits = _logits(
            asked, k, paths, terms + head, mask + pair * keys, answers, keys, heads, scale,
            GROUPS, EACH, CONTEXTUAL, MASKED, PRECISION,
        )  # fmt: skip
        above = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp(largest - above)
        weight = tl.exp(logits - above[:, None])
        largest = above
        total = total * shrink + tl.sum(weight, 1)
        gathered *= shrink[:, None]
        gathered += tl.dot(weight.to(kind), v, input_precision=PRECISION)
        if HAS_REST:
            gathered += tl.dot(_rest(weight, kind), v, input_precision=PRECISION)
        if CONTEXTUAL:
            along *= shrink[None, :]
            along += tl.sum(paths.to(tl.float32) * weight[None, :, :], 2)
    gathered /= total[:, None]
    if CONTEXTUAL:
        along /= total[None, :]
        embed = _tile(terms + GROUPS * width, groups, GROUPS, width, CHANNELS, WIDE).to(kind)
        if MANY > EACH:  # a product adds up over at least 16
            none = tl.zeros((EACH, QUERIES), tl.float32)
            along = tl.join(along, none).trans(2, 0, 1).reshape(MANY, QUERIES)
        gathered += tl.dot(tl.trans(along).to(kind), embed, input_precision=PRECISION)
        if HAS_REST:
            gathered += tl.dot(tl.trans(_rest(along, kind)), embed, input_precision=PRECISION)
    place = pair * queries * width + column
    _store(out + place, gathered.to(kind), asks, queries, width, CHANNELS, WIDE)
    if HAS_REST:
        _store(rest + place, _rest(gathered, kind), asks, queries, width, CHANNELS, WIDE)
    rows += (pair * heads + head) * 2 * queries + asks
    tl.store(rows, largest, mask=asks < queries)
    tl.store(rows + queries, total, mask=asks < queries)


@triton.jit
def backward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, path: tl.tensor, mask: tl.tensor,
    query_mean: tl.tensor, key_mean: tl.tensor, terms: tl.tensor,
    out: tl.tensor, rest: tl.tensor, rows: tl.tensor, above: tl.tensor,
    query_gradient: tl.tensor, key_gradient: tl.tensor, value_gradient: tl.tensor,
    query_sum: tl.tensor, shares: tl.tensor,
    query_pair: tl.tensor, key_pair: tl.tensor, value_pair: tl.tensor,
    path_pair: tl.tensor, path_query: tl.tensor, path_key: tl.tensor, path_group: tl.tensor,
    room: tl.tensor, queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, EACH: tl.constexpr, MANY: tl.constexpr, CHANNELS: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_REST: tl.constexpr,
    ONE_BLOCK: tl.constexpr, CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of the states, and each pair's share in that of the terms.

    `above` is the gradient of the output, `shares` is (B, 4, G, width) or (B, G, heads).
    Where the keys fill several blocks, the gradient of the queries adds up in `query_sum`, float32,
    which this program alone touches.
    """
    head = tl.program_id(0) % heads
    pair = (tl.program_id(0) // heads).to(tl.int64)
    width = heads * CHANNELS
    column = head * CHANNELS
    groups, each = tl.arange(0, MANY), tl.arange(0, EACH)
    query += pair * query_pair + column
    key += pair * key_pair + column
    value += pair * value_pair + column
    path += pair * path_pair
    place = pair * queries * width + column
    rows += (pair * heads + head) * 2 * queries
    kind = query.dtype.element_ty
    if CONTEXTUAL:
        query_mean += pair * queries * GROUPS
        key_mean += pair * keys * GROUPS
        terms += column
        query_share = tl.zeros((MANY, WIDE), tl.float32)
        shares += pair * 4 * GROUPS * width + column
        table_share = tl.zeros((EACH, WIDE), tl.float32)
    else:
        slope_share = tl.zeros((EACH,), tl.float32)
    for key_start in tl.range(0, keys, KEYS, disable_licm=True):
        answers = key_start + tl.arange(0, KEYS)
        k = _tile(key, answers, keys, width, CHANNELS, WIDE)
        v = _tile(value, answers, keys, width, CHANNELS, WIDE)
        if CONTEXTUAL:
            key_means = _tile(key_mean, answers, keys, GROUPS, GROUPS, MANY).to(kind)
            own = terms + GROUPS * width  # read when needed: there are few registers to spare
            shift = _tile(own, groups, GROUPS, width, CHANNELS, WIDE).to(kind)
            k = (k + tl.dot(key_means, shift, input_precision=PRECISION)).to(kind)
            shift = _tile(own + GROUPS * width, groups, GROUPS, width, CHANNELS, WIDE).to(kind)
            v = (v + tl.dot(key_means, shift, input_precision=PRECISION)).to(kind)
        of_k = tl.zeros((KEYS, WIDE), tl.float32)
        of_v = tl.zeros((KEYS, WIDE), tl.float32)
        for start in tl.range(0, queries, QUERIES, disable_licm=True):
            asks = start + tl.arange(0, QUERIES)
            paths = _paths(
                path, start, answers, queries, keys, room, path_query, path_key, path_group,
                GROUPS, EACH, QUERIES, KEYS,
            )  # fmt: skip
            q = _tile(query, asks, queries, width, CHANNELS, WIDE)
            if CONTEXTUAL:
                query_means = _tile(query_mean, asks, queries, GROUPS, GROUPS, MANY).to(kind)
                shift = _tile(terms, groups, GROUPS, width, CHANNELS, WIDE).to(kind)
                q = (q + tl.dot(query_means, shift, input_precision=PRECISION)).to(kind)
            largest = tl.load(rows + asks, mask=asks < queries, other=0.0)
            total = tl.load(rows + queries + asks, mask=asks < queries, other=1.0)
            logits = _logits(
                q, k, paths, terms + head, mask + pair * keys, answers, keys, heads, scale,
                GROUPS, EACH, CONTEXTUAL, MASKED, PRECISION,
            )  # fmt: skip
            weight = tl.exp(logits - largest[:, None]) * (1 / total)[:, None]
            of_out = _tile(above + place, asks, queries, width, CHANNELS, WIDE)
            of_v += tl.dot(tl.trans(weight.to(kind)), of_out, input_precision=PRECISION)
            of_weight = tl.dot(of_out, tl.trans(v), input_precision=PRECISION)
            if CONTEXTUAL:
                embed = _tile(terms + 3 * GROUPS * width, each, GROUPS, width, CHANNELS, WIDE)
                slopes = tl.dot(embed.to(kind), tl.trans(of_out), input_precision=PRECISION)
                steps = paths.to(tl.float32)
                along = tl.sum(steps * weight[None, :, :], 2).to(kind)
                of_weight += tl.sum(steps * slopes[:, :, None], 0)
                table_share += tl.dot(along, of_out, input_precision=PRECISION)
            level = _level(
                weight, of_weight, out + place, rest + place, of_out, asks, queries, width,
                CHANNELS, WIDE, HAS_REST, ONE_BLOCK,
            )  # fmt: skip
            of_logits = weight * (of_weight - level[:, None])
            if not CONTEXTUAL:
                slope_share += tl.sum(tl.sum(paths.to(tl.float32) * of_logits[None, :, :], 2), 1)
            of_products = (of_logits * scale).to(kind)
            of_k += tl.dot(tl.trans(of_products), q, input_precision=PRECISION)
            of_q = tl.dot(of_products, k, input_precision=PRECISION)
            if not ONE_BLOCK:
                if key_start > 0:
                    of_q += _tile(query_sum + place, asks, queries, width, CHANNELS, WIDE)
                _store(query_sum + place, of_q, asks, queries, width, CHANNELS, WIDE)
            if ONE_BLOCK or key_start + KEYS >= keys:
                of_query = of_q.to(kind)
                _store(query_gradient + place, of_query, asks, queries, width, CHANNELS, WIDE)
                if CONTEXTUAL:
                    means = tl.trans(query_means)
                    query_share += tl.dot(means, of_query, input_precision=PRECISION)
        of_k, of_v = of_k.to(kind), of_v.to(kind)
        into = pair * keys * width + column
        _store(key_gradient + into, of_k, answers, keys, width, CHANNELS, WIDE)
        _store(value_gradient + into, of_v, answers, keys, width, CHANNELS, WIDE)
        if CONTEXTUAL:
            key_means = tl.trans(key_means)
            of_k = tl.dot(key_means, of_k, input_precision=PRECISION)
            of_v = tl.dot(key_means, of_v, input_precision=PRECISION)
            of_keys = shares + GROUPS * width
            of_values = of_keys + GROUPS * width
            if key_start > 0:
                of_k += _tile(of_keys, groups, GROUPS, width, CHANNELS, WIDE)
                of_v += _tile(of_values, groups, GROUPS, width, CHANNELS, WIDE)
            _store(of_keys, of_k, groups, GROUPS, width, CHANNELS, WIDE)
            _store(of_values, of_v, groups, GROUPS, width, CHANNELS, WIDE)
        if not ONE_BLOCK:
            tl.debug_barrier()  # what one thread has stored, another may add to
    if CONTEXTUAL:
        _store(shares, query_share, groups, GROUPS, width, CHANNELS, WIDE)
        _store(shares + 3 * GROUPS * width, table_share, each, GROUPS, width, CHANNELS, WIDE)
    else:
        shares += (pair * GROUPS + each) * heads + head
        tl.store(shares, slope_share, mask=each < GROUPS)


@triton.jit
def path_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, path: tl.tensor, mask: tl.tensor,
    query_mean: tl.tensor, key_mean: tl.tensor, terms: tl.tensor,
    out: tl.tensor, rest: tl.tensor, rows: tl.tensor, above: tl.tensor, path_gradient: tl.tensor,
    query_pair: tl.tensor, key_pair: tl.tensor, value_pair: tl.tensor,
    path_pair: tl.tensor, path_query: tl.tensor, path_key: tl.tensor, path_group: tl.tensor,
    room: tl.tensor, queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, EACH: tl.constexpr, MANY: tl.constexpr, CHANNELS: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_REST: tl.constexpr,
    ONE_BLOCK: tl.constexpr, CONTEXTUAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of one group's paths, (B, Q, K, G) contiguous: a sum over the heads.

    A program owns a block of one pair's paths and computes the weights anew for each head.
    """
    program, key_blocks = tl.program_id(0), tl.cdiv(keys, KEYS)
    group = program % GROUPS
    key_block, block = (program // GROUPS) % key_blocks, program // GROUPS // key_blocks
    first = (block % tl.cdiv(queries, QUERIES)) * QUERIES
    asks = first + tl.arange(0, QUERIES)
    pair = (block // tl.cdiv(queries, QUERIES)).to(tl.int64)
    answers = key_block * KEYS + tl.arange(0, KEYS)
    inside = (asks[:, None] < queries) & (answers[None, :] < keys)
    path += pair * path_pair
    paths = _paths(
        path, first, answers, queries, keys, room, path_query, path_key, path_group,
        GROUPS, EACH, QUERIES, KEYS,
    )  # fmt: skip
    width = heads * CHANNELS
    groups, channel = tl.arange(0, MANY), tl.arange(0, WIDE)
    kind = query.dtype.element_ty
    sum_of_heads = tl.zeros((QUERIES, KEYS), tl.float32)
    for head in range(0, heads):
        column = head * CHANNELS
        q = _tile(query + pair * query_pair + column, asks, queries, width, CHANNELS, WIDE)
        k = _tile(key + pair * key_pair + column, answers, keys, width, CHANNELS, WIDE)
        if CONTEXTUAL:
            own = terms + column
            shift = _tile(own, groups, GROUPS, width, CHANNELS, WIDE).to(kind)
            mean = query_mean + pair * queries * GROUPS
            mean = _tile(mean, asks, queries, GROUPS, GROUPS, MANY).to(kind)
            q = (q + tl.dot(mean, shift, input_precision=PRECISION)).to(kind)
            shift = _tile(own + GROUPS * width, groups, GROUPS, width, CHANNELS, WIDE).to(kind)
            mean = key_mean + pair * keys * GROUPS
            mean = _tile(mean, answers, keys, GROUPS, GROUPS, MANY).to(kind)
            k = (k + tl.dot(mean, shift, input_precision=PRECISION)).to(kind)
        logits = _logits(
            q, k, paths, terms + head, mask + pair * keys, answers, keys, heads, scale,
            GROUPS, EACH, CONTEXTUAL, MASKED, PRECISION,
        )  # fmt: skip
        row = rows + (pair * heads + head) * 2 * queries + asks
        largest = tl.load(row, mask=asks < queries, other=0.0)
        total = tl.load(row + queries, mask=asks < queries, other=1.0)
        weight = tl.exp(logits - largest[:, None]) / total[:, None]
        place = pair * queries * width + column
        of_out = _tile(above + place, asks, queries, width, CHANNELS, WIDE)
        if CONTEXTUAL:
            embed = terms + (3 * GROUPS + group) * width + column + channel
            embed = tl.load(embed, mask=channel < CHANNELS, other=0.0).to(tl.float32)
            slope = tl.sum(of_out.to(tl.float32) * embed[None, :], 1)
            sum_of_heads += weight * slope[:, None]
        else:
            v = _tile(value + pair * value_pair + column, answers, keys, width, CHANNELS, WIDE)
            of_weight = tl.dot(of_out, tl.trans(v), input_precision=PRECISION)
            level = _level(
                weight, of_weight, out + place, rest + place, of_out, asks, queries, width,
                CHANNELS, WIDE, HAS_REST, ONE_BLOCK,
            )  # fmt: skip
            of_weight -= level[:, None]
            slope = tl.load(terms + group * heads + head).to(tl.float32)
            sum_of_heads += weight * of_weight * slope
    into = path_gradient + (pair * queries + asks[:, None]) * keys * GROUPS
    tl.store(into + answers[None, :] * GROUPS + group, sum_of_heads, mask=inside)
