"""Features of one image, for the actions that share them."""

from __future__ import annotations

import torch
from PIL import Image

from vlp.models.features import ImageFeatures
from vlp.models.folder import Loaded


@torch.no_grad()
def encode_one(loaded: Loaded, image: Image.Image, device: torch.device) -> ImageFeatures:
    """Encode an image of any size, as a batch of one, on the device of the model.

    The features carry no gradients, but may take part in what has some, as Grad-CAM's do.
    """
    return loaded.model.encode_image(loaded.preprocess(image)[None].to(device))
