"""The image encoder: timm's vision transformer and a projection of [CLS]."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vlp.models.config import ImageConfig


class ImageEncoder(nn.Module):
    """43,760,128 parameters at the paper's sizes (ViT-B/16, 6 layers, 577 positions, 768 -> 256).

    Raises:
        ValueError: pictures of another size than the configured one (from timm).
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
        )
        self.projection = nn.Linear(config.width, embed_dim)

    def forward(
        self, pixels: Tensor, patch_mask: Tensor | None = None, mask_token: Tensor | None = None
    ) -> Tensor:
        """Pixels -> states, with masked patches replaced before positions are added (SimMIM).

        Args:
            pixels: (B, 3, height, width), normalised.
            patch_mask: (B, rows, columns) bool, True = masked.
            mask_token: (width,), what stands in for a masked patch.

        Returns:
            (B, 1 + M, width), [CLS] first.
        """
        vit = self.vit
        # On CPU the backward of fused attention is slow, above all in bf16.
        fused = pixels.device.type != "cpu"
        for block in vit.blocks:
            block.attn.fused_attn = fused
        patches = vit.patch_embed(pixels)
        if patch_mask is not None and mask_token is not None:
            hidden = patch_mask.flatten(1).unsqueeze(-1)
            patches = torch.where(hidden, mask_token.to(patches.dtype), patches)
        states = vit.norm_pre(vit._pos_embed(patches))
        for block in vit.blocks:
            states = block(states)
        return vit.norm(states)
