"""The kernels of the windowed anchor path (Eq. 7): one forward and one backward.

A program finds the paths of a block of (patch, token, group) entries of one pair. It looks at every
source in the window of each entry; neighbours share most of them, so they come from the cache and
global memory is read and written once. Forward notes which step of the window won, in one byte;
backward asks every entry around a source whether that source had won there. No atomics: equal
inputs give equal gradients. `TRITON_INTERPRET=1`, set before this module is imported, runs both on
a CPU, for tests. `vlp.positions.windowed_path` launches them.
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
    """Pair, patch, token and group of this program's entries, in the order of memory."""
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
    """Distance between patches, in patches; evaluated while a kernel is compiled."""
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
    """Paths of a block of entries, and which step of the window won."""
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
    """Gradients of a block of sources, from the entries where they won."""
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
