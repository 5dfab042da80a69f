"""Public weights: declared key maps from BERT and ViT/DeiT, and a report of each copy.

A source key without a rule is an error unless its prefix is declared unused; the report names every
target that keeps its initialisation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vlp.config import ConfigError
from vlp.data.image.transforms import FILE_NAME, Preprocessing
from vlp.layers.blocks import NORM_EPS
from vlp.models.config import ImageConfig, ModelConfig
from vlp.models.pretrained.published import (
    Published,
    network_settings,
    read_bert,
    read_vit,
    vit_settings,
)
from vlp.models.towers import create_image_tower, fit_image_tower, transformers_config
from vlp.models.vlp import VLPModel
from vlp.precision import at_least_float32

# What transformers takes where a config.json is silent.
_DEFAULTS = {
    "model_type": "bert",
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
    "is_decoder": False,
}
# Settings of BERT that the model has no key for, with what it computes.
_FIXED = {
    "model_type": ("bert",),
    "hidden_act": ("gelu", "gelu_python"),  # one function, two codes of it
    "layer_norm_eps": (NORM_EPS,),
    "type_vocab_size": (2,),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
}

# Shapes fit any number of heads.
TRUSTED = "the source does not state its heads: assuming {}"


def check_bert(
    settings: Mapping[str, Any] | None,
    config: ModelConfig,
    source: str,
    with_cross: bool,
    with_text: bool = True,
) -> list[str]:
    """Check a BERT's config.json against the model's configuration; return notes for the report."""
    if settings is None:
        return [TRUSTED.format(config.text.heads if with_text else config.cross.heads)]
    sizes = [("hidden_size", "text.width", config.text.width)]
    text_sizes = [
        ("num_attention_heads", "text.heads", config.text.heads),
        ("intermediate_size", "text.intermediate", config.text.intermediate),
        ("max_position_embeddings", "text.max_positions", config.text.max_positions),
        ("vocab_size", "text.vocab_size", config.text.vocab_size),
    ]
    if with_text:
        sizes += text_sizes
    if with_cross:
        sizes += [
            ("num_attention_heads", "cross.heads", config.cross.heads),
            ("intermediate_size", "cross.intermediate", config.cross.intermediate),
        ]
    check_bert_settings(settings, sizes, source)
    return []


def check_bert_settings(
    settings: Mapping[str, Any], sizes: Sequence[tuple[str, str, int]], source: str
) -> None:
    """Check a BERT's config.json against what all layers compute, and sizes (key, ours, value)."""
    theirs = _DEFAULTS | dict(settings)
    wrong = [
        f"{key} is {theirs[key]!r} there and {allowed[0]!r} in this model, which has no other"
        for key, allowed in _FIXED.items()
        if theirs[key] not in allowed
    ]
    # Shapes check a size that the configuration leaves out.
    wrong += [
        f"{key} is {theirs[key]} there and {name} is {ours} here; set {name}={theirs[key]}"
        for key, name, ours in sizes
        if theirs.get(key, ours) != ours
    ]
    if wrong:
        raise ConfigError(f"{source} does not fit: {'; '.join(wrong)}")


def check_vit(
    theirs: Mapping[str, Any] | nn.Module | None, ours: Mapping[str, Any], source: str
) -> list[str]:
    """Check a ViT's settings, or timm's network, against `vit_settings`; return report notes."""
    if theirs is None:
        return [TRUSTED.format(ours["heads"])]
    if isinstance(theirs, nn.Module):
        theirs = vit_settings(theirs, source)
    wrong = []
    if theirs["heads"] != ours["heads"]:
        wrong.append(
            f"it has {theirs['heads']} heads and image.heads is {ours['heads']}; "
            f"set image.heads={theirs['heads']}"
        )
    wrong += [
        f"{key} is {theirs[key]} there and {ours[key]} in this model, which has no other"
        for key in ("block", "activation")
        if theirs[key] != ours[key]
    ]
    if wrong:
        raise ConfigError(f"{source} does not fit: {'; '.join(wrong)}")
    # Only noted: for equal weights transformers states 1e-12 and timm 1e-6.
    if theirs["norm_eps"] != ours["norm_eps"]:
        return [
            f"norms add {theirs['norm_eps']:g} to the variance there, {ours['norm_eps']:g} here"
        ]
    return []


def check_image_tower(
    source_model: Mapping[str, Any] | nn.Module | None,
    tower: nn.Module,
    state: Mapping[str, Tensor],
    source: str,
) -> list[str]:
    """Check the settings of weights (`state`) against a tower of timm, as `check_vit` does."""
    source_state = source_model.state_dict() if isinstance(source_model, nn.Module) else {}
    shapes_differ = any(
        source_state[name].shape != state[name].shape and "pos" not in name
        for name in source_state.keys() & state.keys()
    )
    if source_model is None or shapes_differ:
        return ["the source does not state heads and activations; assuming the tower's"]
    if not isinstance(source_model, nn.Module):
        return check_vit(source_model, vit_settings(tower, "image.architecture"), source)
    ours, theirs = network_settings(tower), network_settings(source_model)
    _require_equal(
        [(f"vit.{key}", theirs[key], ours[key]) for key in theirs.keys() & ours.keys()], source
    )
    return []


def check_pixels(
    source_model: Mapping[str, Any] | nn.Module | None, config: ImageConfig, source: str
) -> None:
    """Check the normalisation of pixels that weights were trained with."""
    # A normalisation that the user sets takes precedence.
    values: Any = getattr(source_model, "pretrained_cfg", source_model) or {}
    theirs = tuple(tuple(values.get(key) or ()) for key in ("mean", "std"))
    if config.normalisation is None and all(theirs) and theirs != config.statistics:
        raise ConfigError(
            f"{source} was trained with other mean and deviation of pixels than "
            f"{config.statistics}: set image.normalisation={json.dumps(theirs).replace(' ', '')}"
        )


# All other settings of transformers change what a model computes.
_TRAINING_SETTINGS = re.compile(
    r"_.*|.*(dropout|drop_prob|initializer|token_id|label|output_|pruned|classifier|chunk_size).*"
    r"|architectures|auto_map|d?type|torch_dtype|transformers_version|use_cache|use_return_dict"
    r"|return_dict|gradient_checkpointing|problem_type|finetuning_task|task_specific_params"
    r"|tie_.*|vocab_size|max_position_embeddings|is_encoder_decoder|summary_.*|.*_pred(iction)?"
    r"|.*_loss.*|tokenizer_class|language|max_length|reference_compile|deterministic_.*"
)


def check_text_tower(
    settings: Mapping[str, Any] | None, config: ModelConfig, source: str
) -> list[str]:
    """Check the config.json of weights (None without one) against `text.architecture`."""
    if settings is None:
        return ["the source does not state heads and activations; assuming text.architecture's"]
    model_config = transformers_config(config.text)
    # Old configurations do not name their type, and hold keys that no class reads.
    architecture = {"model_type": model_config.model_type, **settings}
    source_config = transformers_config(
        config.text.model_copy(update={"architecture": architecture})
    )
    ours, theirs = model_config.to_dict(), source_config.to_dict()
    if model_config.model_type != source_config.model_type:
        ours, theirs = (
            {"model_type": model_config.model_type},
            {"model_type": source_config.model_type},
        )
    compared = (key for key in theirs if key in ours)
    keys = [
        key for key in compared if key == "pad_token_id" or not _TRAINING_SETTINGS.fullmatch(key)
    ]
    _require_equal(
        [(f"text.architecture.{key} is", theirs[key], ours.get(key)) for key in keys], source
    )
    return []


def _require_equal(settings: Sequence[tuple[str, Any, Any]], source: str) -> None:
    """Require equal values of settings (name, source's, model's)."""
    wrong = [
        f"{name} {theirs!s} there and {ours!s} here"
        for name, theirs, ours in settings
        if theirs != ours
    ]
    if wrong:
        raise ConfigError(f"{source} does not fit: {listed(sorted(wrong))}")


def check_folder(
    config: ModelConfig,
    trained: ModelConfig,
    folder: Path,
    name: str,
    match_is_trained: bool = True,
) -> None:
    """Require that a folder's weights get the inputs and settings of their training."""
    # Shapes do not show these settings.
    keys = ["image.pooling", "image.pooled_layers", "text.pooling", "cross.heads"]
    keys += ["cross.layout"] if match_is_trained else []
    keys += ["image.heads"] if config.image.architecture is None else []
    keys += ["text.heads"] if config.text.architecture is None else []
    pairs = [(key, attrgetter(key)(config), attrgetter(key)(trained)) for key in keys]
    if (folder / FILE_NAME).is_file():
        pixels = Preprocessing.load(folder)
        pairs += [("image.normalisation", config.image.statistics, (pixels.mean, pixels.std))]
    for key, ours, theirs in pairs:
        if ours != theirs:
            value = json.dumps(theirs).replace(" ", "") if isinstance(theirs, tuple) else theirs
            raise ValueError(
                f"{name} was trained with {key} {theirs}, not {ours}: set {key}={value}"
            )
    image, text = trained.image.architecture, trained.text.architecture
    if image is not None and config.image.architecture not in (None, image):
        with torch.device("meta"):
            ours, theirs = map(create_image_tower, (config.image, trained.image))
        check_image_tower(theirs, ours, ours.state_dict(), name)
    if text is not None and config.text.architecture not in (None, text):
        check_text_tower(transformers_config(trained.text).to_dict(), config, name)


class LoadReport(NamedTuple):
    """Report of a weight copy: the outcome for the tensors of both sides.

    matched and resized: target names; missing: target parts that keep their initialisation, `*` for
    every layer; unused: source keys; notes: changed values.
    """

    source: str
    matched: list[str]
    resized: list[str]
    missing: list[str]
    unused: list[str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return one line for the log."""
        parts = [f"{len(self.matched)} matched", f"{len(self.resized)} resized"]
        if self.missing:
            parts.append(f"{len(self.missing)} keep their own start ({', '.join(self.missing)})")
        parts += [f"{len(self.unused)} not used", *self.notes]
        return f"{self.source}: {'; '.join(parts)}"


def copy_weights(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    unused: list[str],
    optional: tuple[str, ...],
) -> LoadReport:
    """Copy tensors into a module after all checks.

    Args:
        weights: tensors by the target's names.
        unused: source keys that are declared as unused.
        optional: patterns of name prefixes that may keep their initialisation; the first match
            names the part in the report.
    """
    target = module.state_dict()
    unknown = sorted(set(weights) - set(target))
    if unknown:
        raise ValueError(f"{source}: these keys have no place here: {listed(unknown)}")
    missing, initial = [], set()
    for name in target:
        if name not in weights:
            match = next(filter(None, (re.match(part, name) for part in optional)), None)
            if match:
                initial.add(re.sub(r"\.\d+\.", ".*.", match[0]).rstrip("."))
            else:
                missing.append(name)
    if missing:
        raise ValueError(f"{source}: these weights are missing: {listed(missing)}")
    for name, tensor in weights.items():
        if tensor.shape != target[name].shape:
            raise ValueError(
                f"{source}: {name} is {tuple(tensor.shape)} there and "
                f"{tuple(target[name].shape)} here"
            )
        if target[name].is_floating_point() and not tensor.is_floating_point():
            raise ValueError(f"{source}: {name} is {_kind(tensor)} there, not a float")
    with torch.no_grad():
        for name, tensor in weights.items():
            target[name].copy_(tensor)
    casts = {
        (_kind(tensor), _kind(target[name]))
        for name, tensor in weights.items()
        if tensor.dtype != target[name].dtype
    }
    notes = tuple(f"{theirs} there, {ours} here" for theirs, ours in sorted(casts))
    return LoadReport(source, sorted(weights), [], sorted(initial), unused, notes)


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Join names for a message, the first ones and a count where they are many."""
    further = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {further} more" if further > 0 else "")


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Norm parameters in checkpoints converted from TensorFlow.
_OLD_KINDS = {"gamma": "weight", "beta": "bias"}
# Parts of an image encoder that public weights lack.
IMAGE_OPTIONAL = (r"projection\.", r"adapter\.", r"vit\.(\S+\.)?positions\.")
_IMAGE_UNUSED = ("head", "pre_logits.", "fc_norm.", "attn_pool.", "mask_token")


def load_image_tower(model: VLPModel, name: str) -> LoadReport:
    """Initialise the image tower from public weights; positions are resampled as timm does."""
    encoder, source = model.image_encoder, f"{name} -> {model.config.image.tower_name}"
    state, settings = read_vit(name)
    check_pixels(settings, model.config.image, source)
    notes = check_image_tower(settings, encoder.vit, state, source)
    fitted = fit_image_tower(encoder.vit, state)
    target = encoder.vit.state_dict()
    unused = [key for key in fitted if key not in target and key.startswith(_IMAGE_UNUSED)]
    weights = {f"vit.{key}": tensor for key, tensor in fitted.items() if key not in unused}
    resized = [
        f"vit.{key}"
        for key, tensor in state.items()
        if fitted.get(key, tensor).shape != tensor.shape
    ]
    report = copy_weights(encoder, weights, source, unused, IMAGE_OPTIONAL)
    matched = [name for name in report.matched if name not in resized]
    return report._replace(matched=matched, resized=resized, notes=(*report.notes, *notes))


def load_text_tower(
    model: VLPModel,
    state: Mapping[str, Tensor],
    source: str,
    settings: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Initialise the text tower from public weights of the same architecture, without heads.

    state: by the names of transformers, with the model's prefix (`roberta.`) or without.
    """
    notes = check_text_tower(settings, model.config, source)
    encoder = model.text_encoder
    tower: Any = encoder.tower
    parts = {name for name, _ in tower.named_children()}
    names = current_names(state, source, f"{tower.base_model_prefix}.")
    unused = [
        name
        for name in names
        if name.partition(".")[0] not in parts or name.endswith(".position_ids")
    ]
    weights = {f"tower.{name}": names[name][1] for name in names.keys() - unused}
    report = copy_weights(
        encoder, weights, f"{source} -> text encoder", unused, (r"projection\.", r"adapter\.")
    )
    return report._replace(notes=(*report.notes, *notes))


def current_names(
    state: Mapping[str, Tensor], source: str, prefix: str = "bert."
) -> dict[str, tuple[str, Tensor]]:
    """Map current names to (key, tensor): no prefix, and norms with weight and bias."""
    tensors: dict[str, tuple[str, Tensor]] = {}
    for key, tensor in state.items():
        module, dot, kind = key.removeprefix(prefix).rpartition(".")
        kind = _OLD_KINDS.get(kind, kind) if module.endswith("LayerNorm") else kind
        name = f"{module}{dot}{kind}"
        if name in tensors:
            raise ValueError(f"{source}: {tensors[name][0]} and {key} are the same weight")
        tensors[name] = key, tensor
    return tensors


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
BERT_UNUSED = ("pooler.", "cls.", "classifier.", "qa_outputs.", "embeddings.position_ids")
_VIT_UNUSED = ("head.", "head_dist.", "pre_logits.", "fc_norm.", "dist_token")
_BERT_LAYER_NAME = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")
_BLOCK = re.compile(r"blocks\.(\d+)\.")

# Target names that no public checkpoint has: the tables of ACE-RPE and other encodings.
POSITION_TABLES = r"(.+\.)?positions\."


def load_public_weights(model: VLPModel) -> list[LoadReport]:
    """Initialise the encoders from `weights` of `text`, `image` and `cross`.

    BERT's first layers go to the text encoder, the following ones (or the last ones of the BERT in
    `cross.weights`) to the cross-modal encoder; its cross-attention keeps its initialisation. A
    ViT's first blocks go to the image encoder; positions of another grid are resampled. A tower of
    `architecture` takes all weights.
    """
    reports = []
    if name := model.config.text.weights:
        with _about("text.weights"):
            bert = read_bert(name)
            if model.config.text.architecture:
                reports.append(load_text_tower(model, bert.state, name, bert.settings))
            else:
                reports += load_bert(model, bert.state, name, bert.settings)
    if name := model.config.cross.weights:
        with _about("cross.weights"):
            bert = bert_state(name)
            reports.append(load_cross(model, bert.state, name, bert.settings))
    if name := model.config.image.weights:
        with _about("image.weights"):
            if model.config.image.architecture:
                reports.append(load_image_tower(model, name))
            else:
                vit = read_vit(name)
                reports.append(load_vit(model, vit.state, name, vit.settings))
    return reports


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Prefix errors with the configuration key."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{key}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def bert_state(folder_or_name: str) -> Published:
    """Read a public BERT encoder under current names, without heads and pooler."""
    bert = read_bert(folder_or_name)
    state = current_names(bert.state, folder_or_name)
    encoder = {
        name: tensor for name, (_, tensor) in state.items() if not name.startswith(BERT_UNUSED)
    }
    return Published(encoder, bert.settings)


def load_bert(
    model: VLPModel,
    state: Mapping[str, Tensor],
    source: str,
    settings: Mapping[str, Any] | None = None,
) -> list[LoadReport]:
    """Copy BERT layers 1..k to the text encoder, k+1..k+c to the cross-modal encoder."""
    text_layers, cross_weights = model.config.text.layers, model.config.cross.weights
    cross_layers = 0 if cross_weights else model.config.cross.layers
    text: dict[str, Tensor] = {}
    cross: dict[str, Tensor] = {}
    unused, unknown, numbers = [], [], {-1}
    for name, (key, tensor) in current_names(state, source).items():
        module, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", module)
        if module in BERT_EMBEDDING:
            text[f"{BERT_EMBEDDING[module]}.{kind}"] = tensor
        elif layer and layer[2] in BERT_LAYER:
            number, target = int(layer[1]), BERT_LAYER[layer[2]]
            numbers.add(number)
            if number < text_layers:
                text[f"layers.{number}.{target}.{kind}"] = tensor
            elif number < text_layers + cross_layers:
                cross[f"layers.{number - text_layers}.{target}.{kind}"] = tensor
            else:
                unused.append(key)
        elif name.startswith(BERT_UNUSED):
            unused.append(key)
        else:
            unknown.append(key)
    if unknown:
        raise ValueError(f"{source}: no rule maps these keys of BERT: {listed(unknown)}")
    count = max(numbers) + 1
    # A BERT of exactly k layers leaves the cross-modal encoder as it is.
    if count < text_layers or text_layers < count < text_layers + cross_layers:
        raise ConfigError(
            f"{source} has {count} layers; text.layers {text_layers} and cross.layers "
            f"{cross_layers} need {text_layers + cross_layers} (or {text_layers}, which leaves the "
            "cross-modal encoder at its own start)"
        )
    note = check_bert(settings, model.config, source, with_cross=bool(cross))
    reports = [
        copy_weights(
            model.text_encoder, text, f"{source} -> text encoder", unused, (r"projection\.",)
        )
    ]
    if not cross_weights:
        reports.append(_copy_to_cross(model, cross, source, []))
    return [report._replace(notes=(*report.notes, *note)) for report in reports]


def load_cross(
    model: VLPModel,
    state: Mapping[str, Tensor],
    source: str,
    settings: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Copy the last layers of a BERT to the cross-modal encoder."""
    weights, unused = {}, []
    layers = {key: _BERT_LAYER_NAME.fullmatch(key) for key in state}
    count = 1 + max((int(layer[1]) for layer in layers.values() if layer), default=-1)
    first = count - model.config.cross.layers
    if first < 0:
        raise ConfigError(f"{source} has {count} layers, cross.layers needs {count - first}")
    for key, layer in layers.items():
        target = BERT_LAYER.get(layer[2]) if layer else None
        if layer and target and int(layer[1]) >= first:
            weights[f"layers.{int(layer[1]) - first}.{target}.{layer[3]}"] = state[key]
        else:
            unused.append(key)
    notes = check_bert(settings, model.config, source, with_cross=True, with_text=False)
    report = _copy_to_cross(model, weights, source, unused)
    return report._replace(notes=(*report.notes, *notes))


def _copy_to_cross(
    model: VLPModel, weights: Mapping[str, Tensor], source: str, unused: list[str]
) -> LoadReport:
    # BERT has neither cross-attention nor positions of our encodings.
    new_parts = (POSITION_TABLES, r"layers\.\d+\.cross_attention\.", r"layers\.\d+\.cross_norm\.")
    optional = new_parts if weights else (r"layers\.", *new_parts)
    return copy_weights(
        model.cross_encoder, weights, f"{source} -> cross-modal encoder", unused, optional
    )


def load_vit(
    model: VLPModel,
    state: Mapping[str, Tensor],
    source: str,
    settings: Mapping[str, Any] | nn.Module | None = None,
) -> LoadReport:
    """Copy the first blocks of a ViT or DeiT in timm's names; positions are resampled."""
    config, weights, unused, notes = model.config.image, {}, [], []
    check_pixels(settings, config, source)
    blocks = {int(block[1]) for key in state if (block := _BLOCK.match(key))}
    if len(blocks) < config.layers:
        raise ConfigError(f"{source} has {len(blocks)} blocks, image.layers needs {config.layers}")
    target, unknown = model.image_encoder.state_dict(), []
    resized = []
    for key, tensor in state.items():
        block = _BLOCK.match(key)
        if key == "pos_embed" and config.position == "none":
            notes.append("its positions are left out, as image.position is none")
            unused.append(key)
        elif key.startswith(_VIT_UNUSED) or (block and int(block[1]) >= config.layers):
            unused.append(key)
        elif f"vit.{key}" not in target:
            unknown.append(key)
        else:
            if key == "pos_embed":
                # DeiT's distillation token and its position are left out.
                if "dist_token" in state:
                    tensor = torch.cat([tensor[:, :1], tensor[:, 2:]], dim=1)
                    notes.append("the distillation token and its position are left out")
                fitted = resample_positions(tensor, config.tower_grid, source)
                resized = [] if fitted is tensor else ["vit.pos_embed"]
                tensor = fitted
            weights[f"vit.{key}"] = tensor
    if unknown:
        raise ValueError(f"{source}: no rule maps these keys of a ViT: {listed(unknown)}")
    notes += check_vit(settings, vit_settings(model.image_encoder.vit, "image encoder"), source)
    report = copy_weights(
        model.image_encoder, weights, f"{source} -> image encoder", unused, IMAGE_OPTIONAL
    )
    matched = [name for name in report.matched if name not in resized]
    return report._replace(resized=resized, matched=matched, notes=(*report.notes, *notes))


def resample_positions(
    positions: Tensor, grid: tuple[int, int], source: str, antialias: bool = True
) -> Tensor:
    """Resample a ViT's learned positions to a grid (rows, columns): bicubic, [CLS] unchanged.

    (1, 1 + M, width) of a square grid -> (1, 1 + rows * columns, width), at least float32, or the
    tensor itself if it fits. antialias: True as timm; False as DeiT's and ALBEF's authors.
    """
    from timm.layers.pos_embed import resample_abs_pos_embed

    rows, columns = grid
    if positions.ndim == 3 and positions.shape[1] == 1 + rows * columns:
        return positions
    if positions.ndim != 3 or not _is_square(positions.shape[1] - 1):
        raise ValueError(
            f"{source}: positions {tuple(positions.shape)} are not (1, 1 + a square, width)"
        )
    # Half precision would round the result once more.
    positions = at_least_float32(positions)
    return resample_abs_pos_embed(
        positions, [rows, columns], num_prefix_tokens=1, antialias=antialias, verbose=False
    )


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count
