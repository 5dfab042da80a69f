"""SaPE, the 2D semantic-aware position encoding; no available source has its equations.

This reconstruction (papers.md#sape-s5 to #sape-s9, #sape-s12, #sape-s13) builds on CoPE
(`cope.py`): each patch gets a vector of the positions in its row, and another of those in its
column; patches with different vectors attend less to each other.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.positions.base import PositionContext, PositionEncoding
from vlp.positions.coordinates import require_grid_tokens, require_patches
from vlp.positions.cope import cope_bias, count_from_end, gate, interpolate, require_shapes
from vlp.positions.options import head_width, require_choice
from vlp.precision import full_precision

Mode = Literal["key", "query"]
Summation = Literal["between", "suffix"]

__all__ = ["SemanticPosition", "cope_bias", "pair_distance", "sape_bias"]


def sape_bias(
    query: Tensor,
    key: Tensor,
    grid: tuple[int, int],
    table_x: Tensor,
    table_y: Tensor,
    mode: Mode = "key",
    *,
    gate_scale: float = 1.0,
    bias_scale: float = 1.0,
    summation: Summation = "between",
) -> Tensor:
    """Return the bias b^x_ij + b^y_ij of scaled logits (SaPE Eqs 9-16), as reconstructed here.

    - Gate g_ij = sigmoid(q_i . k_j) of patches in the same row or column (Eq. 9), in both modes
      (papers.md#sape-s7), without scale (papers.md#sape-s1).
    - Position p_ij (Eq. 10): the sum of the gates from i to j, both included, so that gates of 1
      give |i - j| + 1 (papers.md#sape-s5).
    - Vector z_i (Eqs 12-14): entry t is q_i . e(p_it) for patch t of the row (x) or column (y); e
      interpolates `table_x` or `table_y` (papers.md#sape-s6). Mode "key" has k_i in place of q_i
      here (papers.md#sape-s7).
    - Bias (Eq. 15): minus the Euclidean distance of z_i and z_j (papers.md#sape-s8), for any two
      patches, however far apart.
    - Eq. 16 adds both axes outside 1/sqrt(d) (papers.md#sape-s9).

    Half precision is computed in float32, also under autocast. Equal vectors have bias 0 with
    gradient 0.

    Args:
        query, key: (..., rows * columns, d), of patches without a prefix (papers.md#sape-s12).
        grid: (rows, columns).
        table_x: (P, d), vectors of the positions 0 .. P-1 along rows, or (heads, P, d); positions
            beyond share the last row (papers.md#sape-s11). columns + 1 rows suffice for all.
        table_y: (P, d) or (heads, P, d) along columns; P may differ from that of `table_x`.
        mode: "key" or "query". For both, add both biases (papers.md#sape-s13).
        gate_scale, bias_scale: factors of q . k inside the gate, and of the bias.
        summation: of gates: "between", as above, or "suffix", from j to the end of the line as in
            CoPE's listing.

    Returns:
        (..., T, T) in the dtype of `query`, not positive, symmetric, 0 on the diagonal.
    """
    require_choice("SaPE mode", mode, get_args(Mode))
    require_choice("SaPE summation", summation, get_args(Summation))
    require_shapes("SaPE", query, key, table_x, table_y)
    rows, columns = grid
    if min(rows, columns) < 1 or query.shape[-2] != rows * columns:
        raise ValueError(
            f"SaPE: a grid of {rows} x {columns} patches does not fit {query.shape[-2]} tokens"
        )
    with torch.autocast(query.device.type, enabled=False):
        full_query, full_key, table_x, table_y = full_precision(query, key, table_x, table_y)
        vector_states = full_key if mode == "key" else full_query
        distances = []
        for table, vertical in ((table_x, False), (table_y, True)):
            line_queries = _lines(full_query, rows, columns, vertical)
            line_keys = _lines(full_key, rows, columns, vertical)
            positions = _positions(gate(line_queries, line_keys, gate_scale), summation)
            products = vector_states @ table.transpose(-2, -1)  # Eq. 13, at whole positions
            vectors = interpolate(_lines(products, rows, columns, vertical), positions)
            distances.append(pair_distance(_tokens(vectors, vertical)))
        return (-bias_scale * (distances[0] + distances[1])).to(query.dtype)


class SemanticPosition(PositionEncoding):
    """`sape`: semantic-aware position encoding of one self-attention layer, see `sape_bias`.

    Any grid works; positions beyond the table share its last row (papers.md#sape-s11). Distances
    grow with the square root of a line's length. Prefix tokens are not counted, and their pairs
    have bias 0, the largest value (papers.md#sape-s12). Attached to a trained model it changes the
    model's function, the less the smaller `deviation` is.

    Args:
        width, heads: channels and attention heads of the layer.
        grid: (rows, columns) of the trained grid, and where the context has no grid; `table_x` has
            columns + 1 rows, `table_y` has rows + 1.
        mode: "key", best in the paper's Table 2, "query", or "both", the sum of both biases with
            separate tables (papers.md#sape-s13).
        shared_heads: the same two tables for all heads (papers.md#sape-s10).
        deviation: standard deviation of the initial tables.
        gate_scale, bias_scale, summation: see `sape_bias`.
    """

    NO_WEIGHT_DECAY = ("tables_x", "tables_y")

    def __init__(
        self,
        width: int,
        heads: int,
        grid: tuple[int, int],
        mode: Literal["key", "query", "both"] = "key",
        shared_heads: bool = True,
        deviation: float = 0.02,
        gate_scale: float = 1.0,
        bias_scale: float = 1.0,
        summation: Summation = "between",
    ) -> None:
        super().__init__()
        channels = head_width("sape", width, heads)
        require_patches("sape", grid)
        # Small and random: the gradient of a distance of 0 is 0, so equal rows would never move.
        if not deviation > 0:
            raise ValueError(f"sape: the deviation must be positive, not {deviation}")
        require_choice("SaPE mode", mode, (*get_args(Mode), "both"))
        require_choice("SaPE summation", summation, get_args(Summation))
        self.grid, self.summation = grid, summation
        self.gate_scale, self.bias_scale = gate_scale, bias_scale
        modes: tuple[Mode, ...] = ("key", "query") if mode == "both" else (mode,)
        self.modes = modes

        def create_tables(length: int) -> nn.ParameterDict:
            shape = 1 if shared_heads else heads, length + 1, channels
            return nn.ParameterDict(
                {mode: nn.Parameter(torch.randn(shape) * deviation) for mode in modes}
            )

        self.tables_x, self.tables_y = create_tables(grid[1]), create_tables(grid[0])

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        """Sum `sape_bias` over the modes, 0 for the prefix: (B, heads, T, T)."""
        grid = require_grid_tokens("sape", context, self.grid, query.shape[-2], key.shape[-2])
        prefix = context.prefix_tokens
        queries, keys = full_precision(query[..., prefix:, :], key[..., prefix:, :])
        terms = [
            sape_bias(
                queries,
                keys,
                grid,
                self.tables_x[mode],
                self.tables_y[mode],
                mode,
                gate_scale=self.gate_scale,
                bias_scale=self.bias_scale,
                summation=self.summation,
            )
            for mode in self.modes
        ]
        total = reduce(torch.add, terms)
        return functional.pad(total.to(query.dtype), (prefix, 0, prefix, 0))


def pair_distance(vectors: Tensor) -> Tensor:
    """Return the Euclidean distance of every pair (SaPE Eq. 15): (..., T, n) -> (..., T, T).

    The gradient of a distance of 0 is 0.
    """
    # From differences: |a|^2 + |b|^2 - 2 a.b is off by |a| sqrt(epsilon) near 0, 2e-3 in float32,
    # and not 0 for equal vectors.
    return _PairDistance.apply(vectors)


class _PairDistance(torch.autograd.Function):
    """`pair_distance`; saves vectors and distances, where autograd would save (T, T, n)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(vectors: Tensor) -> Tensor:
        # ONNX has no cdist.
        if vectors.device.type == "cpu" and not torch.compiler.is_exporting():
            return torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
        return _distance_by_entry(vectors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        vectors, distance = ctx.saved_tensors
        is_positive = distance > 0
        # With w = gradient / distance, and w + w^T for both ends of a pair, the gradient at i is
        # sum_j w_ij (z_i - z_j).
        weight = torch.where(is_positive, gradient / torch.where(is_positive, distance, 1), 0)
        # As a matrix product it loses digits where distances are small: it is computed in float64,
        # except on MPS, which has neither float64 nor TF32.
        z = vectors.float() if vectors.device.type == "mps" else vectors.double()
        weight = weight.to(z.dtype)
        weight = weight + weight.transpose(-2, -1)
        return (weight.sum(-1, keepdim=True) * z - weight @ z).to(vectors.dtype)


def _distance_by_entry(vectors: Tensor) -> Tensor:
    # For GPUs, where cdist runs a block of threads for every pair.
    squared = vectors.new_zeros(*vectors.shape[:-1], vectors.shape[-2])
    for entry in vectors.unbind(-1):
        difference = entry[..., :, None] - entry[..., None, :]
        squared = torch.addcmul(squared, difference, difference)
    return squared.sqrt()


def _positions(gates: Tensor, summation: Summation) -> Tensor:
    """Return p_ij along a line from its gates, (..., n, n) (Eq. 10, papers.md#sape-s5)."""
    if summation == "suffix":
        return count_from_end(gates)
    # Sums in both directions, as a difference of two cumulative sums would lose digits.
    ahead = gates.triu().cumsum(-1)
    behind = count_from_end(gates.tril())
    return ahead + behind.tril(-1)


def _lines(x: Tensor, rows: int, columns: int, vertical: bool) -> Tensor:
    """Group patches by row, (..., rows, columns, d), or by column, (..., columns, rows, d)."""
    lines = x.unflatten(-2, (rows, columns))
    return lines.transpose(-3, -2) if vertical else lines


def _tokens(lines: Tensor, vertical: bool) -> Tensor:
    return (lines.transpose(-3, -2) if vertical else lines).flatten(-3, -2)
