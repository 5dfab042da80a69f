"""Image towers from outside: any ViT-like model of timm that gives tokens on a square grid."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers.patch_embed import PatchEmbed
from torch import Tensor, nn

from vlp.config import ConfigError
from vlp.models.config import ImageConfig


def create_image_tower(config: ImageConfig) -> nn.Module:
    """Make the model that `image.architecture` names, at the configured size, without a head.

    It has `num_prefix_tokens`, `num_features` and `forward_features` as timm's ViTs have them.

    Raises:
        ConfigError: timm has no such model or makes none with these options, it gives no tokens on
            a grid, or its patches are of another size.
    """
    import timm

    name = str(config.architecture)
    try:
        tower: Any = timm.create_model(
            name,
            pretrained=False,
            num_classes=0,
            img_size=config.image_size,
            **config.architecture_options,
        )
        tower.reset_classifier(0, "")  # drops an attention pool, which no one reads
    except Exception as error:  # of any name, option or size
        raise ConfigError(
            f"image.architecture {name}: timm makes no ViT of {config.image_size} px of it with "
            f"image.architecture_options {dict(config.architecture_options)} ({error})"
        ) from error
    embed: Any = next((part for part in map(tower.__dict__["_modules"].get, _EMBEDS) if part), None)
    size = getattr(embed, "patch_size", None)
    if size is None or not isinstance(getattr(tower, "num_prefix_tokens", None), int):
        raise ConfigError(
            f"image.architecture {name}: a {type(tower).__name__} gives no [CLS], registers and "
            "patches on one grid; choose a ViT, DeiT, EVA or BEiT"
        )
    grid = getattr(embed, "grid_size", None)
    patch = config.image_size // grid[0] if grid else size if isinstance(size, int) else size[0]
    if patch != config.patch_size:
        raise ConfigError(
            f"image.patch_size is {config.patch_size}, and {name} has patches of {patch} px; set "
            f"image.patch_size={patch} and an image_size that is a multiple of it"
        )
    return tower


def fit_image_tower(tower: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bring weights to a tower's names and sizes, as timm does: its positions are resampled.

    Args:
        tower: of timm.
        state: by timm's names, or by those of the tower's authors where timm reads them.

    Raises:
        ValueError: timm cannot convert them.
    """
    # The class of a tower with encodings is made of timm's.
    modules = (sys.modules[kind.__module__] for kind in type(tower).__mro__)
    known = (getattr(module, "checkpoint_filter_fn", None) for module in modules)
    convert = next(filter(None, known), None)
    try:
        return dict(convert(dict(state), tower)) if convert else dict(state)
    except Exception as error:  # of any name or shape
        raise ValueError(
            f"timm cannot convert these weights for a {type(tower).__name__} ({error!r})"
        ) from error


_EMBEDS = ("patch_embed", "embeds")


def require_editable(config: ImageConfig) -> None:
    """Require a tower whose patch embeddings (B, M, width) can be replaced, as MIM does.

    Raises:
        ConfigError: they cannot, or they are of another width than the model.
    """
    with torch.device("meta"):
        tower: Any = create_image_tower(config)
    embed = getattr(tower, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or not embed.flatten or tower.num_features != config.width:
        raise ConfigError(
            f"objectives.mim: the patches of {config.architecture}, {tower.num_features} channels, "
            f"cannot be replaced by a mask token of {config.width}; leave mim out"
        )
