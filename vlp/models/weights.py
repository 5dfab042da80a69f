"""Public weights: declared key maps from BERT and ViT/DeiT, and a report of what each did.

Nothing loads silently by halves: a source key that no rule maps is an error unless its prefix is
declared as unused, and every target that stays at its own start is named in the report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlp.models.vlp import VLPModel

_BERT_LAYER = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "feed_forward.expand",
    "output.dense": "feed_forward.contract",
    "output.LayerNorm": "feed_forward_norm",
}
_BERT_EMBEDDING = {
    "embeddings.word_embeddings": "embedding.word",
    "embeddings.position_embeddings": "embedding.position",
    "embeddings.token_type_embeddings": "embedding.token_type",
    "embeddings.LayerNorm": "embedding.norm",
}
_BERT_UNUSED = ("pooler.", "cls.", "embeddings.position_ids")
_VIT_UNUSED = ("head.", "head_dist.", "pre_logits.", "fc_norm.", "dist_token")


class LoadReport(NamedTuple):
    """Names of target tensors that were matched, resized or left, and of source keys not used."""

    source: str
    matched: list[str]
    resized: list[str]
    missing: list[str]
    unused: list[str]

    def __str__(self) -> str:
        """One line for the log."""
        parts = [f"{len(self.matched)} matched", f"{len(self.resized)} resized"]
        if self.missing:
            parts.append(f"{len(self.missing)} keep their own start ({', '.join(self.missing)})")
        return f"{self.source}: {'; '.join(parts)}; {len(self.unused)} not used"


def load_public_weights(model: VLPModel) -> list[LoadReport]:
    """Start the encoders from what `text.weights` and `image.weights` of the configuration name.

    BERT's first layers go to the text encoder, the following ones to the cross-modal encoder,
    whose cross-attention has no counterpart and keeps its start. A ViT's first blocks go to the
    image encoder; positions of another grid are resampled.

    Raises:
        FileNotFoundError: weights that are neither here nor on the hub.
        ValueError: keys that no rule maps, or shapes that do not fit.
    """
    reports = []
    if model.config.text.weights:
        name = model.config.text.weights
        reports += load_bert(model, bert_state(name), name)
    if model.config.image.weights:
        name = model.config.image.weights
        reports.append(load_vit(model, vit_state(name), name))
    return reports


def bert_state(folder_or_name: str) -> dict[str, Tensor]:
    """State dict of a public BERT, from a folder or the hub, without a `bert.` prefix."""
    from transformers import BertModel

    try:
        bert = BertModel.from_pretrained(folder_or_name, add_pooling_layer=False)
    except OSError as error:
        raise FileNotFoundError(f"text.weights: cannot load {folder_or_name}: {error}") from error
    return dict(bert.state_dict())


def vit_state(file_or_name: str) -> dict[str, Tensor]:
    """State dict of a ViT or DeiT in timm's names, from a file or a timm model name."""
    file = Path(file_or_name)
    if file.suffix == ".safetensors" and file.is_file():
        from safetensors.torch import load_file

        return load_file(file)
    if file.suffix in (".pth", ".pt", ".bin"):
        if not file.is_file():
            raise FileNotFoundError(f"image.weights: there is no file {file}")
        state = torch.load(file, map_location="cpu", weights_only=True)
        return state.get("model", state)
    import timm

    try:
        return dict(timm.create_model(file_or_name, pretrained=True).state_dict())
    except RuntimeError as error:
        raise FileNotFoundError(f"image.weights: cannot load {file_or_name}: {error}") from error


def load_bert(model: VLPModel, state: Mapping[str, Tensor], source: str) -> list[LoadReport]:
    """BERT layers 1..k to the text encoder, k+1..k+c to the cross-modal encoder."""
    text_layers = model.config.text.layers
    last = text_layers + model.config.cross.layers
    text: dict[str, Tensor] = {}
    cross: dict[str, Tensor] = {}
    unused, unknown = [], []
    for key, tensor in state.items():
        name = key.removeprefix("bert.")
        module, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", module)
        if module in _BERT_EMBEDDING:
            text[f"{_BERT_EMBEDDING[module]}.{kind}"] = tensor
        elif layer and layer[2] in _BERT_LAYER:
            number, target = int(layer[1]), _BERT_LAYER[layer[2]]
            if number < text_layers:
                text[f"layers.{number}.{target}.{kind}"] = tensor
            elif number < last:
                cross[f"layers.{number - text_layers}.{target}.{kind}"] = tensor
            else:
                unused.append(key)
        elif name.startswith(_BERT_UNUSED):
            unused.append(key)
        else:
            unknown.append(key)
    if unknown:
        raise ValueError(f"{source}: no rule maps these keys of BERT: {', '.join(unknown)}")
    return [
        _copy(model.text_encoder, text, f"{source} -> text encoder", unused, ("projection.",)),
        _copy(
            model.cross_encoder,
            cross,
            f"{source} -> cross-modal encoder",
            [],
            tuple(
                f"layers.{layer}.{part}"
                for layer in range(model.config.cross.layers)
                for part in ("cross_attention.", "cross_norm.")
            ),
        ),
    ]


def load_vit(model: VLPModel, state: Mapping[str, Tensor], source: str) -> LoadReport:
    """The first blocks of a ViT or DeiT in timm's names; positions are resampled to the grid."""
    from timm.layers.pos_embed import resample_abs_pos_embed

    encoder = model.image_encoder
    rows, columns = model.config.image.grid
    found: dict[str, Tensor] = {}
    unused, resized = [], []
    for key, tensor in state.items():
        block = re.match(r"blocks\.(\d+)\.", key)
        if key.startswith(_VIT_UNUSED) or (block and int(block[1]) >= model.config.image.layers):
            unused.append(key)
            continue
        if key == "pos_embed" and tensor.shape[1] != 1 + rows * columns:
            tensor = resample_abs_pos_embed(
                tensor, [rows, columns], num_prefix_tokens=1, verbose=False
            )
            resized.append("vit.pos_embed")
        found[f"vit.{key}"] = tensor
    report = _copy(encoder, found, f"{source} -> image encoder", unused, ("projection.",))
    return report._replace(
        resized=resized, matched=[name for name in report.matched if name not in resized]
    )


def _copy(
    module: nn.Module,
    found: Mapping[str, Tensor],
    source: str,
    unused: list[str],
    may_miss: tuple[str, ...],
) -> LoadReport:
    target = module.state_dict()
    unknown = sorted(set(found) - set(target))
    if unknown:
        raise ValueError(f"{source}: these keys have no place here: {', '.join(unknown)}")
    missing = [name for name in target if name not in found]
    lost = [name for name in missing if not name.startswith(may_miss)]
    if lost:
        raise ValueError(f"{source}: these weights are missing: {', '.join(lost)}")
    for name, tensor in found.items():
        if tensor.shape != target[name].shape:
            raise ValueError(
                f"{source}: {name} is {tuple(tensor.shape)} there and "
                f"{tuple(target[name].shape)} here"
            )
    with torch.no_grad():
        for name, tensor in found.items():
            target[name].copy_(tensor)
    whole = sorted({".".join(name.split(".")[2:3]) or name for name in missing})
    return LoadReport(source, sorted(found), [], whole, unused)
