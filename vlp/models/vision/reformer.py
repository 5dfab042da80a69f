"""Reformer's layer with exact attention (Kitaev et al. 2020; the language model of Trax).

Left out is what saves memory and no parameter: hashing, by which a token attends to a few others,
and the backward pass that computes activations anew.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.layers.attention import attend
from vlp.layers.causal import Past
from vlp.layers.post_norm import FeedForward
from vlp.positions.base import PositionContext


class SharedQueryAttention(nn.Module):
    """Causal self-attention whose keys are its queries at unit length, without biases.

    A token's own key would win, so that it attends to those before it alone; the first one, which
    has none, attends to itself.

    Args:
        width: channels.
        heads: attention heads.
        head_width: channels of a head; `heads * head_width` may be other than the width.
    """

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.value = nn.Linear(width, heads * head_width, bias=False)
        self.output = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, states: Tensor, past: Past | None = None) -> Tensor:
        """(B, T, width) -> (B, T, width).

        Args:
            states: the whole sequence, or with `past` the one token that comes next.
            past: what came before; gets the new token.
        """
        query, value = (
            project(states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.value)
        )
        key = functional.normalize(query, dim=-1)
        if past is None:
            # Row t sees the keys 0 .. t - 1: a causal square one row down.
            earlier = functional.scaled_dot_product_attention(
                query[:, :, 1:], key[:, :, :-1], value[:, :, :-1], is_causal=True, scale=1.0
            )
            out = torch.cat([value[:, :, :1], earlier], -2)
        elif past.key is None or past.value is None:
            out = value
        else:
            out = attend(query, past.key, past.value, scale=1.0)
        if past is not None:
            past.extended(key, value)
        return self.output(out.transpose(1, 2).flatten(-2))


class ReformerLayer(nn.Module):
    """Two residual streams: attention reads the second and feeds the first, feed-forward back.

    Args:
        width: channels of one stream.
        heads: attention heads.
        head_width: channels of a head.
        feed_forward: channels between both of its layers.
    """

    def __init__(self, width: int, heads: int, head_width: int, feed_forward: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SharedQueryAttention(width, heads, head_width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, feed_forward)

    def forward(self, x: Tensor, context: PositionContext, past: Past | None = None) -> Tensor:
        """(B, T, 2 * width), both streams -> same shape; the context is not needed."""
        first, second = x.chunk(2, -1)
        first = first + self.attention(self.attention_norm(second), past)
        second = second + self.feed_forward(self.feed_forward_norm(first))
        return torch.cat([first, second], -1)
