"""Initialisation of a decoder from the cross-modal encoder, or a public BERT's last layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vlp.config import ConfigError
from vlp.models.decoder.answer_decoder import AnswerDecoder
from vlp.models.pretrained.load import (
    BERT_EMBEDDING,
    BERT_LAYER,
    LoadReport,
    bert_state,
    copy_weights,
)
from vlp.models.vlp import VLPModel

# Cross-attention has no counterpart in BERT, the output layer none in an encoder.
_CROSS = (r"layers\.\d+\.cross_attention\.", r"layers\.\d+\.cross_norm\.")
_HEAD = r"head\."


def start_decoder(decoder: AnswerDecoder, model: VLPModel) -> list[LoadReport]:
    """Start layers and embedding as the decoder's configuration says.

    A head is the caller's to start: pretraining's `mlm_head` fits it.

    Raises:
        FileNotFoundError: `weights` is neither a folder nor on the hub.
        ValueError: keys that no rule maps, or shapes that do not fit.
        ConfigError: the weights have another number of heads, or the text encoder is a tower from
            outside, which has no embedding that answers are written with.
    """
    config = decoder.config
    if model.config.text.architecture:
        raise ConfigError(
            "text.architecture: answers and captions are written with the embedding of our own "
            "BERT layers; start from a model whose text.architecture is null"
        )
    found, may_miss = _own_embedding(decoder, model), [_HEAD]
    if config.weights is not None:
        bert = bert_state(config.weights)
        there = (bert.settings or {}).get("num_attention_heads")
        here = config.heads or model.config.cross.heads
        if there not in (None, here):  # the same shapes, and another function
            raise ConfigError(
                f"{config.weights} has {there} heads and the decoder {here}; set "
                f"decoder.heads={there}"
            )
        own, unused, more = _bert_layers(decoder, bert.state, config.weights)
        # BERT's own words are those of the text encoder, before it was pretrained further.
        source = f"{config.weights} -> answer decoder"
    elif config.start == "cross":
        own, unused, more = _cross_layers(decoder, model)
        source = "cross-modal encoder -> answer decoder"
    else:
        own, unused, more = {}, [], [r"layers\."]
        source = "text encoder -> answer decoder"
    if not found and not own:
        return []
    return [copy_weights(decoder, found | own, source, unused, (*may_miss, *more))]


def _own_embedding(decoder: AnswerDecoder, model: VLPModel) -> dict[str, Tensor]:
    if decoder.embedding is None:
        return {}
    state = model.text_encoder.embedding.state_dict()
    return {f"embedding.{name}": tensor for name, tensor in state.items()}


def _cross_layers(
    decoder: AnswerDecoder, model: VLPModel
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Tensors by the decoder's names; layers that the encoder has not keep their own start."""
    here = decoder.state_dict()
    found: dict[str, Tensor] = {}
    unused = []
    for name, tensor in model.cross_encoder.state_dict().items():
        if name in here and ".positions." not in name:
            found[name] = tensor
        else:
            unused.append(name)
    layers = {int(name.split(".")[1]) for name in found}
    width = model.config.text.width
    for number in layers:
        # Layouts without an output projection hand on what was attended to as it is.
        part = f"layers.{number}.cross_attention.output"
        if f"{part}.weight" not in found:
            like = here[f"{part}.weight"]
            found[f"{part}.weight"] = torch.eye(width, dtype=like.dtype, device=like.device)
            found[f"{part}.bias"] = torch.zeros_like(here[f"{part}.bias"])
    further = [rf"layers\.{n}\." for n in range(len(decoder.layers)) if n not in layers]
    return found, unused, further


def _bert_layers(
    decoder: AnswerDecoder, state: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """The last layers of BERT, as many as the decoder has."""
    layers: dict[int, dict[str, Tensor]] = {}
    unused, unknown = [], []
    for key, tensor in state.items():
        name = key.removeprefix("bert.")
        module, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", module)
        if layer and layer[2] in BERT_LAYER:
            layers.setdefault(int(layer[1]), {})[f"{BERT_LAYER[layer[2]]}.{kind}"] = tensor
        elif module in BERT_EMBEDDING or name.startswith(("pooler.", "cls.", "embeddings.")):
            unused.append(key)
        else:
            unknown.append(key)
    if unknown:
        raise ValueError(f"{source}: no rule maps these keys of BERT: {', '.join(unknown)}")
    ours = len(decoder.layers)
    if len(layers) < ours:
        raise ValueError(f"{source} has {len(layers)} layers, the decoder {ours}")
    found = {
        f"layers.{number}.{name}": tensor
        for number, layer in enumerate(sorted(layers)[-ours:])
        for name, tensor in layers[layer].items()
    }
    return found, unused, list(_CROSS)
