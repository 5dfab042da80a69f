"""timm's vision transformers with token encodings, and with word to attention of where tokens lie.

The classes stand in for timm's own: `vlp.positions.attach` changes the class of a model that
exists, so that its weights, their names, hooks and whatever else it carries stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import PatchEmbed, register_notrace_module
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vlp.layers.weight_decay import no_weight_decay
from vlp.positions.base import PositionContext, PositionEncoding

register_notrace_module(PositionEncoding)  # what they check of shapes has no graph


class Places:
    """Places of a model's tokens; the model writes them, its attention layers read them.

    A plain object that they share, so that copies and pickles of the model share their own. Grids
    are kept by their number of tokens: activation checkpointing runs layers again in the backward
    pass, when images of another size may have passed since. Two grids of equally many patches
    (2 x 8 and 4 x 4) must not be in flight together under activation checkpointing.

    Args:
        prefix_tokens: tokens without a place in front of the patches.
    """

    def __init__(self, prefix_tokens: int) -> None:
        self.prefix_tokens = prefix_tokens
        self._contexts: dict[int, PositionContext] = {}

    def write(self, rows: int, columns: int) -> PositionContext:
        """The patches of the images at hand are a grid of this size."""
        context = PositionContext((rows, columns), self.prefix_tokens)
        self._contexts[self.prefix_tokens + rows * columns] = context
        return context

    def read(self, tokens: int) -> PositionContext:
        """Return the context of so many tokens, prefix included.

        Raises:
            ValueError: no image had so many.
        """
        if tokens not in self._contexts:
            known = ", ".join(map(str, self._contexts)) or "none so far"
            raise ValueError(
                f"no image of this model has {tokens} tokens ({known}), so that nothing says "
                "where they lie: patches were dropped, or attention was called without its model"
            )
        return self._contexts[tokens]


class PositionedVisionTransformer(VisionTransformer):
    """A timm ViT whose tokens also get the encodings in `positions`, after its own `pos_embed`.

    They act once, before patches are dropped. timm's `pos_drop` acts on what it acted on before;
    where there is no `pos_embed`, which timm skips it for, it acts on the encoded tokens.
    """

    positions: nn.ModuleList
    places: Places

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Patches (batch, patches, width) or (batch, rows, columns, width) -> all tokens."""
        rows, columns = x.shape[1:3] if self.dynamic_img_size else self.patch_embed.grid_size
        context = self.places.write(int(rows), int(columns))
        x = self._own_positions(x)
        for encoding in self.positions:
            x = encoding("tokens", x, context)
        return self.pos_drop(x) if self.pos_embed is None and len(self.positions) else x

    def _own_positions(self, x: Tensor) -> Tensor:
        if self.pos_embed is not None:
            return super()._pos_embed(x)
        # Without pos_embed distilled models fail in timm, and older versions lose the prefix.
        second = self.dist_token if isinstance(self, VisionTransformerDistilled) else self.reg_token
        prefix = [token for token in (self.cls_token, second) if token is not None]
        batch = x.shape[0]  # not `len`, which has no graph
        patches = x.reshape(batch, -1, x.shape[-1])
        return torch.cat([*(token.expand(batch, -1, -1) for token in prefix), patches], 1)

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters exempt from weight decay: timm's own and the encodings'."""
        return {*super().no_weight_decay(), *no_weight_decay(self, with_own=False)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise learning rates; the encodings belong to the stem."""
        groups = super().group_matcher(coarse)
        return {**groups, "stem": groups["stem"] + r"|positions"}


class PositionedVisionTransformerDistilled(PositionedVisionTransformer, VisionTransformerDistilled):
    """The same for DeiT with a distillation token."""


class PositionedSwinTransformer(SwinTransformer):
    """A timm Swin, of whose layers or patch embedding some have encodings."""

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters exempt from weight decay: timm's own and the encodings'."""
        return {*super().no_weight_decay(), *no_weight_decay(self, with_own=False)}


@register_notrace_module
class PositionedPatchEmbed(PatchEmbed):
    """Swin's patch embedding whose output (batch, rows, columns, width) gets the encodings."""

    positions: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        """Pixels (batch, channels, height, width) -> encoded patches."""
        x = super().forward(x)
        _, rows, columns, _ = x.shape
        context = PositionContext((int(rows), int(columns)))
        tokens = x.flatten(1, 2)
        for encoding in self.positions:
            tokens = encoding("tokens", tokens, context)
        return tokens.reshape(x.shape)
