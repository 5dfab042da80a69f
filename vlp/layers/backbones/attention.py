"""timm's attention layers with the hooks of position encodings.

`vlp.positions.attach` changes the class of existing layers, so that weights, names, hooks and
methods stay. Where timm's `forward` calls `scaled_dot_product_attention`, that call is replaced;
the other layers have a `forward` here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import register_notrace_module, to_2tuple
from timm.layers.attention import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vlp.layers.attention import Fused, attend, mask_bias
from vlp.layers.blocks import ThreadLocal
from vlp.positions.base import PositionContext, PositionEncoding, call_method

# Shape checks of encodings cannot be traced by torch.fx.
register_notrace_module(PositionEncoding)


class _ThreadContexts(ThreadLocal):
    """Contexts that the current thread wrote, by number of tokens."""

    def __init__(self) -> None:
        self.contexts: dict[int, PositionContext] = {}


class ContextStore:
    """Contexts of a model's tokens; the model writes them, its attention layers read them.

    The model and its layers refer to the same object, also in copies and pickles. A thread reads
    the contexts that it wrote, or else, as in a GPU's backward pass, the latest of any thread.

    Args:
        prefix_tokens: number of leading tokens without a position.
    """

    def __init__(self, prefix_tokens: int) -> None:
        self.prefix_tokens = prefix_tokens
        self._contexts: dict[int, PositionContext] = {}
        self._thread_contexts = _ThreadContexts()

    def write(self, rows: int, columns: int) -> PositionContext:
        """Write the grid of the current images' patches, and return their context."""
        context = PositionContext((rows, columns), self.prefix_tokens)
        self._set(rows * columns, context)
        return context

    def write_sizes(self, sizes: Tensor, patches: int) -> None:
        """Write the grids of the current images, padded to the same number of patches.

        The context has the grid if all images have the same grid and no padding, or else
        `coordinates` and `grids`.

        Args:
            sizes: (B, 2), rows and columns of each image.
            patches: patches of an image in raster order, including padding.
        """
        rows, columns = (int(size) for size in sizes[0])
        if rows * columns == patches and bool((sizes == sizes[0]).all()):
            self.write(rows, columns)
            return
        patch = torch.arange(patches, device=sizes.device)
        height, width = sizes[:, :1], sizes[:, 1:]
        x, y = (patch % width + 0.5) / width, (patch // width + 0.5) / height
        # Clamped, as padding would lie below the image.
        coordinates = torch.stack([x, y], -1).clamp(0, 1)
        context = PositionContext(None, self.prefix_tokens, coordinates, grids=sizes)
        self._set(patches, context)

    def _set(self, patches: int, context: PositionContext) -> None:
        # By number of tokens, as activation checkpointing runs layers again after other images. Two
        # grids of equally many patches (2 x 8 and 4 x 4) cannot be in flight together.
        for contexts in (self._contexts, self._thread_contexts.contexts):
            contexts[self.prefix_tokens + patches] = context

    def read(self, tokens: int) -> PositionContext:
        """Return the context of the latest images with a number of tokens, prefix included."""
        if tokens not in self._contexts:
            counts = ", ".join(map(str, self._contexts)) or "no"
            raise ValueError(
                f"attention got {tokens} tokens, and the model's images had {counts} tokens: "
                "patches were dropped, or attention was called without its model"
            )
        return self._thread_contexts.contexts.get(tokens, self._contexts[tokens])

    def record_grid(self, convolution: nn.Module, arguments: Any, patches: Tensor) -> None:
        """Write the grid of a patch convolution's output (B, width, rows, columns), as its hook."""
        self.write(int(patches.shape[2]), int(patches.shape[3]))

    def record_sizes(self, embeds: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Write the grids of the inputs of transformers' Siglip2VisionEmbeddings, as its hook."""
        pixels, sizes = arguments
        self.write_sizes(sizes, int(pixels.shape[1]))


class TokenEncodings(nn.ModuleList):
    """Encodings of tokens, applied to a module's output by its forward hook.

    Args:
        store: of the tokens' contexts.
        has_prefix: whether the output includes the prefix tokens.
    """

    def __init__(self, store: ContextStore, has_prefix: bool) -> None:
        super().__init__()
        self._store, self._has_prefix = store, has_prefix

    def encode(self, module: nn.Module, arguments: Any, tokens: Tensor) -> Tensor:
        """Apply the encodings to a module's output (B, tokens, width), as its forward hook."""
        count = int(tokens.shape[1])
        if self._has_prefix:
            context = self._store.read(count)
        else:
            context = self._store.read(self._store.prefix_tokens + count)
            context = replace(context, prefix_tokens=0)
        for encoding in self:
            tokens = call_method(encoding, PositionEncoding.tokens, tokens, context)
        return tokens


class _ReplacedAttention(TorchFunctionMode):
    """Mode in which a function replaces `scaled_dot_product_attention`, in this thread alone."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class PositionedLayer(nn.Module):
    """Base of timm's layers that call `scaled_dot_product_attention`, with encodings.

    `fused` is as in `attend`; if it is None, timm's `fused_attn` False selects the explicit path,
    on which the attention weights pass through `attn_drop` as in timm.
    """

    positions: nn.ModuleList
    context_store: ContextStore
    fused: Fused = None

    if not TYPE_CHECKING:  # timm declares it final

        @property
        def fused_attn(self) -> bool:
            """Return True, so that timm's `forward` makes the call that is replaced."""
            return True

        @fused_attn.setter
        def fused_attn(self, fused: bool) -> None:
            self.__dict__["fused_attn"] = fused

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Compute timm's `forward` with the encodings, for `x` (B, T, width)."""
        with _ReplacedAttention(partial(self.attend, self.context(x))):
            out: Tensor = super().forward(x, *arguments, **options)
        return out

    def context(self, x: Tensor) -> PositionContext:
        """Return the context of the tokens (B, T, width)."""
        # `int`, as in torch.jit.trace sizes are tensors.
        return self.context_store.read(int(x.shape[1]))

    def attend(
        self,
        context: PositionContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Attend with the hooks: arguments as in `scaled_dot_product_attention`."""
        dropout: nn.Module | None = getattr(self, "attn_drop", None)
        is_explicit = self.fused is None and not self.__dict__["fused_attn"]
        return attend(
            query,
            key,
            value,
            self.positions,
            context,
            _bias_from_mask(attn_mask, is_causal, query),
            False if is_explicit else self.fused,
            0.0 if dropout is None else _dropout_rate(dropout),
            dropout,
            scale,
        )


@register_notrace_module
class PositionedAttention(PositionedLayer, Attention):
    """A ViT's self-attention over prefix and patches."""


@register_notrace_module
class PositionedAttentionRope(PositionedLayer, AttentionRope):
    """Self-attention with its own RoPE, which acts before the encodings."""


@register_notrace_module
class PositionedEvaAttention(PositionedLayer, EvaAttention):
    """Self-attention of EVA, with its own RoPE, which acts before the encodings."""


@register_notrace_module
class PositionedBeitAttention(PositionedLayer, BeitAttention):
    """BEiT's self-attention with its relative position bias."""


@register_notrace_module
class PositionedRelPosAttention(PositionedLayer, RelPosAttention):
    """Self-attention of ViTs with their own relative position bias."""


@register_notrace_module
class PositionedWindowAttention(WindowAttention):
    """Swin's self-attention within windows, each of which is a grid without prefix.

    Swin's mask of shifted windows acts, too, and unless the table is None its relative position
    bias. `fused` is as in `attend`.
    """

    positions: nn.ModuleList
    fused: Fused = None
    relative_position_bias_table: nn.Parameter | None  # type: ignore[assignment]

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Set the window as timm does, also without the table."""
        if self.relative_position_bias_table is not None:
            super().set_window_size(window_size)
        else:
            self.window_size = rows, columns = to_2tuple(window_size)
            self.window_area = rows * columns

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute timm's `forward` with the encodings.

        Args:
            x: (images * windows, T, width), by image, then window.
            mask: (windows, T, T), added to the logits.
        """
        query, key, value = _split_heads(self.qkv(x), self.num_heads)
        has_bias = self.relative_position_bias_table is not None
        bias = self._get_rel_pos_bias() if has_bias else None
        return _attend_within_windows(self, query, key, value, bias, mask)


@register_notrace_module
class PositionedWindowAttentionV2(WindowAttentionV2):
    """Swin V2's self-attention, with logits that are cosines times a learned scale.

    Hooks get unit keys, and unit queries times the scale. Without `cpb_mlp` there is no relative
    position bias of Swin's own.
    """

    positions: nn.ModuleList
    fused: Fused = None
    cpb_mlp: nn.Module | None  # type: ignore[assignment]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute timm's `forward` with the encodings; shapes as in `PositionedWindowAttention`."""
        projected = self.qkv(x)
        if self.q_bias is not None:
            biases: Any = (self.q_bias, self.k_bias, self.v_bias)
            projected = projected + torch.cat(biases)
        query, key, value = _split_heads(projected, self.num_heads)
        # As in timm: the scale is at most 100.
        scale = self.logit_scale.clamp(max=math.log(1.0 / 0.01)).exp()
        query, key = functional.normalize(query, dim=-1) * scale, functional.normalize(key, dim=-1)
        bias = None if self.cpb_mlp is None else self._relative_bias()
        return _attend_within_windows(self, query, key, value, bias, mask, scale=1.0)

    def _relative_bias(self) -> Tensor:
        """Return Swin V2's bias, 16 sigmoid(MLP(log-spaced offsets)): (1, heads, T, T)."""
        layer: Any = self
        table = layer.cpb_mlp(layer.relative_coords_table).view(-1, self.num_heads)
        ids = layer.relative_position_index
        logits: Tensor = table[ids.flatten()].unflatten(0, tuple(ids.shape)).permute(2, 0, 1)
        return 16 * logits[None].sigmoid()


def _attend_within_windows(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Attend within windows and project the output: (images * windows, T, width).

    bias: (1, heads, T, T), or None; mask: (windows, T, T), or None.
    """
    if mask is not None:
        bias = mask[:, None] if bias is None else bias + mask[:, None]
        bias = bias.repeat(query.shape[0] // mask.shape[0], 1, 1, 1)
    rows, columns = layer.window_size
    out = attend(
        query,
        key,
        value,
        layer.positions,
        PositionContext((rows, columns)),
        bias,
        layer.fused,
        _dropout_rate(layer.attn_drop),
        layer.attn_drop,
        scale,
    )
    projected: Tensor = layer.proj_drop(layer.proj(out.transpose(1, 2).flatten(-2)))
    return projected


def _split_heads(projected: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split (B, T, 3 * width) into queries, keys, values, each (B, heads, T, head width)."""
    return projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()


def _bias_from_mask(mask: Tensor | None, is_causal: bool, query: Tensor) -> Tensor | None:
    """Return a mask of `scaled_dot_product_attention` as a bias, or None without a mask."""
    if is_causal:
        tokens = query.shape[-2]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return mask_bias(mask, query.dtype)


def _dropout_rate(dropout: nn.Module) -> float:
    """Return a dropout layer's current rate, 0 in evaluation and for a layer without a rate."""
    return float(getattr(dropout, "p", 0.0)) if dropout.training else 0.0
