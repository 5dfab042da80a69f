"""Public weights of towers from outside, which keep their own layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlp.models.pretrained.published import read_vit
from vlp.models.pretrained.weight_copy import LoadReport, copy_weights
from vlp.models.towers.image import fit_image_tower
from vlp.models.vlp import VLPModel

_OLD_KINDS = {"gamma": "weight", "beta": "bias"}
"""Of a norm, in checkpoints that were converted from TensorFlow."""
IMAGE_OWN = (r"projection\.", r"adapter\.", r"vit\.(\S+\.)?positions\.")
"""Parts of an image encoder that public weights know nothing of."""
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
    report = copy_weights(encoder, found, source, unused, IMAGE_OWN)
    matched = [name for name in report.matched if name not in resized]
    return report._replace(matched=matched, resized=resized)


def load_text_tower(model: VLPModel, state: Mapping[str, Tensor], source: str) -> LoadReport:
    """Start the text tower from public weights of the same model, whose heads are left out.

    Args:
        model: has a tower of `text.architecture`.
        state: by the names of transformers, with the model's prefix (`roberta.`) or without.
        source: what the report and messages call it.

    Raises:
        ValueError: keys without a place, weights that are missing, or shapes that do not fit.
    """
    encoder = model.text_encoder
    tower: Any = encoder.tower
    parts = {name for name, _ in tower.named_children()}
    names = todays_names(state, source, f"{tower.base_model_prefix}.")
    unused = [
        name
        for name in names
        if name.partition(".")[0] not in parts or name.endswith(".position_ids")
    ]
    found = {f"tower.{name}": names[name][1] for name in names.keys() - unused}
    return copy_weights(
        encoder, found, f"{source} -> text encoder", unused, (r"projection\.", r"adapter\.")
    )


def todays_names(
    state: Mapping[str, Tensor], source: str, prefix: str = "bert."
) -> dict[str, tuple[str, Tensor]]:
    """Today's name -> key there and tensor: without the prefix, and a norm has weight and bias.

    Raises:
        ValueError: two keys are the same weight.
    """
    found: dict[str, tuple[str, Tensor]] = {}
    for key, tensor in state.items():
        module, dot, kind = key.removeprefix(prefix).rpartition(".")
        kind = _OLD_KINDS.get(kind, kind) if module.endswith("LayerNorm") else kind
        name = f"{module}{dot}{kind}"
        if name in found:
            raise ValueError(f"{source}: {found[name][0]} and {key} are the same weight")
        found[name] = key, tensor
    return found
