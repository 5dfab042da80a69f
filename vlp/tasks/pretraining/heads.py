"""Initial weights of the objectives' heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from vlp.config import ConfigError
from vlp.models.folder import HEADS, read_heads
from vlp.models.pretrained.load import LoadReport, copy_weights, current_names
from vlp.models.pretrained.local_copy import local_folder
from vlp.models.pretrained.published import read_bert

_BERT_HEAD = {
    "cls.predictions.transform.dense": "mlm_head.dense",
    "cls.predictions.transform.LayerNorm": "mlm_head.norm",
    "cls.predictions": "mlm_head",
}
_DECODER = "cls.predictions.decoder.weight"
_WORD_EMBEDDING = "embeddings.word_embeddings.weight"


def start_mlm_head(modules: Mapping[str, nn.Module], bert: str) -> list[LoadReport]:
    """Copy a public BERT's MLM head, as ALBEF does, and return a list of one report.

    Copies nothing and returns an empty list if `modules` or `bert` has no MLM head, if shapes
    differ, or if the public head's decoder is not tied to its word embedding.
    """
    if "mlm_head" not in modules:
        return []
    heads = nn.ModuleDict({"mlm_head": modules["mlm_head"]})
    state, weights = heads.state_dict(), {}
    try:
        entries = current_names(read_bert(bert).state, bert)
        tensors = {name: tensor for name, (_, tensor) in entries.items()}
        decoder, embedding = tensors.get(_DECODER), tensors.get(_WORD_EMBEDDING)
        if decoder is not None and embedding is not None and not torch.equal(decoder, embedding):
            return []
        for name, tensor in tensors.items():
            module_name, _, parameter_name = name.rpartition(".")
            key = f"{_BERT_HEAD.get(module_name)}.{parameter_name}"
            if key in state and state[key].shape == tensor.shape:
                weights[key] = tensor
        if weights.keys() != state.keys():
            return []
        return [copy_weights(heads, weights, f"{bert} -> MLM head", [], ())]
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"text.weights: {error}") from error


def start_heads(modules: Mapping[str, nn.Module], init_from: str) -> list[LoadReport]:
    """Copy a model folder's head weights of equal name and shape, and return a list of one report.

    The list is empty if the folder has no heads.
    """
    module_dict = nn.ModuleDict(dict(modules))
    state = module_dict.state_dict()
    try:
        heads = read_heads(local_folder(init_from))
        same_shape = {
            name: weight
            for name, weight in heads.items()
            if name in state and weight.shape == state[name].shape
        }
        unused = sorted(heads.keys() - same_shape.keys())
        # Any weight may be missing: heads of other shapes keep their initial weights.
        report = copy_weights(module_dict, same_shape, f"{init_from}/{HEADS}", unused, (".+",))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return [report] if heads else []
