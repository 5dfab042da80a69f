"""Checks of checkpoint settings that tensor shapes cannot reveal (heads, functions).

Weights of another number of heads have the same shapes and compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from vlp.config import ConfigError
from vlp.data.image.transforms import FILE_NAME, Preprocessing
from vlp.layers.blocks import NORM_EPS
from vlp.models.config import ModelConfig

# What transformers takes where a config.json is silent.
_DEFAULTS = {
    "model_type": "bert",
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
    "is_decoder": False,
}
_FIXED = {
    "model_type": ("bert",),
    "hidden_act": ("gelu", "gelu_python"),  # one function, two codes of it
    "layer_norm_eps": (NORM_EPS,),
    "type_vocab_size": (2,),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
}
"""Settings of BERT that the model has no key for, with what it computes."""

TRUSTED = "the source does not tell its heads: taken as {}"


def check_bert(
    settings: Mapping[str, Any] | None,
    config: ModelConfig,
    source: str,
    with_cross: bool,
    with_text: bool = True,
) -> list[str]:
    """Hold a BERT's config.json against the model's configuration.

    Args:
        settings: None where the source has none.
        config: the model's.
        source: what the message calls it.
        with_cross: whether the cross-modal encoder takes layers too.
        with_text: whether the text encoder takes its layers.

    Returns:
        Notes for the report.
    """
    if settings is None:
        return [TRUSTED.format(config.text.heads if with_text else config.cross.heads)]
    there = _DEFAULTS | dict(settings)
    wrong = [
        f"{key} is {there[key]!r} there and {allowed[0]!r} in this model, which has no other"
        for key, allowed in _FIXED.items()
        if there[key] not in allowed
    ]
    wanted = [("hidden_size", "text.width", config.text.width)]
    of_text = [
        ("num_attention_heads", "text.heads", config.text.heads),
        ("intermediate_size", "text.intermediate", config.text.intermediate),
        ("max_position_embeddings", "text.max_positions", config.text.max_positions),
        ("vocab_size", "text.vocab_size", config.text.vocab_size),
    ]
    if with_text:
        wanted += of_text
    if with_cross:
        wanted += [
            ("num_attention_heads", "cross.heads", config.cross.heads),
            ("intermediate_size", "cross.intermediate", config.cross.intermediate),
        ]
    # One that is silent about a size is held by its shapes.
    wrong += [
        f"{key} is {there[key]} there and {ours} is {here} here; set {ours}={there[key]}"
        for key, ours, here in wanted
        if there.get(key, here) != here
    ]
    if wrong:
        raise ConfigError(f"{source} does not fit: {'; '.join(wrong)}")
    return []


def check_vit(there: Mapping[str, Any] | None, here: Mapping[str, Any], source: str) -> list[str]:
    """Hold a ViT's settings against the image encoder's, both as `vit_settings` gives them.

    Another epsilon of the norms is noted alone: transformers states 1e-12 for the very weights that
    timm has with 1e-6.

    Returns:
        Notes for the report.
    """
    if there is None:
        return [TRUSTED.format(here["heads"])]
    wrong = []
    if there["heads"] != here["heads"]:
        wrong.append(
            f"it has {there['heads']} heads and image.heads is {here['heads']}; "
            f"set image.heads={there['heads']}"
        )
    wrong += [
        f"{key} is {there[key]} there and {here[key]} in this model, which has no other"
        for key in ("block", "activation")
        if there[key] != here[key]
    ]
    if wrong:
        raise ConfigError(f"{source} does not fit: {'; '.join(wrong)}")
    if there["norm_eps"] != here["norm_eps"]:
        return [f"norms add {there['norm_eps']:g} to the variance there, {here['norm_eps']:g} here"]
    return []


def check_folder(config: ModelConfig, trained: ModelConfig, folder: Path, name: str) -> None:
    """Require that a model folder's weights read what they were trained on, which no shape tells.

    Args:
        config: of the model that starts from them.
        trained: of the folder.
        folder: where it lies.
        name: what messages call it.

    Raises:
        ValueError: they do not; the key is named.
    """
    keys = ["image.pooling", "image.pooled_layers", "text.pooling", "cross.heads"]
    keys += ["image.heads"] if config.image.architecture is None else []
    keys += ["text.heads"] if config.text.architecture is None else []
    pairs = [(key, attrgetter(key)(config), attrgetter(key)(trained)) for key in keys]
    if (folder / FILE_NAME).is_file():
        pixels = Preprocessing.load(folder)
        mean, deviation = config.image.statistics
        pairs += [("image.mean", mean, pixels.mean), ("image.std", deviation, pixels.std)]
    for key, here, there in pairs:
        if here != there:
            said = str(list(there) if isinstance(there, tuple) else there).replace(" ", "")
            raise ValueError(f"{name} was trained with {key} {there}, not {here}: set {key}={said}")
