"""Sources of public weights: a folder, the hub, one file, or a timm model name."""

from __future__ import annotations

import logging
import pickle
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vlp.io import check_hub, may_be_on_hub, parse_json

logger = logging.getLogger(__name__)

# timm's names of a ViT's modules by transformers' names, outside of layers and in a layer.
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
    """Rename a ViT's tensors from transformers to timm; query, key and value are concatenated."""
    timm_state: dict[str, Tensor] = {}
    # Query, key and value by timm's name of their concatenation.
    qkv_parts: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in state.items():
        name = re.sub(r"^(vit|deit)\.", "", key)
        # Tokens and positions are parameters outside of a module, others end in `.weight`, `.bias`.
        module, suffix = name, ""
        if name not in _OUTER:
            module, dot, parameter = name.rpartition(".")
            suffix = dot + parameter
        layer = _LAYER_NAME.fullmatch(module)
        if module in _OUTER:
            timm_state[f"{_OUTER[module]}{suffix}"] = tensor
        elif layer and layer[2] in _LAYER:
            timm_state[f"blocks.{layer[1]}.{_LAYER[layer[2]]}{suffix}"] = tensor
        elif layer and layer[2].removeprefix(_ATTENTION) in _PARTS:
            parts = qkv_parts.setdefault(f"blocks.{layer[1]}.attn.qkv{suffix}", {})
            parts[layer[2].removeprefix(_ATTENTION)] = tensor
        else:
            unknown.append(key)
    if unknown:
        raise ValueError(f"{source}: no rule maps these keys of a ViT: {', '.join(unknown)}")
    for name, parts in qkv_parts.items():
        if missing := [part for part in _PARTS if part not in parts]:
            raise ValueError(f"{source}: {name} lacks its {' and '.join(missing)}")
        timm_state[name] = torch.cat([parts[part] for part in _PARTS])
    return timm_state


def timm_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a transformers configuration to the keys of `vit_settings`."""
    activation = config.get("hidden_act", "gelu")
    return {
        "heads": config.get("num_attention_heads", 12),
        "block": "Block",
        "activation": "GELU(approximate='none')" if activation == "gelu" else activation,
        "norm_eps": config.get("layer_norm_eps", 1e-12),
    }


# Keys of a state dict in training checkpoints of other projects, by priority.
KEYS = ("model", "state_dict")


def read_pth(file: str | Path) -> dict[str, Tensor]:
    """Read the state dict of a `.pth`, under `model` or `state_dict` or bare, and run no code."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        # mmap: momentum copies and optimiser states are not read from the disk.
        checkpoint = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # the unpickler lets KeyError, EOFError and others through
        pickled_type = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and pickled_type:
            raise ValueError(
                f"{path}: refused, because it holds a pickled {pickled_type[1]} and reading that "
                "may run code; if you trust the file, save its state dict alone: "
                "torch.save(torch.load(FILE, weights_only=False)['model'], NEW_FILE)"
            ) from None
        reason = str(error).partition("\n")[0].partition(". ")[0] or "it ends too early"
        raise ValueError(f"{path}: damaged, or not a checkpoint ({reason})") from error
    state = None
    if isinstance(checkpoint, Mapping):
        state = next((checkpoint[key] for key in KEYS if key in checkpoint), checkpoint)
        ema_keys = [key for key in checkpoint if str(key).endswith("_ema")]
        # In a bare state dict, "..._ema" would be a parameter.
        if ema_keys and state is not checkpoint:
            logger.warning("%s: the averaged weights in %s are not read", path, ema_keys[0])
    if not isinstance(state, Mapping) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        raise ValueError(
            f"{path}: holds no state dict, neither under {' or '.join(map(repr, KEYS))} nor at the "
            "top"
        )
    return dict(state)


CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")
_LOCAL, _HUB = "local-dir:", ("hf-hub:", "hf_hub:")


class Published(NamedTuple):
    """Public weights under the source's names, and settings that their shapes do not show."""

    state: dict[str, Tensor]
    settings: Any = None  # a BERT's config.json; a ViT's `vit_settings` or timm model; or unknown


def read_bert(name: str) -> Published:
    """Read a public BERT: a folder or hub name in transformers' format, or a single file."""
    if Path(name).suffix in _SUFFIXES and not Path(name).is_dir():
        return Published(read_tensors(Path(name)))
    config, weights = _find_files(name)
    return Published(read_tensors(weights), _read_config(config))


def read_vit(name: str) -> Published:
    """Read a public ViT or DeiT in timm's names: a file, folder, hub name, or timm model name.

    Folders and hub names are in timm's format (`save_for_hf`) or in transformers'.
    """
    if Path(name).suffix in _SUFFIXES and not Path(name).is_dir():
        return Published(read_tensors(Path(name)))
    if not (name.startswith((_LOCAL, *_HUB)) or "/" in name or Path(name).is_dir()):
        return _from_timm(name)
    config_file, weights = _find_files(name, PREPROCESSOR)
    config, state = _read_config(config_file), read_tensors(weights)
    if "architecture" in config:
        return Published(state, _network_of_folder(config_file.parent))
    if config.get("model_type") in ("vit", "deit"):
        settings = timm_settings(config)
        if (file := config_file.with_name(PREPROCESSOR)).is_file():
            settings |= _pixel_statistics(_read_config(file))
        return Published(timm_names(state, name), settings)
    raise ValueError(
        f"{config_file}: names neither a timm architecture nor model_type vit or deit "
        f"(model_type is {config.get('model_type')!r})"
    )


def _pixel_statistics(preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    if not preprocessor.get("do_normalize", True):
        return {}
    values = {key: preprocessor.get(f"image_{key}") for key in ("mean", "std")}
    # One number stands for all three channels.
    return {k: [v] * 3 if isinstance(v, int | float) else v for k, v in values.items()}


def vit_settings(vit: nn.Module, name: str) -> dict[str, Any]:
    """Return a ViT's settings that shapes do not show: heads, block class, activation, epsilon."""
    if not isinstance(vit, VisionTransformer):
        raise ValueError(f"{name} is a {type(vit).__name__}, not a vision transformer")
    block: Any = vit.blocks[0]
    return {
        "heads": block.attn.num_heads,
        "block": type(block).__name__,
        "activation": str(block.mlp.act),
        "norm_eps": block.norm1.eps,
    }


# Attributes of timm's modules that change outputs for given weights; the last are of RoPE.
_SETTINGS = (
    *("num_heads", "eps", "scale", "num_prefix_tokens", "gate_last", "rotate_half"),
    *("temperature", "in_pixels", "linear_bands", "ref_feat_shape", "normalize_coords"),
    *("grid_offset", "grid_indexing", "grid_type", "min_period", "max_period"),
)
# Modules without effect in evaluation.
_IDLE = ("Dropout", "DropPath", "Identity", "PatchDropout")


def network_settings(network: nn.Module) -> dict[str, str]:
    """Return module types, activations and `_SETTINGS` of a timm model, by module name."""
    settings = {}
    for name, module in network.named_modules():
        # A class of this package, with position encodings, counts as the timm class it extends.
        bases = (base for base in type(module).__mro__ if not base.__module__.startswith("vlp."))
        module_class = next(base for base in bases if "." in base.__module__)
        if module_class.__name__ in _IDLE:
            continue
        # Modules without parameters, such as activations, show their options.
        is_leaf = not (list(module.parameters()) or list(module.children()))
        settings[f"{name} is"] = str(module) if is_leaf else module_class.__name__
        for key in _SETTINGS:
            value = getattr(module, key, None)
            if isinstance(value, int | float):
                settings[f"{name}.{key} is"] = f"{value:g}"
            elif isinstance(value, str | tuple):
                settings[f"{name}.{key} is"] = str(value)
    return settings


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read a state dict from `.safetensors`, or from a file of `torch.save`."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if file.suffix != ".safetensors":
        return read_pth(file)
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged ({error})") from error


def _find_files(name: str, optional: str | None = None) -> tuple[Path, Path]:
    """Return the configuration file and weights file of a folder or hub name.

    optional: a further file to download from the hub, if it has one of this name.
    """
    folder = Path(name.removeprefix(_LOCAL))
    if folder.is_dir():
        missing = [CONFIG] if not (folder / CONFIG).is_file() else []
        weights = [folder / file for file in WEIGHT_FILES if (folder / file).is_file()]
        if not weights:
            missing.append(" or ".join(WEIGHT_FILES))
        if missing:
            raise FileNotFoundError(f"cannot load {folder}: it has no {' and no '.join(missing)}")
        return folder / CONFIG, weights[0]
    if name.startswith(_LOCAL) or not (name.startswith(_HUB) or may_be_on_hub(name)):
        raise FileNotFoundError(f"cannot load {folder}: there is no such folder")
    for prefix in _HUB:
        name = name.removeprefix(prefix)
    return _from_hub(name, optional)


def _from_hub(name: str, optional: str | None) -> tuple[Path, Path]:
    """Download and return the configuration file and weights file of a hub name."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    check_hub()
    try:
        config = Path(hf_hub_download(name, CONFIG))
        if optional is not None:
            with suppress(EntryNotFoundError):
                hf_hub_download(name, optional)
        for file in WEIGHT_FILES:
            try:
                return config, Path(hf_hub_download(name, file))
            except EntryNotFoundError as error:
                last_error = error
    except Exception as error:  # of the name, the network, the hub or the disk
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FileNotFoundError(
            f"cannot load {name}: it is no local folder, and cannot be read from the hub ({reason})"
        ) from error
    # Offline, a file that is missing in the cache may exist on the hub.
    location = "in the cache" if isinstance(last_error, LocalEntryNotFoundError) else "on the hub"
    raise FileNotFoundError(f"cannot load {name}: no {' or '.join(WEIGHT_FILES)} {location}")


def _from_timm(name: str) -> Published:
    """Read a timm model's public weights, with the model as their settings."""
    import timm

    if not timm.is_model(name):
        raise FileNotFoundError(
            f"cannot load {name}: neither a file, a folder, a hub name (OWNER/NAME) nor a model of "
            "timm"
        )
    check_hub()
    try:
        vit = timm.create_model(name, pretrained=True)
    except Exception as error:  # of the tag, the network, the hub or the disk
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FileNotFoundError(f"cannot load {name}: {reason}") from error
    return Published(dict(vit.state_dict()), vit)


def _network_of_folder(folder: Path) -> nn.Module:
    """Create the timm model of a folder's config.json on the meta device."""
    import timm

    config = _read_config(folder / CONFIG)
    try:
        settings = dict(config.get("pretrained_cfg") or config)
        # As in timm's loader, the value outside of `pretrained_cfg` takes precedence.
        if "num_classes" in config:
            settings["num_classes"] = config["num_classes"]
        # Other tools add keys that timm does not know; for missing keys timm has defaults.
        keys = {field.name for field in fields(timm.models.PretrainedCfg)} & settings.keys()
        with torch.device("meta"):
            return timm.create_model(
                config["architecture"],
                pretrained_cfg_overlay={key: settings[key] for key in keys},
                **(config.get("model_args") or {}),
            )
    except Exception as error:  # various types for a wrong key
        raise ValueError(
            f"{folder / CONFIG}: timm cannot create a model from it ({error})"
        ) from error


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: a configuration is a mapping of keys, not {config!r}")
    return MappingProxyType(config)
