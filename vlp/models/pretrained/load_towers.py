"""Public weights of towers from outside, which keep their own layers."""

from __future__ import annotations

from vlp.models.pretrained.published import read_vit
from vlp.models.pretrained.weight_copy import LoadReport, copy_weights
from vlp.models.towers.image import fit_image_tower
from vlp.models.vlp import VLPModel

_IMAGE_UNUSED = ("head", "pre_logits.", "fc_norm.", "attn_pool.", "mask_token")


def load_image_tower(model: VLPModel, name: str) -> LoadReport:
    """Start the image tower from public weights; positions are resampled as timm does.

    Args:
        model: has a tower of `image.architecture`.
        name: as `read_vit` takes it.

    Raises:
        FileNotFoundError: it is neither here nor on the hub.
        ValueError: a file cannot be read, or is of another tower.
    """
    encoder, source = model.image_encoder, f"{name} -> {model.config.image.architecture}"
    there = read_vit(name, with_settings=False).state
    fitted = fit_image_tower(encoder.vit, there)
    here = encoder.vit.state_dict()
    unused = [key for key in fitted if key not in here and key.startswith(_IMAGE_UNUSED)]
    found = {f"vit.{key}": tensor for key, tensor in fitted.items() if key not in unused}
    resized = [
        f"vit.{key}"
        for key, tensor in there.items()
        if fitted.get(key, tensor).shape != tensor.shape
    ]
    report = copy_weights(encoder, found, source, unused, (r"projection\.", r"adapter\."))
    matched = [name for name in report.matched if name not in resized]
    return report._replace(matched=matched, resized=resized)
