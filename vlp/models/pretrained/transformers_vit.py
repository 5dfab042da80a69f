"""A ViT or DeiT as transformers stores it, by the names that timm has for the same tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_OUTER = {
    "embeddings.cls_token": "cls_token",
    "embeddings.distillation_token": "dist_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "classifier": "head",
    "cls_classifier": "head",
    "distillation_classifier": "head_dist",
    "pooler.dense": "pre_logits.fc",
}
_LAYER = {
    "layernorm_before": "norm1",
    "attention.output.dense": "attn.proj",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
_ATTENTION = "attention.attention."
_PARTS = ("query", "key", "value")
_LAYER_NAME = re.compile(r"encoder\.layer\.(\d+)\.(.+)")


def timm_names(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The same tensors by timm's names; query, key and value stacked as one.

    Raises:
        ValueError: keys that no rule maps, or a layer without all of query, key and value.
    """
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in state.items():
        name = re.sub(r"^(vit|deit)\.", "", key)
        module, kind = (name, "") if name in _OUTER else _split(name)
        layer = _LAYER_NAME.fullmatch(module)
        if module in _OUTER:
            found[f"{_OUTER[module]}{kind}"] = tensor
        elif layer and layer[2] in _LAYER:
            found[f"blocks.{layer[1]}.{_LAYER[layer[2]]}{kind}"] = tensor
        elif layer and layer[2].removeprefix(_ATTENTION) in _PARTS:
            stack = stacks.setdefault(f"blocks.{layer[1]}.attn.qkv{kind}", {})
            stack[layer[2].removeprefix(_ATTENTION)] = tensor
        else:
            unknown.append(key)
    if unknown:
        raise ValueError(f"{source}: no rule maps these keys of a ViT: {', '.join(unknown)}")
    for name, stack in stacks.items():
        if missing := [part for part in _PARTS if part not in stack]:
            raise ValueError(f"{source}: {name} lacks its {' and '.join(missing)}")
        found[name] = torch.cat([stack[part] for part in _PARTS])
    return found


def timm_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a transformers configuration to the keys of `published.vit_settings`."""
    act = config.get("hidden_act", "gelu")
    return {
        "heads": config.get("num_attention_heads", 12),
        "block": "Block",
        "activation": "GELU(approximate='none')" if act == "gelu" else act,
        "norm_eps": config.get("layer_norm_eps", 1e-12),
    }


def _split(name: str) -> tuple[str, str]:
    module, dot, kind = name.rpartition(".")
    return module, dot + kind
