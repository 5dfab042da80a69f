"""ACE-RPE as an encoding: paths embedded by linearity into one cross-attention layer (Eqs 8-12)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.positions.anchor_attention import anchor_attention, contextual_terms
from vlp.positions.anchor_field import AnchorPaths
from vlp.positions.base import PositionContext, PositionEncoding
from vlp.positions.options import head_width, require_choice


class AnchorPosition(PositionEncoding):
    """Anchor-based cross-modal relative position embedding of one layer.

    In contextual mode each role (query, key, value) has a table W of shape (groups, width)
    (papers.md#ace-a23); values use theirs for both terms of Eq. 12 (papers.md#ace-a22, #ace-a32).
    In bias mode (Eq. 9) a table W and a vector W_E per head give the bias P (W W_E) / sqrt(head
    width) (papers.md#ace-a18). Tables start at zero, at which the layer's function is unchanged.

    Args:
        width: channels of the layer.
        heads: attention heads.
        groups: G, the channel groups of Eq. 3.
        roles: which of query, key, value have positions (contextual mode).
        mode: "contextual" or "bias".
        shared_heads: one table of head width, and one W_E, for all heads (papers.md#ace-a24);
            otherwise each head has a block of columns of W.
        scale: factor of the path before it is embedded (papers.md#ace-a16).
        value_pooled: whether mean(E) is added to the values, too, as in Eq. 12 (papers.md#ace-a22).
    """

    NO_WEIGHT_DECAY = ("table", "bias_table", "tables")
    shares_keys = has_kernel = True

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int = 8,
        roles: Sequence[str] = ("query", "key", "value"),
        mode: str = "contextual",
        shared_heads: bool = False,
        scale: float = 1.0,
        value_pooled: bool = True,
    ) -> None:
        super().__init__()
        if unknown := set(roles) - {"query", "key", "value"}:
            raise ValueError(f"unknown roles {sorted(unknown)}; known: query, key, value")
        require_choice("mode", mode, ("contextual", "bias"))
        per_head = head_width("anchor", width, heads)
        self.heads, self.mode, self.roles = heads, mode, tuple(roles)
        self.shared_heads, self.scale, self.value_pooled = shared_heads, scale, value_pooled
        channels = per_head if shared_heads else width
        # In bias mode W_E starts at 0.02: with both factors at zero neither gets a gradient.
        if mode == "bias":
            self.table = nn.Parameter(torch.zeros(groups, channels))
            vectors = 1 if shared_heads else heads
            self.bias_table = nn.Parameter(torch.full((vectors, per_head), 0.02))
        else:
            self.tables = nn.ParameterDict(
                {role: nn.Parameter(torch.zeros(groups, channels)) for role in self.roles}
            )

    @property
    def hooks(self) -> frozenset[str]:
        """Return the hooks of this mode and these roles."""
        # Without the hook `value` attention may be fused.
        if self.mode == "bias":
            return frozenset({"bias"})
        return frozenset({"inputs", "value"} if "value" in self.roles else {"inputs"})

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, context: PositionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add mean(P) W of queries and of keys to the projections' inputs (Eq. 10)."""
        # By linearity mean(E) = mean(P) W: the embedding E = P W of all pairs is never built.
        # To projected keys and values mean(P) times the projected table is added.
        query_mean, key_mean = _mean_paths(context)
        key_weight, value_weight = context.projections or (None, None)
        return (
            self._add_mean("query", query, query_mean),
            self._add_mean("key", key, key_mean, key_weight),
            self._add_mean("value", value, key_mean, value_weight) if self.value_pooled else value,
        )

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        """Return P (W W_E) / sqrt(head width), (B, heads, queries, keys) (Eq. 9)."""
        slopes = self._slopes()
        bias = torch.einsum("bqkg,gh->bhqk", _query_paths(context).to(slopes.dtype), slopes)
        return bias.expand(-1, self.heads, -1, -1)

    def value(self, attention: Tensor, context: PositionContext) -> Tensor:
        """Return (sum_j a_ij P_ij) W, (B, heads, Q, head width) (Eq. 12, papers.md#ace-a21)."""
        # By linearity sum_j a_ij E_ij = (sum_j a_ij P_ij) W.
        path = _query_paths(context).to(attention.dtype)  # (B, Q, K, G)
        # This reshape changes nothing forward. Backward it gives both gradients of `attention` the
        # same memory layout: adding two layouts costs as much as the layer.
        attention = attention.flatten(2).unflatten(2, attention.shape[2:])
        path_sum = (attention.transpose(1, 2) @ path).transpose(1, 2)  # (B, heads, Q, G)
        # (heads, G, head width)
        table = self._table("value").unflatten(-1, (self.heads, -1)).transpose(0, 1)
        return path_sum @ table

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        context: PositionContext,
        scale: float | None = None,
    ) -> Tensor:
        """Compute Eqs 8-12 in one kernel (`anchor_attention`)."""
        terms = context.kernel_terms
        terms = self.kernel_terms(weights) if terms is None else terms
        means = _mean_paths(context) if self.mode == "contextual" else None
        path, heads = _query_paths(context), self.heads
        return anchor_attention(query, key, value, path, terms, heads, means, mask, scale)

    def kernel_terms(self, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the `terms` of `anchor_attention`, for image-to-text and text-to-image attention.

        weights: of the projections of query, key and value, (width, width) each.
        """
        if self.mode == "bias":
            return self._slopes().expand(-1, self.heads)
        value = self._table("value")
        query, key = (
            self._table(role) if role in self.roles else torch.zeros_like(value)
            for role in ("query", "key")
        )
        return contextual_terms(query, key, value, *weights, self.value_pooled)

    def _slopes(self) -> Tensor:
        """Return W W_E / sqrt(head width), (G, heads or 1)."""
        vectors = self.table.unflatten(-1, self.bias_table.shape)  # (G, heads or 1, head width)
        slopes = torch.einsum("ghd,hd->gh", vectors, self.bias_table)
        return slopes * (self.scale / math.sqrt(vectors.shape[-1]))

    def _add_mean(
        self, role: str, states: Tensor, mean: Tensor, weight: Tensor | None = None
    ) -> Tensor:
        if role not in self.roles:
            return states
        table = self._table(role)
        if weight is not None:
            table = functional.linear(table, weight)
        # addmm: adding a bf16 product to float32 states takes ten times as long on a CPU.
        mean = mean.to(states.dtype).flatten(0, 1)
        return torch.addmm(states.flatten(0, 1), mean, table).view(states.shape)

    def _table(self, role: str) -> Tensor:
        """Return W of a role, (G, width), times the scale of the path."""
        table = self.tables[role]
        if self.shared_heads:
            table = table.repeat(1, self.heads)
        return table if self.scale == 1 else table * self.scale


def _anchor_paths(context: PositionContext) -> AnchorPaths:
    if context.anchors is None:
        raise ValueError("ACE-RPE needs anchor paths in its context (cross-attention only)")
    return context.anchors


def _mean_paths(context: PositionContext) -> tuple[Tensor, Tensor]:
    """Return mean paths of queries (B, Q, G) and keys (B, K, G)."""
    paths = _anchor_paths(context)
    text_mean, image_mean = paths.text_mean, paths.image_mean
    return (text_mean, image_mean) if context.text_queries else (image_mean, text_mean)


def _query_paths(context: PositionContext) -> Tensor:
    """Return paths as (B, queries, keys, G)."""
    paths = _anchor_paths(context)
    return paths.text_path if context.text_queries else paths.image_path


# Bias at factor 1 and cosine 1.
LOGIT_SCALE = 10.0


class AlignmentBias(PositionEncoding):
    """Bias of cross-attention: the cosine of word and patch times a learned factor of the head.

    Logit (i, j) of head h gets 10 f_h times the mean of S_ij over the groups of Eq. 3; [CLS] and
    tokens that are no words get 0. S has no gradient unless `path_gradient` is set
    (papers.md#ace-a7). ACE-RPE's contextual mode lacks such a logit of one word and one patch.

    Args:
        heads: attention heads.
        start: initial factor of even heads; odd heads start at 0. With a start of
            0 a trained layer keeps its output.
    """

    shares_keys = True

    def __init__(self, heads: int, start: float = 1.0) -> None:
        super().__init__()
        # From 0 everywhere factors take thousands of steps to grow.
        self.factors = nn.Parameter(torch.zeros(heads))
        with torch.no_grad():
            self.factors[::2] = start

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor:
        """Return 10 f_h mean_g S_ij, (B, heads, queries, keys)."""
        if context.anchors is None or context.anchors.alignment is None:
            raise ValueError("alignment needs similarities in its context (cross-attention only)")
        alignment = context.anchors.alignment  # (B, 1 + M, N)
        if context.text_queries:
            alignment = alignment.mT
        factors = (LOGIT_SCALE * self.factors).to(alignment.dtype)
        return factors[:, None, None] * alignment[:, None]
