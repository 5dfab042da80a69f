"""What tells one image tower from another: its settings, and a checksum of its weights."""

from __future__ import annotations

import hashlib

import torch

from vlp.data.features.header import TowerKey
from vlp.models.vlp import VLPModel

# All else of the configuration is in the weights, or comes after the tower.
_SETTINGS = {"architecture", "image_size", "patch_size", "width", "layers", "heads", "intermediate"}


def tower_key(model: VLPModel) -> TowerKey:
    """Return the key of a model's image tower, as its weights are now."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.image_encoder.vit.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    settings = model.config.image.model_dump(mode="json", include=_SETTINGS, exclude_none=True)
    return TowerKey(settings, digest.hexdigest())
