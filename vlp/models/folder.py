"""The public model folder: weights, configuration, tokenizer and preprocessing.

Files: `model.safetensors`, `config.json`, the tokenizer's files, `processor_config.json`, and
`heads.safetensors` if training had heads. `vlp.serving` opens a folder with transformers' classes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from vlp.config import ConfigError, load_plugins, require_plugins, validate
from vlp.data.features.store import StoredFeatures, TowerKey
from vlp.data.image.transforms import Preprocessing
from vlp.data.text.tokenizer import TextProcessor
from vlp.io import parse_json, write_json, write_tensors
from vlp.models.config import SHORTHANDS, CrossConfig, ModelConfig
from vlp.models.lora import merge_lora
from vlp.models.pretrained.load import (
    LoadReport,
    check_folder,
    copy_weights,
    join_names,
    load_public_weights,
    resample_positions,
)
from vlp.models.pretrained.local_copy import CONFIG, local_folder
from vlp.models.pretrained.position_tables import ENCODINGS, carry_encodings
from vlp.models.towers import fit_image_tower, require_padding
from vlp.models.vlp import VLPModel
from vlp.positions import list_positions
from vlp.positions.registry import plugins_of

# Weights that a model may have without its `init_from` folder, or the folder without the model.
_OPTIONAL = rf"(text|image)_tokens\.|token_score\.|{ENCODINGS}\."

MODEL_TYPE = "vlp"
WEIGHTS, HEADS = "model.safetensors", "heads.safetensors"
_TOWER = "image_encoder.vit."
# Limits of allocations by an untrusted `config.json`: tokens of a text or an image, and bytes of
# buffers, such as tables of relative positions, in addition to the weights.
_MAX_TOKENS = 2**16
_MAX_TABLE_BYTES = 2**30
Module = TypeVar("Module", bound=nn.Module)


class Loaded(NamedTuple):
    """A model with its tokenizer and preprocessing."""

    model: VLPModel
    text: TextProcessor  # captions -> ids and masks
    preprocess: Preprocessing  # PIL image -> (3, size, size) float32
    # Weights of the training's heads by name, such as `mlm_head.bias`.
    heads: Mapping[str, Tensor] = MappingProxyType({})
    folder: Path | None = None  # local folder of the files


def save_pretrained(
    folder: str | Path,
    config: ModelConfig,
    state: dict[str, Tensor],
    text: TextProcessor,
    preprocess: Preprocessing,
    heads: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write a model folder that `from_pretrained` reads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text.save(folder)
    preprocess.save(folder)
    save_model(folder, config, state)
    if heads:
        _write_weights(folder / HEADS, heads)


def save_model(folder: Path, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Write `config.json` and the weights of the model, with LoRA's matrices merged."""
    state, config = merge_lora(dict(state), config)
    save_sizes(folder, config)
    _write_weights(folder / WEIGHTS, state)


def save_sizes(folder: Path, config: ModelConfig) -> None:
    """Write a folder's `config.json`."""
    values = config.model_dump(mode="json")
    # The folder's weights replace public weights.
    for part in ("text", "image", "cross"):
        values[part]["weights"] = None
    encodings = (*config.cross.position, *config.image.positions)
    plugins = plugins_of(name for name in encodings if name not in SHORTHANDS)
    header = {"model_type": MODEL_TYPE} | ({"plugins": plugins} if plugins else {})
    write_json(folder / CONFIG, header | values)


def from_pretrained(
    folder_or_name: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    plugins: Iterable[str] = (),
) -> Loaded:
    """Load a model folder, local or from the hub, in evaluation mode.

    Args:
        folder_or_name: model folder, or a name on the hub (`huggingface_hub.snapshot_download`).
        device: of the model and its inputs, such as "cuda"; None: the CPU.
        dtype: of the weights, such as "bfloat16"; None: float32.
        revision: branch, tag or commit of a name on the hub.
        plugins: Python files or modules to import, which register custom encodings. Plugins that
            the folder lists are never imported by themselves.

    Raises:
        FileNotFoundError: neither a folder nor a hub name, or the folder lacks a file.
        ConfigError: `config.json` does not fit this version, or needs a plugin that is not listed.
        ValueError: weights do not fit, a file is damaged, or the device or dtype does not exist.
    """
    load_plugins(plugins)
    folder = local_folder(folder_or_name, revision)
    model = to_device(read_model(folder), device, dtype)
    text = TextProcessor.load(folder, model.config.text.max_tokens)
    require_padding(model.text_encoder.tower, text.pad_id)
    preprocess, side = Preprocessing.load(folder), model.config.image.image_size
    if preprocess.image_size > 8 * side:
        raise ConfigError(
            f"{folder}: prepares images of {preprocess.image_size} px for a model of {side} px"
        )
    return Loaded(model, text, preprocess, read_heads(folder), folder)


def to_device(
    module: Module,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
) -> Module:
    """Move a model, or a task's module with its models, to a device and dtype (None: unchanged)."""
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (
        isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point
    ):
        raise ValueError(f"dtype {dtype!r}: choose float32, bfloat16, float16 or float64")
    models = [part for part in module.modules() if isinstance(part, VLPModel)]
    thresholds = [model.anchor_threshold for model in models]
    try:
        module = module.to(device=device, dtype=torch_dtype)
    except (RuntimeError, AssertionError) as error:
        devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise ValueError(
            f"device {str(device)!r} cannot be used here; choose among {', '.join(devices)}"
        ) from error
    # Thresholds stay in float32, like the similarities that they are compared with.
    for model, threshold in zip(models, thresholds):
        model.anchor_threshold = threshold.to(model.anchor_threshold.device)
    return module


def read_model(folder: Path, config: ModelConfig | None = None) -> VLPModel:
    """Read a folder's model, in evaluation mode on the CPU; `config` replaces `config.json`."""
    require_model(folder)
    config_file, weights_file = folder / CONFIG, folder / WEIGHTS
    config = config or read_config(config_file)
    _require_shapes(config, config_file, weights_file)
    model = VLPModel(config)
    state = _read_weights(weights_file)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{weights_file} does not fit {config_file}: {error}") from error
    # A configured threshold replaces that of the weights.
    if config.cross.anchor_options.threshold is not None:
        model.anchor_threshold.fill_(config.cross.anchor_options.threshold)
    return model.eval()


def require_model(folder: Path, name: str | Path | None = None) -> None:
    """Require that a folder is a model folder; the error names a model folder nearby, if any.

    name: of the folder in messages; None: its path.
    """
    missing = [file for file in (CONFIG, WEIGHTS) if not (folder / file).is_file()]
    if not missing:
        return
    name = name or folder
    message = f"{name} is not a model folder: {missing[0]} is missing"
    if (folder / "state.json").is_file():
        steps = folder.name.removeprefix("step_")
        message += (
            "; it is a checkpoint: to write its model folder, run the training again with --resume "
            f"training.steps={steps}"
        )
    elif (folder / "model" / CONFIG).is_file():
        message += f"; give {Path(name) / 'model'}"
    raise FileNotFoundError(message)


def start_from(model: VLPModel, folder_or_name: str | Path) -> LoadReport:
    """Initialise a model from a folder's weights; position encodings may differ.

    Encodings, token projections and a token score that the folder lacks keep their initialisation
    (zero for ACE-RPE, so the first outputs are the folder's). Weights of encodings, projections or
    a score that this model lacks, and ACE-RPE tables of another number of groups, are not used. For
    another image size, positions are resampled and encoding tables carried over
    (`vlp.positions.carry_over`).
    """
    folder, source = local_folder(folder_or_name), str(folder_or_name)
    require_model(folder, folder_or_name)
    state, trained_config = _read_weights(folder / WEIGHTS), read_config(folder / CONFIG)
    try:
        weights, resized, unused = carry_encodings(model, trained_config, state)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    match_is_trained = bool(state["match_head.bias"].any()) if "match_head.bias" in state else True
    check_folder(model.config, trained_config, source, folder, match_is_trained)
    target = model.state_dict()
    # Parts of the model that keep their initialisation although the folder has them.
    initial_parts: tuple[str, ...] = ()
    if trained_config.cross.pooling != model.config.cross.pooling:
        initial_parts += (r"match_head\.",)
    if model.config.cross.anchor_options.threshold is not None:
        initial_parts += (r"anchor_threshold$",)
    for name in list(weights):
        is_initial = any(re.match(pattern, name) for pattern in initial_parts)
        if is_initial or (name not in target and re.match(_OPTIONAL, name)):
            del weights[name]
            unused.append(name)
    factor = "token_score.factor"
    if factor in weights:
        # It is relative to `cross.token_score`, which may differ.
        ratio = trained_config.cross.token_score / model.config.cross.token_score
        weights[factor] = weights[factor] * ratio
    positions = "image_encoder.vit.pos_embed"
    if model.config.image.architecture:
        tower_weights = _fit_tower(model, weights)
        resized = [
            *(name for name, part in tower_weights.items() if part.shape != weights[name].shape),
            *resized,
        ]
        weights |= tower_weights
    elif positions in weights.keys() & target.keys() and (
        weights[positions].shape != target[positions].shape
    ):
        grid = model.config.image.tower_grid
        weights[positions] = resample_positions(weights[positions], grid, source)
        resized = [positions, *resized]
    notes = _option_notes(model.config, trained_config)
    optional = (*initial_parts, _OPTIONAL)
    return copy_weights(model, weights, source, unused, optional, resized, notes)


def _fit_tower(model: VLPModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the image tower, resized for the model, by the model's names."""
    names = [name for name in weights if name.startswith(_TOWER)]
    tower_state = fit_image_tower(
        model.image_encoder.vit, {name.removeprefix(_TOWER): weights[name] for name in names}
    )
    tower_weights = {f"{_TOWER}{key}": tensor for key, tensor in tower_state.items()}
    return {name: tower_weights[name] for name in names if name in tower_weights}


# Options of `anchor` that other encodings read.
_ANCHOR_OPTIONS = {
    "uniform": ("roles", "mode", "shared_heads", "scale"),
    "alignment": ("features",),
}


def _option_notes(config: ModelConfig, trained_config: ModelConfig) -> list[str]:
    """Return notes of changed encoding options, with which trained tables have another effect."""
    notes = []
    cross, trained_cross = config.cross, trained_config.cross
    for name in (name for name in cross.position if name in trained_cross.position):
        trained = _cross_options(trained_cross, name)
        for key, options in _cross_options(cross, name).items():
            if options != trained[key]:
                notes.append(f"cross.options.{key} was {trained[key]}, not {options}")
    for name, options in config.image.positions.items():
        trained_options = trained_config.image.positions.get(name, options)
        if options != trained_options:
            notes.append(f"image.positions.{name} was {dict(trained_options)}, not {dict(options)}")
    return list(dict.fromkeys(notes))


def _cross_options(cross: CrossConfig, name: str) -> dict[str, Mapping[str, Any]]:
    """Return the options that the encoding `name` reads, by the name that they are set under."""
    anchor = cross.options.get("anchor", {})
    shared = {key: anchor[key] for key in _ANCHOR_OPTIONS.get(name, ()) if key in anchor}
    return {"anchor": shared, name: dict(cross.options.get(name, {}))}


def load_start(
    model: VLPModel, init_from: str | None = None, public: bool = True
) -> list[LoadReport]:
    """Initialise a model from a model folder `init_from`, or else from configured public weights.

    public: False reads no public weights.
    """
    try:
        if init_from is not None:
            return [start_from(model, init_from)]
        return load_public_weights(model) if public else []
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error


def read_heads(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder's heads, by name; empty if it has no heads."""
    file = folder / HEADS
    return _read_weights(file) if file.is_file() else {}


def read_config(file: Path) -> ModelConfig:
    """Read the sizes in a folder's `config.json`."""
    return validate(plain_config(file), ModelConfig, file)


def plain_config(file: Path) -> dict[str, Any]:
    """Read the sizes in a folder's `config.json`, unvalidated."""
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: a configuration is a mapping of keys, not {values!r}")
    # timm's folders have no `model_type`.
    model_type = values.pop("model_type", values.get("architecture", MODEL_TYPE))
    if model_type != MODEL_TYPE:
        raise ConfigError(
            f"{file}: a model of type {model_type!r}, not {MODEL_TYPE!r}; `vlp align --image-tower "
            "DIR --text-tower DIR` makes a model folder from an image and a text tower"
        )
    require_plugins(values.pop("plugins", {}), list_positions(), "encoding", file)
    return values


def _require_depth(values: Any, limit: int, file: Path) -> None:
    """Require that no number of layers exceeds the number of weights, before layers are built."""
    stack = [("", values)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, Mapping):
            stack += ((f"{key}.{name}".removeprefix("."), part) for name, part in value.items())
        elif isinstance(value, int) and re.search(r"(layers|depth)[^.]*$", key) and value > limit:
            raise ConfigError(f"{file}: {key} is {value}, more than the weights have")


def _require_shapes(config: ModelConfig, file: Path, weights_file: Path) -> None:
    """Require that weights have a model's sizes, before the model takes memory."""
    shapes = weight_shapes(weights_file)
    _require_depth(config.model_dump(), len(shapes), file)
    if max(config.text.max_tokens, prod(config.image.tower_grid)) > _MAX_TOKENS:
        raise ConfigError(
            f"{file}: text.max_tokens or image.image_size makes more than {_MAX_TOKENS:,} tokens"
        )
    try:
        with torch.device("meta"):
            model = VLPModel(config)
    except ConfigError:
        raise
    # Encodings and towers of other packages need not support meta tensors.
    except Exception:
        return
    state, file_bytes = model.state_dict(), weights_file.stat().st_size
    # A stored number takes at least one byte.
    if sum(tensor.numel() for tensor in state.values()) > file_bytes:
        raise ConfigError(
            f"{weights_file} does not fit {file}: its {file_bytes} bytes cannot hold the model's "
            "weights"
        )
    for name, tensor in state.items():
        if name in shapes and list(tensor.shape) != shapes[name]:
            raise ConfigError(
                f"{weights_file} does not fit {file}: {name} has the shape {shapes[name]}, not "
                f"{list(tensor.shape)}"
            )
    table_bytes = sum(buffer.nbytes for buffer in model.buffers())
    if table_bytes > _MAX_TABLE_BYTES + 4 * file_bytes:
        raise ConfigError(
            f"{file}: its position tables take {table_bytes / 1e9:.0f} GB, far more than the "
            "weights"
        )


def require_sizes(
    values: Any, create: Callable[[], nn.Module], weights: Mapping[str, Tensor], file: Path
) -> None:
    """Require that weights have the sizes of a task's module, before the module takes memory.

    values: configuration of the task in `file`, not validated. weights: by name; the submodule
    `model`, which is loaded already, may be left out.
    """
    _require_depth(values, len(weights), file)
    try:
        with torch.device("meta"):
            state = create().state_dict()
    # Not every module can be built from meta tensors.
    except Exception:
        return
    mismatches, weight_count = [], 0
    for name, tensor in state.items():
        if name in weights and tensor.shape != weights[name].shape:
            mismatches.append(name)
        if name in weights or not name.startswith("model."):
            weight_count += tensor.numel()
    weight_bytes = sum(tensor.nbytes for tensor in weights.values())
    if mismatches or weight_count > _MAX_TABLE_BYTES + weight_bytes:
        raise ConfigError(f"{file}: the weights do not fit its sizes: {join_names(mismatches)}")


def weight_shapes(file: Path) -> dict[str, list[int]]:
    """Read the shape of each weight in a safetensors file, by name."""
    try:
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            return {name: tensors.get_slice(name).get_shape() for name in names}
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged ({error})") from error


def _write_weights(file: Path, tensors: Mapping[str, Tensor]) -> None:
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    write_tensors(file, copies, {"format": "pt"})


def _read_weights(file: Path) -> dict[str, Tensor]:
    """Read weights by name; raise ValueError if the file is damaged or a value is not finite."""
    try:
        state = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged ({error})") from error
    invalid = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if invalid:
        raise ValueError(f"{file}: these weights are not finite: {join_names(invalid)}")
    return state


# Settings that change a tower's output for given weights.
_COMMON_KEYS = {"image_size", "patch_size", "average_hflip"}
_TOWER_KEYS = _COMMON_KEYS | {"architecture"}
_VIT_KEYS = _COMMON_KEYS | {"width", "layers", "heads", "intermediate"}


def tower_key(model: VLPModel) -> TowerKey:
    """Return the settings of a model's image tower and a checksum of its weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.image_encoder.vit.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    config = model.config.image
    keys = _TOWER_KEYS if config.architecture else _VIT_KEYS
    if config.summary_tokens:
        keys = keys | {"pooled_layers", "pooling"}
    return TowerKey(config.model_dump(mode="json", include=keys), digest.hexdigest())


def require_tower(features: StoredFeatures | None, model: VLPModel) -> None:
    """Require that stored features, if any, come from a model's image tower."""
    if features is None:
        return
    features.header.require_tower(features.folder, tower_key(model))
    config = model.config.image
    tokens = features.header.tokens - config.summary_tokens
    if tokens not in (1 + prod(config.tower_grid), 1 + prod(config.grid)):
        raise ConfigError(
            f"{features.folder}: has {tokens} tokens per image, and image.pool {config.pool} needs "
            f"{1 + prod(config.grid)}; store features with this image.pool, or with image.pool 1"
        )


def require_frozen_tower(features: StoredFeatures | None, model: VLPModel) -> None:
    """Require that stored features, if any, come from a model's image tower, and it is frozen."""
    if features is not None and not model.image_encoder.frozen:
        raise ConfigError(
            "data.features needs a frozen image tower, as its outputs are stored; set "
            "model.image.trainable=0"
        )
    require_tower(features, model)
