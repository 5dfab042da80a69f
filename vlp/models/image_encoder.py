"""The image encoder: a ViT or a tower of timm, an adapter, and the contrastive projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vlp.config import ConfigError
from vlp.layers.blocks import BlockMlp, ThreadLocal, pool_states, pooled_width, set_fused_attention
from vlp.models.config import ImageConfig
from vlp.models.towers import TrainableTower, create_image_tower
from vlp.positions import attach

PatchEdit = Callable[[Tensor], Tensor]

NORM_EPS = 1e-6  # timm's
# Base of the wavelengths, from 2 pi to 200 pi patches.
SINE_BASE = 100.0


class _PatchEdits(ThreadLocal):
    """The `edit_patches` of this thread's call of `tower`."""

    edit_patches: PatchEdit | None = None


class ImageEncoder(TrainableTower):
    """Image encoder: 43,760,128 parameters with ViT-B/16, 6 layers, 577 positions, 768 -> 256."""

    blocks = "vit.blocks"

    def __init__(self, config: ImageConfig, embed_dim: int) -> None:
        super().__init__()
        self.config = config
        self.vit = create_tower(config)
        self._patch_edits = _PatchEdits()
        if isinstance(embed := getattr(self.vit, "patch_embed", None), nn.Module):
            # A permanent hook: `torch.compile` cannot follow hooks that are added and removed.
            embed.register_forward_hook(self._edit_hook)
        try:
            for name, settings in config.positions.items():
                options = dict(settings)
                attach(self.vit, name, options.pop("roles", None), **options)
        except ValueError as error:
            raise ConfigError(f"image.positions: {error}") from error
        blocks = len(getattr(self.vit, "blocks", ()))
        if config.pooled_layers > max(1, blocks):
            raise ConfigError(
                f"image.pooled_layers {config.pooled_layers}: {config.tower_name} has {blocks} "
                "blocks"
            )
        projection_inputs = config.pooled_layers * pooled_width(config.pooling, config.width)
        self.projection = nn.Linear(projection_inputs, embed_dim)
        # A tower of another width needs an adapter.
        width: int = self.vit.num_features  # type: ignore[assignment]
        self.adapter = nn.Identity() if width == config.width else nn.Linear(width, config.width)
        self.freeze_blocks(config.trainable, "image.trainable")

    def forward(self, pixels: Tensor, edit_patches: PatchEdit | None = None) -> Tensor:
        """Encode pixels (B, 3, height, width), normalised, or a stored output of `tower`.

        Returns (B, 1 + M + S, width): [CLS], patches, and the S summary tokens of
        `image.pooled_layers`, which `project` reads. Stored outputs have any float dtype, and their
        patches may be averaged already (`pool_patches`).
        """
        self._require_pixels(pixels)
        pixels = pixels.to(self.projection.weight.dtype)
        if pixels.ndim == 3:
            if edit_patches is not None:
                raise ValueError("stored tower outputs have no patch embeddings that can be edited")
            return self.after_tower(pixels)
        if self.config.average_hflip and not self.training and edit_patches is None:
            return self.after_tower(self.hflip_averaged_tower(pixels))
        return self.after_tower(self.tower(pixels, edit_patches))

    def _require_pixels(self, pixels: Any) -> None:
        """Require pixels of the configured size, or a stored output of `tower`."""
        side, summary = self.config.image_size, self.config.summary_tokens
        advice = f"give a tensor (images, 3, {side}, {side}) from the model folder's preprocessing"
        if not isinstance(pixels, Tensor):
            raise TypeError(f"pixels are of type {type(pixels).__name__}; {advice}")
        shapes: list[tuple[Any, ...]] = [(3, side, side)]
        for rows, columns in (self.config.grid, self.config.tower_grid):
            shapes.append((1 + rows * columns + summary, self.vit.num_features))
        if tuple(pixels.shape[1:]) not in shapes:
            raise ValueError(f"pixels have shape {tuple(pixels.shape)}; {advice}")

    def tower(self, pixels: Tensor, edit_patches: PatchEdit | None = None) -> Tensor:
        """Compute the tower's output after its final norm, (B, 1 + M + S, tower's width).

        The first token is [CLS], or the mean patch of a tower without [CLS]; then come the patches,
        and S summary tokens: the pooled states of earlier blocks. Other prefix tokens are dropped.

        Args:
            pixels: (B, 3, height, width), normalised.
            edit_patches: function of patch embeddings (B, M, C), before positions are added, that
                returns other embeddings.
        """
        vit: Any = self.vit
        set_fused_attention(vit, pixels)
        self._patch_edits.edit_patches = edit_patches
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                if self.config.pooled_layers == 1:
                    return self._select_tokens(vit.forward_features(pixels))
                last, *earlier = self._last_blocks(pixels)
        finally:
            self._patch_edits.edit_patches = None
        summaries = [pool_states(states, self.config.pooling) for states in earlier]
        # With pooling cls+mean a pooled state is two tokens wide.
        width = last.shape[-1]
        return torch.cat([last, *(state.unflatten(-1, (-1, width)) for state in summaries)], dim=1)

    def _last_blocks(self, pixels: Tensor) -> list[Tensor]:
        """Return tokens (B, 1 + M, C) of the last `pooled_layers` blocks, the last block first."""
        vit: Any = self.vit
        intermediates = vit.forward_intermediates(
            pixels,
            indices=self.config.pooled_layers,
            norm=True,
            output_fmt="NLC",
            return_prefix_tokens=bool(vit.num_prefix_tokens),
            intermediates_only=True,
        )
        tokens = []
        for output in reversed(intermediates):
            # A pair (patches, prefix) if the tower has a prefix.
            states = torch.cat(output[::-1], dim=1) if isinstance(output, tuple) else output
            tokens.append(self._select_tokens(states))
        return tokens

    def _select_tokens(self, states: Tensor) -> Tensor:
        """Reduce a block's output (B, prefix + M, C) to [CLS] and patches (B, 1 + M, C)."""
        vit, (rows, columns) = self.vit, self.config.tower_grid
        prefix: int = vit.num_prefix_tokens  # type: ignore[assignment]
        if states.ndim != 3 or states.shape[1] != prefix + rows * columns:
            raise ValueError(
                f"image.architecture {self.config.tower_name} returns {tuple(states.shape)}, not "
                f"{prefix} prefix tokens and a {rows} x {columns} grid of patches"
            )
        if isinstance(norm := getattr(vit, "fc_norm", None), nn.Module):
            # timm applies this norm after pooling.
            states = norm(states)
        patches = states[:, prefix:]
        if getattr(vit, "cls_token", None) is None:
            return torch.cat([patches.mean(1, keepdim=True), patches], dim=1)
        return states if prefix == 1 else torch.cat([states[:, :1], patches], dim=1)

    def _edit_hook(self, module: nn.Module, arguments: Any, patches: Tensor) -> Tensor:
        edit_patches = self._patch_edits.edit_patches
        return patches if edit_patches is None else edit_patches(patches)

    def hflip_averaged_tower(self, pixels: Tensor) -> Tensor:
        """Average the outputs of `tower` for images and their horizontal flips, flipped back."""
        states, flipped_states = self.tower(pixels), self.tower(pixels.flip(-1))
        rows, columns = self.config.tower_grid
        cls, patches, summary = flipped_states.split(
            [1, rows * columns, self.config.summary_tokens], dim=1
        )
        patches = patches.unflatten(1, (rows, columns)).flip(2).flatten(1, 2)
        return (states + torch.cat([cls, patches, summary], dim=1)) / 2

    def after_tower(self, states: Tensor) -> Tensor:
        """Pool the patches of a `tower` output and adapt its width -> (B, 1 + M + S, width)."""
        return self.adapter(self.pool_patches(states))

    def pool_patches(self, states: Tensor) -> Tensor:
        """Average squares of `image.pool` patches a side, unless they are averaged already."""
        pool, (rows, columns) = self.config.pool, self.config.grid
        summary_tokens = self.config.summary_tokens
        if states.shape[1] == 1 + rows * columns + summary_tokens:
            return states
        patch_tokens = states.shape[1] - 1 - summary_tokens
        cls, patches, summary = states.split([1, patch_tokens, summary_tokens], dim=1)
        squares = patches.unflatten(1, (rows, pool, columns, pool))
        return torch.cat([cls, squares.mean((2, 4)).flatten(1, 2), summary], dim=1)

    def drop_summary_tokens(self, states: Tensor) -> Tensor:
        """Drop the summary tokens: (B, 1 + M + S, width) -> (B, 1 + M, width)."""
        return states[:, : states.shape[1] - self.config.summary_tokens]

    def pool(self, states: Tensor) -> Tensor:
        """Pool states (B, 1 + M + S, width) to the projection's input (B, channels).

        Channels are those of the summary tokens, then the last block's [CLS], mean, or both.
        """
        last = pool_states(self.drop_summary_tokens(states), self.config.pooling)
        if not self.config.summary_tokens:
            return last
        return torch.cat([states[:, -self.config.summary_tokens :].flatten(1), last], dim=-1)

    def project(self, states: Tensor) -> Tensor:
        """Pool and project states (B, 1 + M + S, width) -> (B, embed_dim), not normalised."""
        return self.projection(self.pool(states))


def create_tower(config: ImageConfig) -> nn.Module:
    """Create timm's model of `image.architecture`, or else a ViT of the configured sizes."""
    if config.architecture:
        return create_image_tower(config)
    vit = VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        embed_dim=config.width,
        depth=config.layers,
        num_heads=config.heads,
        mlp_ratio=config.intermediate / config.width,
        num_classes=0,
        global_pool="",
        pos_embed="none" if config.position == "none" else "learn",
        mlp_layer=BlockMlp,
        norm_layer=partial(nn.LayerNorm, eps=NORM_EPS),
    )
    if vit.pos_embed is not None and not isinstance(config.position, str):
        _initialise_positions(vit.pos_embed, config.tower_grid, config.position)
    return vit


@torch.no_grad()
def _initialise_positions(table: Tensor, grid: tuple[int, int], amplitude: float) -> None:
    """Fill a table of learned positions (1, 1 + M, width) with 2D sinusoids; [CLS] gets 0."""
    # A probe locates a single object in a third of the steps that random positions need.
    sines = build_sincos2d_pos_embed(list(grid), table.shape[-1], temperature=SINE_BASE)
    table.zero_()
    table[0, 1:] = amplitude * sines
