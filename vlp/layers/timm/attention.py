"""timm's attention layers with the hooks of position encodings.

The classes stand in for timm's own: `vlp.positions.attach` changes the class of layers that exist,
so that their weights, the names of those, hooks and methods stay. Only `forward` is another.
"""

from __future__ import annotations

import torch
from timm.layers import register_notrace_module, to_2tuple
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from vlp.layers.attention import Fused, attend, mask_bias
from vlp.layers.timm.tokens import Places
from vlp.positions.base import PositionContext


@register_notrace_module
class PositionedAttention(Attention):
    """A ViT's self-attention over prefix and patches.

    `fused` is that of `attend`; None also heeds timm's own `fused_attn` where that is off. On the
    explicit path the probabilities pass through `attn_drop`, as they do in timm.
    """

    positions: nn.ModuleList
    places: Places
    fused: Fused = None

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """As in timm, plus the encodings.

        Args:
            x: (B, T, width).
            attn_mask: bool, True = may be attended to, or added to the logits; broadcasts to
                (B, heads, T, T).
            is_causal: tokens attend to none behind them; `attn_mask` is then ignored, as in timm.

        Returns:
            (B, T, width).

        Raises:
            ValueError: T is not the number of tokens of an image that the model has embedded.
        """
        # Older versions of timm know no gate and no norm.
        gate, norm = getattr(self, "gate", None), getattr(self, "norm", None)
        query, key, value = _heads(self.qkv(x), self.num_heads)
        query, key = self.q_norm(query), self.k_norm(key)
        out = attend(
            query,
            key,
            value,
            self.positions,
            self.places.read(int(x.shape[1])),  # a tensor in torch.jit.trace
            _bias(attn_mask, is_causal, query),
            False if self.fused is None and not self.fused_attn else self.fused,
            _rate(self.attn_drop),
            self.attn_drop,
        )
        out = out.transpose(1, 2).flatten(-2)
        if norm is not None:
            out = norm(out)
        if gate is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


@register_notrace_module
class PositionedWindowAttention(WindowAttention):
    """Swin's self-attention within windows, each a grid of its own without prefix.

    Swin's mask of shifted windows stays, and its relative position bias, unless the table of that
    is None. `fused` is that of `attend`.
    """

    positions: nn.ModuleList
    fused: Fused = None
    relative_position_bias_table: nn.Parameter | None  # type: ignore[assignment]

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """As in timm, also without a table."""
        if self.relative_position_bias_table is not None:
            super().set_window_size(window_size)
        else:
            self.window_size = rows, columns = to_2tuple(window_size)
            self.window_area = rows * columns

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """As in timm, plus the encodings.

        Args:
            x: (images * windows, T, width), an image's windows one after the other.
            mask: (windows, T, T), added to the logits.

        Returns:
            (images * windows, T, width).
        """
        query, key, value = _heads(self.qkv(x), self.num_heads)
        has_bias = self.relative_position_bias_table is not None
        bias = self._get_rel_pos_bias() if has_bias else None
        if mask is not None:
            bias = mask[:, None] if bias is None else bias + mask[:, None]
            bias = bias.repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        rows, columns = self.window_size
        out = attend(
            query,
            key,
            value,
            self.positions,
            PositionContext((rows, columns)),
            bias,
            self.fused,
            _rate(self.attn_drop),
            self.attn_drop,
        )
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(-2)))


def _heads(projected: Tensor, heads: int) -> tuple[Tensor, ...]:
    """(B, T, 3 * width) -> queries, keys, values, each (B, heads, T, head width)."""
    return projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()


def _bias(mask: Tensor | None, is_causal: bool, query: Tensor) -> Tensor | None:
    if is_causal:
        tokens = query.shape[-2]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return mask_bias(mask, query.dtype)


def _rate(dropout: nn.Module) -> float:
    """Rate of a dropout layer as it stands; what was put in its place may have none."""
    return float(getattr(dropout, "p", 0.0)) if dropout.training else 0.0
