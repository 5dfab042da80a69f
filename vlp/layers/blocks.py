"""Transformer blocks: post-norm layers, feed-forward, text embeddings, pooling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from timm.layers.mlp import Mlp
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vlp.compilation import off_cpu
from vlp.layers.attention import Attention
from vlp.positions.base import PositionContext, PositionEncoding
from vlp.positions.sine import sinusoid

Layer = Callable[[Tensor], Tensor]


def activate_and_project(x: Tensor, activation: Layer, linear: Layer) -> Tensor:
    """Compute linear(activation(x)): (..., intermediate) -> (..., width).

    On a GPU the activation is recomputed in the backward pass, not saved.
    """
    active = activation(x)
    # The compiler itself decides what to recompute.
    if not active.is_cuda or torch.compiler.is_compiling():
        return linear(active)
    address = active.data_ptr()

    # Autograd saves the shape in place of the activation.
    def pack(tensor: Tensor) -> Tensor | torch.Size:
        return tensor.shape if tensor.data_ptr() == address else tensor

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        return packed if isinstance(packed, Tensor) else activation(x).view(packed)

    with saved_tensors_hooks(pack, unpack):
        return linear(active)


class BlockMlp(Mlp):
    """Feed-forward of a timm block without dropout and norm, by `activate_and_project`."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute (..., width) -> (..., width)."""
        return activate_and_project(self.fc1(x), self.act, self.fc2)


# Epsilon of BERT's LayerNorm.
NORM_EPS = 1e-12


class FeedForward(nn.Module):
    """Linear, exact GELU, linear: (..., width) -> (..., width)."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, intermediate)
        self.activation = nn.GELU()
        self.contract = nn.Linear(intermediate, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute (..., width) -> (..., width)."""
        return activate_and_project(self.expand(x), self.activation, self.contract)


def gather_tokens(states: Tensor, index: Tensor) -> Tensor:
    """Return the tokens `index` (B, Q) int64 of states (B, T, width): (B, Q, width)."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[2]))


class PostNormLayer(nn.Module):
    """Self-attention and feed-forward, each with dropout, added and normalised, as in BERT."""

    def __init__(self, width: int, heads: int, intermediate: int, dropout: float = 0) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.feed_forward = FeedForward(width, intermediate)
        self.feed_forward_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Encode (B, N, width) with mask (B, N) bool, True = not padding: (B, N, width)."""
        states = self.attention_norm(states + self.dropout(self.attention(states, mask=mask)))
        return self.feed_forward_norm(states + self.dropout(self.feed_forward(states)))


class CrossLayer(nn.Module):
    """Cross-modal layer, with the same weights for both streams.

    The outputs of self-attention, cross-attention and feed-forward are each added to the states,
    which are then normalised. Both streams finish `self_attend` before `cross_attend`.

    Args:
        cross_output: whether the cross-attention has an output projection (layout `albef`).
        positions: encodings of the cross-attention.
        self_positions: encodings of the self-attention.
        dropout: dropout probability of each of the three outputs, before they are added.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        intermediate: int,
        cross_output: bool = False,
        positions: Sequence[PositionEncoding] = (),
        self_positions: Sequence[PositionEncoding] = (),
        dropout: float = 0,
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, positions=self_positions)
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.cross_attention = Attention(width, heads, output=cross_output, positions=positions)
        self.cross_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.feed_forward = FeedForward(width, intermediate)
        self.feed_forward_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, step: str, *arguments: Any) -> Any:
        """Run `self_attend`, `cross_attend`, `project` or `kernel_terms` by name."""
        # See `call_method`.
        return getattr(self, step)(*arguments)

    def self_attend(
        self,
        states: Tensor,
        mask: Tensor | None,
        context: PositionContext,
        index: Tensor | None = None,
    ) -> Tensor:
        """Run self-attention: (B, T, width) -> (B, T, width), or of tokens `index` (B, Q) alone."""
        queries = states if index is None else gather_tokens(states, index)
        # None, not `states`, so that queries, keys and values share one cast.
        key_states = None if index is None else states
        attended = self.attention(queries, key_states, mask=mask, context=context)
        return self.attention_norm(queries + self.dropout(attended))

    def cross_attend(
        self,
        states: Tensor,
        other: Tensor | None,
        mask: Tensor | None,
        context: PositionContext,
        projected: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run cross-attention of states (B, Q, width) to `other` (B, K, width), and feed-forward.

        `projected` are keys and values of `project`, in place of `other`.
        """
        attended = self.cross_attention(
            states, other, mask=mask, context=context, projected=projected
        )
        return self.add_cross_attention(states, attended)

    def project(self, other: Tensor) -> tuple[Tensor, Tensor]:
        """Project (B, K, width) to the `projected` keys and values of `cross_attend`."""
        return self.cross_attention.project(other)

    def kernel_terms(self, states: Tensor) -> Tensor | None:
        """Return `PositionContext.kernel_terms` of cross-attention, the same in both directions."""
        return self.cross_attention.kernel_terms(states)

    def add_cross_attention(self, states: Tensor, attended: Tensor) -> Tensor:
        """Add the output of cross-attention to states, both (B, T, width), and run feed-forward."""
        states = self.cross_norm(states + self.dropout(attended))
        return self.feed_forward_norm(states + self.dropout(self.feed_forward(states)))


INIT_STD = 0.02  # BERT's and ViT's
# Base of the wavelengths, from 2 pi to 200 pi tokens.
SINE_BASE = 100.0


class TextEmbedding(nn.Module):
    """Word, position and type embeddings, added and normalised.

    Words and types are initialised as in BERT. Positions are initialised as sinusoids with `sines`
    times the root mean square of the word embeddings, or, if it is 0, as in BERT.
    """

    def __init__(self, vocab_size: int, width: int, max_positions: int, sines: float = 0) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(max_positions, width)
        self.token_type = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        for table in (self.word, self.token_type):
            nn.init.normal_(table.weight, std=INIT_STD)
        self._initialise_positions(sines)

    def no_weight_decay(self) -> set[str]:
        """Return the name of the position table, which is exempt from weight decay."""
        return {"position.weight"}

    @torch.no_grad()
    def _initialise_positions(self, amplitude: float) -> None:
        if not amplitude:
            nn.init.normal_(self.position.weight, std=INIT_STD)
            return
        # With small positions word order is learned last; with large positions all texts have
        # similar features at first (docs/results/anchors.md).
        positions = torch.arange(len(self.position.weight))
        sines = sinusoid(positions, self.word.embedding_dim, SINE_BASE)
        # The root mean square of a sinusoid is 1 / sqrt(2).
        self.position.weight.copy_(amplitude * INIT_STD * 2**0.5 * sines)

    def forward(self, text_ids: Tensor) -> Tensor:
        """Embed (B, N) int64 -> (B, N, width)."""
        tokens = text_ids.shape[1]
        if tokens > self.position.num_embeddings:
            raise ValueError(
                f"a text of {tokens} tokens exceeds the {self.position.num_embeddings} positions"
            )
        # All tokens have type 0. Public weights were trained with its embedding.
        type_ids = torch.zeros(1, dtype=torch.long, device=text_ids.device)
        positions = self.position(torch.arange(tokens, device=text_ids.device))
        return self.norm(self.word(text_ids) + positions + self.token_type(type_ids))


Pooling = Literal["cls", "mean", "cls+mean"]


def pooled_width(pooling: Pooling, width: int) -> int:
    """Return the channels of `pool_states` for states of `width` channels."""
    return width * len(pooling.split("+"))


def pool_states(states: Tensor, pooling: Pooling, mask: Tensor | None = None) -> Tensor:
    """Pool states to (B, width), for `cls+mean` to (B, 2 width).

    Args:
        states: (B, 1 + M, width), [CLS] first.
        pooling: `cls`, the first state; `mean`, of the other tokens; `cls+mean`, concatenated.
        mask: (B, 1 + M) bool, True = a token of the mean; None: all but [CLS].
    """
    parts = [states[:, 0]] if "cls" in pooling else []
    if "mean" in pooling:
        if mask is None:
            parts.append(states[:, 1:].mean(1))
        else:
            weights = mask / mask.sum(1, keepdim=True).clamp(min=1)
            parts.append(torch.einsum("bn,bnc->bc", weights.to(states.dtype), states))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def set_fused_attention(model: nn.Module, x: Tensor) -> None:
    """Let a timm model attend to `x` by fused attention on accelerators, explicitly on CPUs."""
    # The fused backward pass makes a training step 2.5 times as long on a CPU in bf16.
    fused = off_cpu(x)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused  # type: ignore[assignment]


class ThreadLocal(threading.local):
    """Attributes with a value for each thread; copies and pickles have no values."""

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def no_weight_decay(model: nn.Module, include_self: bool = True) -> set[str]:
    """Collect the names of parameters from the `no_weight_decay()` of a model and its modules."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        method = getattr(module, "no_weight_decay", None)
        if callable(method) and (prefix or include_self):
            names |= {f"{prefix}.{name}".removeprefix(".") for name in method()}
    return names & {name for name, _ in model.named_parameters()}
