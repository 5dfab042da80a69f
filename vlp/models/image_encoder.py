"""The image encoder: timm's vision transformer and a projection of [CLS]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vlp.layers.fused import fuse_by_device
from vlp.models.config import ImageConfig

PatchEdit = Callable[[Tensor], Tensor]

SINE_BASE = 100.0
"""Wavelengths from 2 pi patches to 100 times that."""


class ImageEncoder(nn.Module):
    """43,760,128 parameters at the paper's sizes (ViT-B/16, 6 layers, 577 positions, 768 -> 256).

    Raises:
        ValueError: images of another size than the configured one (from timm).
    """

    def __init__(self, config: ImageConfig, embed_dim: int) -> None:
        super().__init__()
        self.vit = VisionTransformer(
            img_size=config.image_size,
            patch_size=config.patch_size,
            embed_dim=config.width,
            depth=config.layers,
            num_heads=config.heads,
            mlp_ratio=config.intermediate / config.width,
            num_classes=0,
            global_pool="",
            pos_embed="learn" if config.position == "learned" else "none",
        )
        if self.vit.pos_embed is not None and config.position_sines:
            _start_positions(self.vit.pos_embed, config)
        self.projection = nn.Linear(config.width, embed_dim)

    def forward(self, pixels: Tensor, edit_patches: PatchEdit | None = None) -> Tensor:
        """Pixels -> states.

        Args:
            pixels: (B, 3, height, width), normalised.
            edit_patches: what to do with the patch embeddings (B, M, width) before positions are
                added; masked image modelling puts its mask token there.

        Returns:
            (B, 1 + M, width), [CLS] first.
        """
        vit = self.vit
        fuse_by_device(vit, pixels.device)
        patches = vit.patch_embed(pixels)
        if edit_patches is not None:
            patches = edit_patches(patches)
        states = vit.norm_pre(vit._pos_embed(patches))
        for block in vit.blocks:
            states = block(states)
        return vit.norm(states)


@torch.no_grad()
def _start_positions(table: Tensor, config: ImageConfig) -> None:
    """Learned positions, (1, 1 + M, width), begin as 2D sines.

    From small random vectors, where a patch lies is learned last, if at all: a probe of the place
    of a single object then needs three times the steps.
    """
    sines = build_sincos2d_pos_embed(list(config.grid), config.width, temperature=SINE_BASE)
    table.zero_()
    table[0, 1:] = config.position_sines * sines
