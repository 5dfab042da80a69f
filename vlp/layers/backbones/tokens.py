"""timm's vision transformers with token encodings, and with word to attention of where tokens lie.

The classes stand in for timm's own: `vlp.positions.attach` changes the class of a model that
exists, so that its weights, their names, hooks and whatever else it carries stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import PatchEmbed, register_notrace_module
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.hiera import Hiera
from timm.models.hieradet_sam2 import HieraDet
from timm.models.naflexvit import NaFlexVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn

from vlp.layers.backbones.places import Places
from vlp.layers.weight_decay import no_weight_decay
from vlp.positions.base import PositionContext


class WithEncodings(nn.Module):
    """A timm model some of whose modules have encodings: names of parameters for optimisers."""

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters exempt from weight decay: timm's own and the encodings'."""
        own = super().no_weight_decay()  # type: ignore[misc]
        return {*own, *no_weight_decay(self, with_own=False)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise learning rates; the encodings belong to the stem."""
        groups = super().group_matcher(coarse)  # type: ignore[misc]
        return {**groups, "stem": groups["stem"] + r"|positions"}


class WithWatchedPatches(WithEncodings):
    """One whose convolution of patches writes the places of its tokens."""

    places: Places

    def set_input_size(self, *sizes: Any, **named: Any) -> None:
        """As in timm, which makes another convolution for another patch size."""
        own: Any = self
        before = own.patch_embed.proj
        super().set_input_size(*sizes, **named)  # type: ignore[misc]
        if own.patch_embed.proj is not before:
            own.patch_embed.proj.register_forward_hook(self.places.see_convolution)


class PositionedVisionTransformer(WithEncodings, VisionTransformer):
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


class PositionedVisionTransformerDistilled(PositionedVisionTransformer, VisionTransformerDistilled):
    """The same for DeiT with a distillation token."""


class PositionedSwinTransformer(WithEncodings, SwinTransformer):
    """A timm Swin, of whose layers or patch embedding some have encodings."""


class PositionedSwinTransformerV2(WithEncodings, SwinTransformerV2):
    """The same for the second version of Swin."""


class PositionedEva(WithWatchedPatches, Eva):
    """A timm Eva: EVA, EVA-02, DINOv3, the Perception Encoder, ViTs with RoPE."""


class PositionedBeit(WithWatchedPatches, Beit):
    """A timm BEiT."""


class PositionedRelPos(WithWatchedPatches, VisionTransformerRelPos):
    """A timm ViT with relative positions of its own."""


class PositionedNaFlexVit(WithEncodings, NaFlexVit):
    """A timm NaFlexViT."""


class PositionedSAM(WithEncodings, VisionTransformerSAM):
    """The image encoder of SAM in timm."""


class PositionedHiera(WithEncodings, Hiera):
    """A timm Hiera."""


class PositionedHieraDet(WithEncodings, HieraDet):
    """The image encoder of SAM 2 in timm."""


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
