"""CoPE, contextual position encoding: positions counted by gates (Golovneva et al. 2024).

Equation numbers are the SaPE paper's, which repeats CoPE as Eqs 7, 8 and 11.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.positions.base import PositionContext, PositionEncoding
from vlp.positions.coordinates import resolve_length
from vlp.positions.options import head_width
from vlp.precision import full_precision


def cope_bias(
    query: Tensor,
    key: Tensor,
    table: Tensor,
    causal: bool = True,
    *,
    gate_scale: float = 1.0,
    bias_scale: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the bias q_i . e(p_ij) of scaled logits, (..., T, T) in the query's dtype.

    The position of key j for query i is p_ij, the sum over t = j..i of sigmoid(q_i . k_t), or with
    `causal` False over t = j..T-1 (Eqs 7, 8, 11; papers.md#sape-s1 to #sape-s4). Half precision is
    computed in float32, also under autocast.

    Args:
        query, key: (..., T, d).
        table: (P, d), the vectors e of positions 0 .. P-1, or (heads, P, d); positions beyond share
            the last row (papers.md#sape-s11). T + 1 rows suffice for every position.
        causal: keys after the query are not counted and have bias 0; the caller masks them.
        gate_scale: factor of q . k inside the gate; 1 as printed, d^-0.5 as in the authors'
            training code (papers.md#sape-s1).
        bias_scale: factor of the bias; 1 as in the paper's listing, d^-0.5 as in the authors'
            training code (papers.md#sape-s3).
        mask: (..., T) bool, True = counted; None counts all keys.
    """
    require_shapes("CoPE", query, key, table)
    with torch.autocast(query.device.type, enabled=False):
        full_query, full_key, table = full_precision(query, key, table)
        gates = gate(full_query, full_key, gate_scale)
        if mask is not None:
            gates = gates * mask.unsqueeze(-2)
        if causal:
            gates = gates.tril()
        positions = count_from_end(gates)
        bias = bias_scale * interpolate(full_query @ table.transpose(-2, -1), positions)
        return (bias.tril() if causal else bias).to(query.dtype)


class ContextualPosition(PositionEncoding):
    """`cope`: contextual position encoding of one self-attention layer (Golovneva et al. 2024).

    Tokens after the prefix are a sequence; patches are in raster order, as in the CoPE baseline of
    SaPE. Prefix tokens are not counted, and their pairs have bias 0. Any grid and length works;
    positions beyond the table share its last row (papers.md#sape-s11). Without `causal` the padding
    of a text is counted like words.

    Args:
        width, heads: channels and attention heads of the layer.
        length: the longest sequence with distinct positions; the table has length + 1 rows
            (papers.md#sape-s2). None: rows * columns of `grid`.
        grid: (rows, columns) of the patches.
        causal: see `cope_bias`; False for images and BERT.
        shared_heads: one table for all heads, as in the authors' code (papers.md#sape-s10).
        gate_scale, bias_scale: see `cope_bias`.
    """

    NO_WEIGHT_DECAY = ("table",)
    causal = True

    def __init__(
        self,
        width: int,
        heads: int,
        length: int | None = None,
        grid: tuple[int, int] | None = None,
        causal: bool = False,
        shared_heads: bool = True,
        gate_scale: float = 1.0,
        bias_scale: float = 1.0,
    ) -> None:
        super().__init__()
        channels = head_width("cope", width, heads)
        self.causal, self.gate_scale, self.bias_scale = causal, gate_scale, bias_scale
        rows = 1 if shared_heads else heads
        # Zero as in the authors' code: the layer's function is unchanged.
        positions = resolve_length("cope", length, grid) + 1
        self.table = nn.Parameter(torch.zeros(rows, positions, channels))

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        """Return `cope_bias` of the tokens after the prefix, 0 for the prefix: (B, heads, T, T)."""
        prefix, tokens = context.prefix_tokens, query.shape[-2]
        if key.shape[-2] != tokens or tokens < prefix:
            raise ValueError(
                f"cope needs queries and keys of the same tokens, not {tokens} queries and "
                f"{key.shape[-2]} keys with {prefix} prefix tokens"
            )
        # Padding of images is not counted.
        mask = None
        if context.grids is not None:
            patches = torch.arange(tokens - prefix, device=query.device)
            mask = patches < context.grids.to(query.device).prod(-1)[:, None, None]
        out = cope_bias(
            query[..., prefix:, :],
            key[..., prefix:, :],
            self.table,
            self.causal,
            gate_scale=self.gate_scale,
            bias_scale=self.bias_scale,
            mask=mask,
        )
        return functional.pad(out, (prefix, 0, prefix, 0))


def gate(query: Tensor, key: Tensor, scale: float = 1.0) -> Tensor:
    """Return sigmoid(scale q . k) of queries and keys (..., T, d), (..., T, T) (Eqs 7, 9)."""
    return torch.sigmoid((scale * query) @ key.transpose(-2, -1))


def count_from_end(gates: Tensor) -> Tensor:
    """Sum the gates from each key, inclusive, to the end of its row: a reversed cumulative sum."""
    return gates.flip(-1).cumsum(-1).flip(-1)


def interpolate(values: Tensor, positions: Tensor) -> Tensor:
    """Interpolate values linearly between whole positions (Eqs 11, 14; papers.md#sape-s11).

    `values` (..., T, P) are at the positions 0 .. P-1; `positions` (..., T, N) are at least 0, and
    beyond P-1 have the last value.
    """
    last = values.shape[-1] - 1
    shape = torch.broadcast_shapes(values.shape[:-1], positions.shape[:-1])
    values = values.expand(*shape, -1)
    positions = positions.expand(*shape, -1)
    # Clamped at 0, too: `long` of NaN is no index of the table.
    lower = positions.long().clamp(0, last)
    # The slope beyond the last position is 0.
    slopes = functional.pad(values.diff(dim=-1), (0, 1))
    return values.gather(-1, lower) + (positions - lower) * slopes.gather(-1, lower)


def require_shapes(name: str, query: Tensor, key: Tensor, *tables: Tensor) -> None:
    """Raise ValueError unless queries and keys are (..., tokens, d) and tables (rows, d)."""
    same_shape = query.shape == key.shape and query.ndim >= 2
    if not same_shape or any(
        table.ndim < 2 or table.shape[-2] < 1 or table.shape[-1] != query.shape[-1]
        for table in tables
    ):
        shapes = ", ".join(str(tuple(table.shape)) for table in tables)
        raise ValueError(
            f"{name} takes queries and keys (..., tokens, d) and tables (rows, d), not "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {shapes}"
        )
