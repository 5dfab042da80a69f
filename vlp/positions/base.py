"""The one interface of all position encodings: five hooks, each a no-op by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from vlp.positions.anchor_field import AnchorField


@dataclass(frozen=True)
class PositionContext:
    """Context of the tokens that a hook acts on.

    `grid` is (rows, columns) of the image patches, which follow `prefix_tokens` tokens without a
    place ([CLS]). Tokens that lie on no grid have `coordinates` (B or 1, tokens after the prefix,
    C) instead, shares of the image's width and height: x, y where C = 2, boxes x0, y0, x1, y1
    where C = 4. Where they are patches of images that differ in size, `grids` (B or 1, 2) are each
    image's rows and columns; what follows its patches is padding. `boxes` (B, K, 4) are those of
    objects on the grid: x, y, width, height in cells; a row of width or height 0 is padding. In
    cross-attention `anchors` holds the paths of the pairs, and `text_queries` says which side asks:
    True is text-to-image, False image-to-text; `anchor_terms` are those of the layer at hand, where
    both sides share them.
    """

    grid: tuple[int, int] | None = None
    prefix_tokens: int = 0
    coordinates: Tensor | None = None
    grids: Tensor | None = None
    boxes: Tensor | None = None
    anchors: AnchorField | None = None
    text_queries: bool = True
    anchor_terms: Tensor | None = None


class PositionEncoding(nn.Module):
    """Base of every encoding; attention calls the hooks that a subclass overrides.

    The hooks go through `forward` so that wrappers which act on a module's call (ZeRO-3 gathering
    its weights, FSDP, activation checkpointing) see every use of its parameters.
    """

    HOOKS: ClassVar[tuple[str, ...]] = ("tokens", "inputs", "rotate", "bias", "value")
    UNDECAYED: ClassVar[tuple[str, ...]] = ()
    """Attributes whose parameters are exempt from weight decay, as tables of places are."""
    causal: bool = False
    """True if the result for a pair of tokens depends on no later token."""

    @property
    def hooks(self) -> frozenset[str]:
        """Names of the hooks this encoding uses; the others are never called."""
        return frozenset(
            hook
            for hook in self.HOOKS
            if getattr(type(self), hook) is not getattr(PositionEncoding, hook)
        )

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters exempt from weight decay (timm's convention).

        iRPE's authors exempt their tables (supplement 2), as those of mixed RoPE do: a table that
        is pulled to zero pulls all positions together. Matrices of MLPs and projections decay.
        """
        return {
            name for name, _ in self.named_parameters() if name.partition(".")[0] in self.UNDECAYED
        }

    def forward(self, hook: str, *arguments: Any) -> Any:
        """Call one hook by name."""
        return getattr(self, hook)(*arguments)

    def tokens(self, x: Tensor, context: PositionContext) -> Tensor:
        """Token embeddings (batch, tokens, width), once at the input."""
        return x

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, context: PositionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what enters W^Q, W^K and W^V of one layer, each (batch, tokens, width)."""
        return query, key, value

    def rotate(self, query: Tensor, key: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        """Projected queries and keys, each (batch, heads, tokens, head width)."""
        return query, key

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        """Added to the logits (batch, heads, queries, keys) after 1/sqrt(head width)."""
        return None

    def value(self, attention: Tensor, context: PositionContext) -> Tensor | None:
        """Added to the output (batch, heads, queries, head width), from the attention weights."""
        return None


def hooks_of(encoding: nn.Module) -> frozenset[str]:
    """Return the hooks of an encoding, or of the one in a wrapper, which is called in its place.

    Wrappers are modules around it, such as those of activation checkpointing, `torch.compile`, FSDP
    and peft's `modules_to_save`.

    Raises:
        TypeError: the module is no PositionEncoding and holds none.
    """
    if isinstance(encoding, PositionEncoding):
        return encoding.hooks
    for part in encoding.modules():
        if isinstance(part, PositionEncoding):
            return part.hooks
    raise TypeError(f"{type(encoding).__name__} is no PositionEncoding and wraps none")
