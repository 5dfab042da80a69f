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
from vlp.models.config import SHORTHANDS, ModelConfig
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

# Parts that a model and the folder it starts from need not share.
_OPTIONAL = rf"(text|image)_tokens\.|token_score\.|{ENCODINGS}\."

MODEL_TYPE = "vlp"
WEIGHTS, HEADS = "model.safetensors", "heads.safetensors"
_TOWER = "image_encoder.vit."
# Limits of what a stranger's `config.json` may allocate: tokens of a text or an image, and bytes
# of buffers, such as tables of relative positions, beside any weights.
_MAX_TOKENS = 2**16
_MAX_TABLES = 2**30
Module = TypeVar("Module", bound=nn.Module)


class Loaded(NamedTuple):
    """A model with its tokenizer (`text`: captions -> ids and masks) and preprocessing.

    preprocess: PIL image -> (3, size, size) float32; heads: weights of the training's heads by
    name, such as `mlm_head.bias`; folder: local folder of the files.
    """

    model: VLPModel
    text: TextProcessor
    preprocess: Preprocessing
    heads: Mapping[str, Tensor] = MappingProxyType({})
    folder: Path | None = None


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
    # The folder's weights replace public weights.
    plain = config.model_dump(mode="json")
    for part in ("text", "image", "cross"):
        plain[part]["weights"] = None
    names = (*config.cross.position, *config.image.positions)
    plugins = plugins_of(name for name in names if name not in SHORTHANDS)
    header = {"model_type": MODEL_TYPE} | ({"plugins": plugins} if plugins else {})
    write_json(folder / CONFIG, header | plain)


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
        devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise ValueError(
            f"device {str(device)!r} cannot be used here; there are {', '.join(devices)}"
        ) from error
    for model, threshold in zip(models, thresholds):
        # It stays in float32, like the similarities that it is compared with.
        model.anchor_threshold = threshold.to(model.anchor_threshold.device)
    return module


def read_model(folder: Path, config: ModelConfig | None = None) -> VLPModel:
    """Read a folder's model, in evaluation mode on the CPU; config replaces `config.json`."""
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
    """Require a folder's model; the error calls the folder `name` and hints to a model nearby."""
    missing = [file for file in (CONFIG, WEIGHTS) if not (folder / file).is_file()]
    if not missing:
        return
    name = name or folder
    message = f"{name} is not a model folder: {missing[0]} is missing"
    if (folder / "state.json").is_file():
        steps = folder.name.removeprefix("step_")
        message += f"; of a checkpoint, its run writes one with --resume training.steps={steps}"
    elif (folder / "model" / CONFIG).is_file():
        message += f"; {Path(name) / 'model'} is one"
    raise FileNotFoundError(message)


def start_from(model: VLPModel, folder_or_name: str | Path) -> LoadReport:
    """Initialise a model from a folder's weights; position encodings may differ.

    Encodings, token projections and a token score that the folder lacks keep their initialisation
    (zero for ACE-RPE, so the first outputs are the folder's). Weights of encodings, projections or
    a score that this model lacks, and ACE-RPE tables of another number of groups, are not used. For
    another image size, positions are resampled and encoding tables carried over
    (`vlp.positions.carry_over`).
    """
    folder = local_folder(folder_or_name)
    require_model(folder, folder_or_name)
    state, trained_config = _read_weights(folder / WEIGHTS), read_config(folder / CONFIG)
    try:
        weights, resized, unused = carry_encodings(model, trained_config, state)
    except ValueError as error:
        raise ValueError(f"{folder_or_name}: {error}") from error
    match_is_trained = bool(state["match_head.bias"].any()) if "match_head.bias" in state else True
    check_folder(model.config, trained_config, str(folder_or_name), folder, match_is_trained)
    target = model.state_dict()
    # Parts of the model that keep their initialisation although the folder has them.
    initial: tuple[str, ...] = ()
    if trained_config.cross.pooling != model.config.cross.pooling:
        initial += (r"match_head\.",)
    if model.config.cross.anchor_options.threshold is not None:
        initial += (r"anchor_threshold$",)
    for name in list(weights):
        if any(re.match(pattern, name) for pattern in initial) or (
            name not in target and re.match(_OPTIONAL, name)
        ):
            del weights[name]
            unused.append(name)
    factor = "token_score.factor"
    if factor in weights:
        # It is relative to `cross.token_score`, which may differ.
        start = model.config.cross.token_score
        weights[factor] = weights[factor] * (trained_config.cross.token_score / start)
    positions = "image_encoder.vit.pos_embed"
    if model.config.image.architecture:
        keys = {name: name.removeprefix(_TOWER) for name in weights if name.startswith(_TOWER)}
        tower_state = fit_image_tower(
            model.image_encoder.vit, {key: weights[name] for name, key in keys.items()}
        )
        tower = {name: tower_state[key] for name, key in keys.items() if key in tower_state}
        resized = [name for name in tower if tower[name].shape != weights[name].shape] + resized
        weights |= tower
    elif positions in weights.keys() & target.keys() and (
        weights[positions].shape != target[positions].shape
    ):
        weights[positions] = resample_positions(
            weights[positions], model.config.image.tower_grid, str(folder_or_name)
        )
        resized = [positions, *resized]
    notes = _option_notes(model.config, trained_config)
    optional = (*initial, _OPTIONAL)
    return copy_weights(model, weights, str(folder_or_name), unused, optional, resized, notes)


def _option_notes(config: ModelConfig, trained_config: ModelConfig) -> list[str]:
    """Note other options of an encoding, with which its trained tables compute something else."""
    # `alignment` and `uniform` read the options of `anchor`.
    common = [name for name in config.cross.position if name in trained_config.cross.position]
    names = ("anchor" if name in ("alignment", "uniform") else name for name in common)
    pairs = [
        (f"cross.options.{name}", config.cross.options, trained_config.cross.options, name)
        for name in dict.fromkeys(names)
    ] + [
        (f"image.positions.{name}", config.image.positions, trained_config.image.positions, name)
        for name in config.image.positions
        if name in trained_config.image.positions
    ]
    return [
        f"{key} was {dict(theirs.get(name, {}))}, not {dict(ours.get(name, {}))}"
        for key, ours, theirs, name in pairs
        if ours.get(name, {}) != theirs.get(name, {})
    ]


def load_start(
    model: VLPModel, init_from: str | None = None, public: bool = True
) -> list[LoadReport]:
    """Initialise a model from `init_from`; without it, if `public`, from public weights.

    A model folder has all weights that public sources have, so those are not read.
    """
    try:
        if init_from is not None:
            return [start_from(model, init_from)]
        return load_public_weights(model) if public else []
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error


def read_heads(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder's heads, by name; empty without heads."""
    file = folder / HEADS
    return _read_weights(file) if file.is_file() else {}


def read_config(file: Path) -> ModelConfig:
    """Read the sizes in a folder's `config.json`."""
    return validate(plain_config(file), ModelConfig, file)


def plain_config(file: Path) -> dict[str, Any]:
    """Read the sizes in a folder's `config.json`, unvalidated."""
    try:
        plain = parse_json(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{file}: a configuration is a mapping of keys, not {plain!r}")
    # timm's folders have no `model_type`.
    kind = plain.pop("model_type", plain.get("architecture", MODEL_TYPE))
    if kind != MODEL_TYPE:
        raise ConfigError(
            f"{file}: a model of kind {kind!r}, not {MODEL_TYPE!r}; `vlp align --image-tower DIR "
            "--text-tower DIR` makes a model folder from an image and a text tower"
        )
    require_plugins(plain.pop("plugins", {}), list_positions(), "encoding", file)
    return plain


def _require_depth(values: Any, limit: int, file: Path) -> None:
    """Require that no number of layers exceeds the number of weights, before layers are built."""
    settings = [("", values)]
    while settings:
        key, value = settings.pop()
        if isinstance(value, Mapping):
            settings += ((f"{key}.{name}".removeprefix("."), part) for name, part in value.items())
        elif isinstance(value, int) and re.search(r"(layers|depth)[^.]*$", key) and value > limit:
            raise ConfigError(f"{file}: {key} is {value}, more than the weights hold")


def _require_shapes(config: ModelConfig, file: Path, weights: Path) -> None:
    """Require that the weights have the sizes of a model, before it takes memory."""
    shapes = weight_shapes(weights)
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
    state, size = model.state_dict(), weights.stat().st_size
    if sum(tensor.numel() for tensor in state.values()) > size:
        raise ConfigError(
            f"{weights} does not fit {file}: its {size} bytes cannot hold the model's weights"
        )
    for name, tensor in state.items():
        if name in shapes and list(tensor.shape) != shapes[name]:
            raise ConfigError(
                f"{weights} does not fit {file}: {name} has the shape {shapes[name]}, not "
                f"{list(tensor.shape)}"
            )
    tables = sum(buffer.nbytes for buffer in model.buffers())
    if tables > _MAX_TABLES + 4 * size:
        raise ConfigError(
            f"{file}: its position tables take {tables / 1e9:.0f} GB, far more than the weights"
        )


def require_sizes(
    values: Any, make: Callable[[], nn.Module], weights: Mapping[str, Tensor], file: Path
) -> None:
    """Require that weights have the sizes of a task's module, before it takes memory.

    Args:
        values: configuration of the task, plain.
        make: builds the module.
        weights: by name; weights of a module `model`, which is loaded already, may be absent.
        file: of the configuration, for messages.
    """
    _require_depth(values, len(weights), file)
    try:
        with torch.device("meta"):
            state = make().state_dict()
    # Not every module can be built from meta tensors.
    except Exception:
        return
    state = {n: part for n, part in state.items() if n in weights or not n.startswith("model.")}
    wrong = [n for n, part in state.items() if n in weights and part.shape != weights[n].shape]
    size = sum(tensor.nbytes for tensor in weights.values())
    if wrong or sum(part.numel() for part in state.values()) > _MAX_TABLES + size:
        raise ConfigError(f"{file}: the weights do not fit its sizes: {join_names(wrong)}")


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
    settings = _TOWER_KEYS if config.architecture else _VIT_KEYS
    if config.summary_tokens:
        settings = settings | {"pooled_layers", "pooling"}
    return TowerKey(config.model_dump(mode="json", include=settings), digest.hexdigest())


def require_tower(features: StoredFeatures | None, model: VLPModel) -> None:
    """Require that stored features, if any, come from a model's image tower."""
    if features is None:
        return
    features.header.require_tower(features.folder, tower_key(model))
    config = model.config.image
    tokens = features.header.tokens - config.summary_tokens
    if tokens not in (1 + prod(config.tower_grid), 1 + prod(config.grid)):
        raise ConfigError(
            f"{features.folder}: holds {tokens} tokens of an image, and image.pool {config.pool} "
            f"needs {1 + prod(config.grid)}; store features with this image.pool, or with 1"
        )


def require_frozen_tower(features: StoredFeatures | None, model: VLPModel) -> None:
    """Require that stored features, if any, come from a model's image tower, and it is frozen."""
    if features is not None and not model.image_encoder.frozen:
        raise ConfigError(
            "data.features holds outputs of the image tower, which training would change; set "
            "model.image.trainable=0"
        )
    require_tower(features, model)
