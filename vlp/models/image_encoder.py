"""The image encoder: a vision transformer, the package's or timm's, and a projection of [CLS]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vlp.config import ConfigError
from vlp.layers.blocks import BlockMlp, ThreadLocal, fuse_by_device, pool_states, pooled_width
from vlp.models.config import ImageConfig
from vlp.models.towers import TrainableTower, create_image_tower
from vlp.positions import attach

PatchEdit = Callable[[Tensor], Tensor]

NORM_EPS = 1e-6  # timm's
# Wavelengths from 2 pi patches to 100 times that.
SINE_BASE = 100.0


class _Edit(ThreadLocal):
    """Edit of patch embeddings in this thread's call of `tower`."""

    patches: PatchEdit | None = None


class ImageEncoder(TrainableTower):
    """Image encoder: 43,760,128 parameters with ViT-B/16, 6 layers, 577 positions, 768 -> 256."""

    blocks = "vit.blocks"

    def __init__(self, config: ImageConfig, embed_dim: int) -> None:
        super().__init__()
        self.config = config
        self.vit = create_image_tower(config) if config.architecture else _create_vit(config)
        self._edit = _Edit()
        if isinstance(embed := getattr(self.vit, "patch_embed", None), nn.Module):
            # A permanent hook: `torch.compile` cannot follow hooks that are added and removed.
            embed.register_forward_hook(self._edit_hook)
        for name, options in config.positions.items():
            _attach(self.vit, name, dict(options))
        blocks = len(getattr(self.vit, "blocks", ()))
        if config.pooled_layers > max(1, blocks):
            raise ConfigError(
                f"image.pooled_layers {config.pooled_layers}: {config.tower_name} has {blocks} "
                "blocks"
            )
        pooled = config.pooled_layers * pooled_width(config.pooling, config.width)
        self.projection = nn.Linear(pooled, embed_dim)
        # A tower of another width needs an adapter.
        width: int = self.vit.num_features  # type: ignore[assignment]
        self.adapter = nn.Identity() if width == config.width else nn.Linear(width, config.width)
        self.restrict(config.trainable, "image.trainable")

    def forward(self, pixels: Tensor, edit_patches: PatchEdit | None = None) -> Tensor:
        """Encode pixels (B, 3, height, width), normalised, or a stored output of `tower`.

        Returns (B, 1 + M + S, width): [CLS], patches, and the S summary tokens of
        `image.pooled_layers`, which `project` reads. Stored outputs have any float type and may be
        pooled.
        """
        self._require(pixels)
        pixels = pixels.to(self.projection.weight.dtype)
        if pixels.ndim == 3:
            if edit_patches is not None:
                raise ValueError("stored tower outputs have no patch embeddings that can be edited")
            return self.after_tower(pixels)
        if self.config.average_hflip and not self.training and edit_patches is None:
            return self.after_tower(self.hflip_averaged_tower(pixels))
        return self.after_tower(self.tower(pixels, edit_patches))

    def _require(self, pixels: Any) -> None:
        """Require pixels of the configured size, or a stored output of `tower`."""
        side, summary = self.config.image_size, self.config.summary_tokens
        advice = (
            f"give a tensor (images, 3, {side}, {side}), as the model folder's preparation makes "
            "it of images"
        )
        if not isinstance(pixels, Tensor):
            raise TypeError(f"pixels are of type {type(pixels).__name__}; {advice}")
        grids = self.config.grid, self.config.tower_grid
        stored = [(1 + rows * columns + summary, self.vit.num_features) for rows, columns in grids]
        if tuple(pixels.shape[1:]) not in [(3, side, side), *stored]:
            raise ValueError(f"pixels have shape {tuple(pixels.shape)}; {advice}")

    def tower(self, pixels: Tensor, edit_patches: PatchEdit | None = None) -> Tensor:
        """Compute the tower's normalised output (B, 1 + M + S, tower's width) of normalised pixels.

        First [CLS], or the mean patch where the tower has no [CLS]; last the pooled states of the S
        / parts blocks before the last. Registers and distillation tokens are dropped. edit_patches
        changes patch embeddings (B, M, tower's width) before positions are added.
        """
        vit: Any = self.vit
        fuse_by_device(vit, pixels)
        # A frozen tower keeps no graph.
        gradient = torch.is_grad_enabled() and not self.frozen
        self._edit.patches = edit_patches
        try:
            with torch.set_grad_enabled(gradient):
                if self.config.pooled_layers == 1:
                    return self._tokens(vit.forward_features(pixels))
                last, *before = self._last_blocks(pixels)
        finally:
            self._edit.patches = None
        pooled = [pool_states(states, self.config.pooling) for states in before]
        width = last.shape[-1]
        return torch.cat([last, *(states.unflatten(-1, (-1, width)) for states in pooled)], dim=1)

    def _last_blocks(self, pixels: Tensor) -> list[Tensor]:
        """Return normalised tokens (B, 1 + M, C) of the last `pooled_layers` blocks, last first."""
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
        for states in reversed(intermediates):
            patches, prefix = states if isinstance(states, tuple) else (states, None)
            tokens.append(patches if prefix is None else torch.cat([prefix, patches], dim=1))
        return [self._tokens(states) for states in tokens]

    def _tokens(self, states: Tensor) -> Tensor:
        """Reduce a block's output (B, prefix + M, C) to [CLS] and the patches, (B, 1 + M, C)."""
        vit, (rows, columns) = self.vit, self.config.tower_grid
        prefix: int = vit.num_prefix_tokens  # type: ignore[assignment]
        if states.ndim != 3 or states.shape[1] != prefix + rows * columns:
            raise ValueError(
                f"image.architecture {self.config.tower_name} gives {tuple(states.shape)}, not "
                f"tokens of a {rows} x {columns} grid after {prefix} prefix tokens"
            )
        if isinstance(norm := getattr(vit, "fc_norm", None), nn.Module):
            # Some towers normalise only after pooling.
            states = norm(states)
        patches = states[:, prefix:]
        if getattr(vit, "cls_token", None) is None:
            return torch.cat([patches.mean(1, keepdim=True), patches], dim=1)
        return states if prefix == 1 else torch.cat([states[:, :1], patches], dim=1)

    def _edit_hook(self, module: nn.Module, arguments: Any, patches: Tensor) -> Tensor:
        edit = self._edit.patches
        return patches if edit is None else edit(patches)

    def hflip_averaged_tower(self, pixels: Tensor) -> Tensor:
        """Average `tower` of images and of their flips, with the flips' patches flipped back."""
        states, flipped = self.tower(pixels), self.tower(pixels.flip(-1))
        rows, columns = self.config.tower_grid
        cls, patches, summary = flipped.split(
            [1, rows * columns, self.config.summary_tokens], dim=1
        )
        patches = patches.unflatten(1, (rows, columns)).flip(2).flatten(1, 2)
        return (states + torch.cat([cls, patches, summary], dim=1)) / 2

    def after_tower(self, states: Tensor) -> Tensor:
        """Pool patches of what `tower` returns, and adapt the width: -> (B, 1 + M + S, width)."""
        return self.adapter(self.pooled(states))

    def pooled(self, states: Tensor) -> Tensor:
        """Average squares of `image.pool` patches a side; pooled states stay as they are."""
        pool, (rows, columns) = self.config.pool, self.config.grid
        summary = self.config.summary_tokens
        if states.shape[1] == 1 + rows * columns + summary:
            return states
        cls, patches, summaries = states.split([1, states.shape[1] - 1 - summary, summary], dim=1)
        squares = patches.unflatten(1, (rows, pool, columns, pool))
        return torch.cat([cls, squares.mean((2, 4)).flatten(1, 2), summaries], dim=1)

    def drop_summary(self, states: Tensor) -> Tensor:
        """Drop the summary tokens: (B, 1 + M + S, width) -> (B, 1 + M, width)."""
        return states[:, : states.shape[1] - self.config.summary_tokens]

    def pool(self, states: Tensor) -> Tensor:
        """Pool states (B, 1 + M + S, width) for the projection: (B, its channels).

        Earlier blocks come first, the last one's [CLS], mean, or both last.
        """
        last = pool_states(self.drop_summary(states), self.config.pooling)
        if not self.config.summary_tokens:
            return last
        return torch.cat([states[:, -self.config.summary_tokens :].flatten(1), last], dim=-1)

    def project(self, states: Tensor) -> Tensor:
        """Pool and project states (B, 1 + M + S, width) -> (B, embed_dim), not normalised."""
        return self.projection(self.pool(states))


def _create_vit(config: ImageConfig) -> VisionTransformer:
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
        _start_positions(vit.pos_embed, config.tower_grid, config.position)
    return vit


def _attach(vit: nn.Module, name: str, options: dict[str, Any]) -> None:
    try:
        attach(vit, name, options.pop("roles", None), **options)
    except ValueError as error:
        raise ConfigError(f"image.positions: {error}") from error


@torch.no_grad()
def _start_positions(table: Tensor, grid: tuple[int, int], amplitude: float) -> None:
    """Fill the table of learned positions, (1, 1 + M, width), with 2D sines."""
    # From small random vectors a probe locates a single object after three times the steps.
    sines = build_sincos2d_pos_embed(list(grid), table.shape[-1], temperature=SINE_BASE)
    table.zero_()
    table[0, 1:] = amplitude * sines
