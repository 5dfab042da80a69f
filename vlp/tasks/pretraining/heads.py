"""Weights that the objectives' heads start from."""

from __future__ import annotations

from collections.abc import Mapping

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


def start_mlm_head(modules: Mapping[str, nn.Module], bert: str) -> list[LoadReport]:
    """Copy a public BERT's head of masked language modelling, as ALBEF does; return the copies.

    The list is empty where a side lacks the head or sizes differ.
    """
    if "mlm_head" not in modules:
        return []
    heads = nn.ModuleDict({"mlm_head": modules["mlm_head"]})
    state, weights = heads.state_dict(), {}
    try:
        for name, (_, tensor) in current_names(read_bert(bert).state, bert).items():
            module, _, kind = name.rpartition(".")
            key = f"{_BERT_HEAD.get(module)}.{kind}"
            if key in state and state[key].shape == tensor.shape:
                weights[key] = tensor
        if weights.keys() != state.keys():
            return []
        return [copy_weights(heads, weights, f"{bert} -> MLM head", [], ())]
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"text.weights: {error}") from error


def start_heads(modules: Mapping[str, nn.Module], init_from: str) -> list[LoadReport]:
    """Copy the weights of a model folder's heads that fit; return the copies made."""
    module_dict = nn.ModuleDict(dict(modules))
    state = module_dict.state_dict()
    try:
        heads = read_heads(local_folder(init_from))
        fitting = {
            name: head
            for name, head in heads.items()
            if name in state and head.shape == state[name].shape
        }
        unused = sorted(heads.keys() - fitting.keys())
        report = copy_weights(module_dict, fitting, f"{init_from}/{HEADS}", unused, (".+",))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return [report] if heads else []
