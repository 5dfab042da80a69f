"""What tells one image tower from another, and whether stored features are a model's own."""

from __future__ import annotations

import hashlib
from math import prod

import torch

from vlp.config import ConfigError
from vlp.data.features.store import StoredFeatures, TowerKey
from vlp.models.vlp import VLPModel

# All else of the configuration is in the weights, or comes after the tower.
_OF_ANY = {"image_size", "patch_size", "average_hflip"}
_OF_A_TOWER = _OF_ANY | {"architecture", "architecture_options"}
_OF_OUR_VIT = _OF_ANY | {"width", "layers", "heads", "intermediate"}


def tower_key(model: VLPModel) -> TowerKey:
    """Return the settings of a model's image tower, and a checksum of its weights as they are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.image_encoder.vit.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    config = model.config.image
    settings = _OF_A_TOWER if config.architecture else _OF_OUR_VIT
    if config.summary_tokens:
        settings = settings | {"pooled_layers", "pooling"}
    return TowerKey(config.model_dump(mode="json", include=settings), digest.hexdigest())


def require_tower(features: StoredFeatures | None, model: VLPModel) -> None:
    """Require that stored features, if there are any, are those of a model's image tower."""
    if features is None:
        return
    features.require_tower(tower_key(model))
    config = model.config.image
    tokens = features.header.tokens - config.summary_tokens
    if tokens not in (1 + prod(config.tower_grid), 1 + prod(config.grid)):
        raise ConfigError(
            f"{features.folder}: holds {tokens} tokens of an image, and image.pool {config.pool} "
            f"asks for {1 + prod(config.grid)}; make a folder with this image.pool, or with 1"
        )


def require_frozen_tower(features: StoredFeatures | None, model: VLPModel) -> None:
    """Require the same of a model that is trained, and that its tower is frozen."""
    if features is not None and not model.image_encoder.frozen:
        raise ConfigError(
            "data.features holds what the image tower gives now, and training would change the "
            "tower; set model.image.trainable=0"
        )
    require_tower(features, model)
