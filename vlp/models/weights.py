"""Public weights: declared key maps from BERT and ViT/DeiT, and a report of what each did.

Nothing loads silently by halves: a source key that no rule maps is an error unless its prefix is
declared as unused, and every target that stays at its own start is named in the report. A whole
ALBEF checkpoint is `vlp.models.albef`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlp.models.vlp import VLPModel

BERT_LAYER = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "feed_forward.expand",
    "output.dense": "feed_forward.contract",
    "output.LayerNorm": "feed_forward_norm",
}
BERT_EMBEDDING = {
    "embeddings.word_embeddings": "embedding.word",
    "embeddings.position_embeddings": "embedding.position",
    "embeddings.token_type_embeddings": "embedding.token_type",
    "embeddings.LayerNorm": "embedding.norm",
}
_BERT_UNUSED = ("pooler.", "cls.", "embeddings.position_ids")
_VIT_UNUSED = ("head.", "head_dist.", "pre_logits.", "fc_norm.", "dist_token")

POSITION_TABLES = r"(.+\.)?positions\."
"""Target names that no public checkpoint has: the tables of ACE-RPE and other encodings."""


class LoadReport(NamedTuple):
    """What became of the tensors on both sides.

    matched and resized: names of target tensors; missing: parts of the target that keep their own
    start, `*` standing for every layer; unused: source keys; notes: values that were changed.
    """

    source: str
    matched: list[str]
    resized: list[str]
    missing: list[str]
    unused: list[str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for the log."""
        parts = [f"{len(self.matched)} matched", f"{len(self.resized)} resized"]
        if self.missing:
            parts.append(f"{len(self.missing)} keep their own start ({', '.join(self.missing)})")
        parts += [f"{len(self.unused)} not used", *self.notes]
        return f"{self.source}: {'; '.join(parts)}"


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
        if module in BERT_EMBEDDING:
            text[f"{BERT_EMBEDDING[module]}.{kind}"] = tensor
        elif layer and layer[2] in BERT_LAYER:
            number, target = int(layer[1]), BERT_LAYER[layer[2]]
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
        copy_weights(
            model.text_encoder, text, f"{source} -> text encoder", unused, (r"projection\.",)
        ),
        copy_weights(
            model.cross_encoder,
            cross,
            f"{source} -> cross-modal encoder",
            [],
            (POSITION_TABLES, r"layers\.\d+\.cross_attention\.", r"layers\.\d+\.cross_norm\."),
        ),
    ]


def load_vit(model: VLPModel, state: Mapping[str, Tensor], source: str) -> LoadReport:
    """The first blocks of a ViT or DeiT in timm's names; positions are resampled to the grid."""
    found: dict[str, Tensor] = {}
    unused, resized = [], []
    for key, tensor in state.items():
        block = re.match(r"blocks\.(\d+)\.", key)
        if key.startswith(_VIT_UNUSED) or (block and int(block[1]) >= model.config.image.layers):
            unused.append(key)
            continue
        if key == "pos_embed":
            fitted = resample_positions(tensor, model.config.image.grid, source)
            if fitted is not tensor:
                resized.append("vit.pos_embed")
            tensor = fitted
        found[f"vit.{key}"] = tensor
    report = copy_weights(
        model.image_encoder, found, f"{source} -> image encoder", unused, (r"projection\.",)
    )
    return report._replace(
        resized=resized, matched=[name for name in report.matched if name not in resized]
    )


def resample_positions(positions: Tensor, grid: tuple[int, int], source: str) -> Tensor:
    """A ViT's learned positions on another grid: timm's bicubic resampling, [CLS] unchanged.

    Args:
        positions: (1, 1 + M, width), of a square grid.
        grid: (rows, columns) wanted.
        source: what the positions belong to, for the message.

    Returns:
        (1, 1 + rows * columns, width); the tensor itself where the number of positions fits.

    Raises:
        ValueError: the positions are not [CLS] and a square grid.
    """
    from timm.layers.pos_embed import resample_abs_pos_embed

    rows, columns = grid
    if positions.ndim == 3 and positions.shape[1] == 1 + rows * columns:
        return positions
    if positions.ndim != 3 or math.isqrt(positions.shape[1] - 1) ** 2 != positions.shape[1] - 1:
        raise ValueError(
            f"{source}: positions {tuple(positions.shape)} are not (1, 1 + a square, width)"
        )
    return resample_abs_pos_embed(positions, [rows, columns], num_prefix_tokens=1, verbose=False)


def copy_weights(
    module: nn.Module,
    found: Mapping[str, Tensor],
    source: str,
    unused: list[str],
    may_miss: tuple[str, ...],
) -> LoadReport:
    """Copy tensors into a module once everything has been checked.

    Args:
        module: the target.
        found: tensors by the target's names.
        source: where they come from, for messages and the report.
        unused: source keys that are declared as unused.
        may_miss: patterns of the names' beginnings that may keep their own start; the first one
            that matches names the part in the report.

    Raises:
        ValueError: a name without a place, a target that nothing fills, or shapes that differ.
    """
    target = module.state_dict()
    unknown = sorted(set(found) - set(target))
    if unknown:
        raise ValueError(f"{source}: these keys have no place here: {', '.join(unknown)}")
    lost, kept = [], set()
    for name in target:
        if name not in found:
            match = next(filter(None, (re.match(part, name) for part in may_miss)), None)
            if match:
                kept.add(re.sub(r"\.\d+\.", ".*.", match[0]).rstrip("."))
            else:
                lost.append(name)
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
    return LoadReport(source, sorted(found), [], sorted(kept), unused)
