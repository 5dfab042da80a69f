"""A model folder as the start of fine-tuning, where its configuration may change a little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from vlp.config import ConfigError, merged
from vlp.data.image.transforms import Preprocessing
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.config import ModelConfig
from vlp.models.folder import Loaded, plain_config, read_heads, start_from
from vlp.models.lora import add_lora
from vlp.models.pretrained.load import LoadReport
from vlp.models.pretrained.local_copy import CONFIG, local_folder
from vlp.models.vlp import VLPModel

DELTA = 0.05
"""Anchor threshold where the folder has none: the paper of ACE-RPE has this one (Table 7)."""


def start_parts(start: str, changes: Mapping[str, Any]) -> tuple[Loaded, LoadReport]:
    """Load a model folder, some of its configuration changed, as the start of fine-tuning.

    Args:
        start: model folder, or a name on the hub.
        changes: of the folder's configuration, key by key: `{image: {image_size: 384}}`. Image
            positions are resampled; encodings and projections that the folder lacks start anew.
            Tasks with a head leave the anchor threshold as it is, retrieval and grounding move it
            on: one that never ran becomes `DELTA`.
    """
    try:
        folder = local_folder(start)
        plain = plain_config(folder / CONFIG)
    except OSError as error:
        raise ConfigError(f"start: {start} is no model folder ({error})") from error
    try:
        config = ModelConfig.model_validate(merged(plain, changes))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(
            f"model: with these changes {start} has no valid configuration: {key or 'the model'}: "
            f"{problem['msg']}"
        ) from error
    for part in ("text", "image", "cross"):
        if (changes.get(part) or {}).get("weights"):
            raise ConfigError(
                f"model.{part}.weights: fine-tuning takes all weights from {start}; leave it out"
            )
    model = VLPModel(config)
    try:
        report = start_from(model, folder)
        add_lora(model)
        heads = read_heads(folder)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"start: {error}") from error
    if "anchor" in config.cross.position and model.anchor_threshold == 0:
        model.anchor_threshold.fill_(DELTA)
    text = TextProcessor.load(folder, config.text.max_tokens)
    before = Preprocessing.load(folder)
    preprocess = Preprocessing(config.image.image_size, before.mean, before.std)
    return Loaded(model, text, preprocess, heads, folder), report
