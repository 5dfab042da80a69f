"""Public weights of BERT and ViT/DeiT, renamed by fixed rules, with a report of each copy.

A source key without a rule is an error unless its prefix is declared unused; the report names every
target that keeps its initialisation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vlp.config import ConfigError
from vlp.data.image.transforms import FILE_NAME, Preprocessing
from vlp.layers.blocks import NORM_EPS
from vlp.models.config import ImageConfig, ModelConfig
from vlp.models.image_encoder import create_tower
from vlp.models.pretrained.published import network_settings, read_bert, read_vit, vit_settings
from vlp.models.towers import fit_image_tower, transformers_config
from vlp.models.vlp import VLPModel
from vlp.precision import at_least_float32

# Settings of BERT that no key of the model changes, with their allowed values. The first is also
# transformers' default for a config.json without the setting.
_FIXED = {
    "model_type": ("bert",),
    "hidden_act": ("gelu", "gelu_python"),  # two implementations of one function
    "layer_norm_eps": (NORM_EPS,),
    "type_vocab_size": (2,),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
}

_UNKNOWN_HEADS = "the source does not state its heads: assuming {}"


def check_bert(
    settings: Mapping[str, Any] | None,
    config: ModelConfig,
    source: str,
    with_cross: bool,
    with_text: bool = True,
) -> list[str]:
    """Check a BERT's config.json against the model's configuration; return notes for the report."""
    if settings is None:
        # Shapes of weights tell all sizes but the number of heads, which is noted.
        return [_UNKNOWN_HEADS.format(config.text.heads if with_text else config.cross.heads)]
    keys = {"text.width": "hidden_size"}
    if with_text:
        keys |= {"text.heads": "num_attention_heads", "text.intermediate": "intermediate_size"}
        keys |= {"text.max_positions": "max_position_embeddings", "text.vocab_size": "vocab_size"}
    if with_cross:
        keys |= {"cross.heads": "num_attention_heads", "cross.intermediate": "intermediate_size"}
    sizes = [(bert_key, key, attrgetter(key)(config)) for key, bert_key in keys.items()]
    check_bert_settings(settings, sizes, source)
    return []


def check_bert_settings(
    settings: Mapping[str, Any], sizes: Sequence[tuple[str, str, int]], source: str
) -> None:
    """Check a BERT's config.json against this package's fixed settings, and sizes.

    sizes: key of config.json, key of the model's configuration, and the model's size.
    """
    defaults = {key: allowed[0] for key, allowed in _FIXED.items()} | {"num_attention_heads": 12}
    bert = defaults | dict(settings)
    problems = [
        f"{key} is {bert[key]!r} there and {allowed[0]!r} in this model, where no key sets it"
        for key, allowed in _FIXED.items()
        if bert[key] not in allowed
    ]
    # A size that the config.json lacks is checked by the shapes of the weights.
    problems += [
        f"{bert_key} is {bert[bert_key]} there and {key} is {size} here; set {key}={bert[bert_key]}"
        for bert_key, key, size in sizes
        if bert.get(bert_key, size) != size
    ]
    if problems:
        raise ConfigError(f"{source} does not fit: {'; '.join(problems)}")


def check_vit(
    source_model: Mapping[str, Any] | nn.Module | None, settings: Mapping[str, Any], source: str
) -> list[str]:
    """Check a public ViT against the model's `vit_settings`; return notes for the report.

    source_model: `vit_settings` or timm model of the source; None: unknown.
    """
    if source_model is None:
        return [_UNKNOWN_HEADS.format(settings["heads"])]
    if isinstance(source_model, nn.Module):
        source_model = vit_settings(source_model, source)
    heads = source_model["heads"]
    if heads != settings["heads"]:
        raise ConfigError(
            f"{source} has {heads} heads and image.heads is {settings['heads']}; set "
            f"image.heads={heads}"
        )
    _require_equal("{} is", source_model, settings, ("block", "activation"), source)
    # Only noted: for equal weights transformers states 1e-12 and timm 1e-6.
    source_eps, eps = source_model["norm_eps"], settings["norm_eps"]
    if source_eps != eps:
        return [f"norms add {source_eps:g} to the variance there, {eps:g} here"]
    return []


def check_image_tower(
    source_model: Mapping[str, Any] | nn.Module | None,
    tower: nn.Module,
    state: Mapping[str, Tensor],
    source: str,
) -> list[str]:
    """Check the settings of a source with weights `state` against a timm tower; return notes."""
    source_state = source_model.state_dict() if isinstance(source_model, nn.Module) else {}
    shapes_differ = any(
        source_state[name].shape != state[name].shape and "pos" not in name
        for name in source_state.keys() & state.keys()
    )
    if source_model is None or shapes_differ:
        return ["the source does not state heads and activations; assuming the tower's"]
    if not isinstance(source_model, nn.Module):
        return check_vit(source_model, vit_settings(tower, "image.architecture"), source)
    settings, source_settings = network_settings(tower), network_settings(source_model)
    keys = settings.keys() & source_settings.keys()
    # RoPE has no weights: only a module shows whether a model has RoPE.
    keys |= {"rope is"} & (settings.keys() | source_settings.keys())
    _require_equal("vit.{}", source_settings, settings, keys, source)
    return []


def check_inputs(
    source_model: Mapping[str, Any] | nn.Module | None, config: ImageConfig, source: str
) -> None:
    """Require the pixel normalisation of a ViT's training, and refuse to read an untrained [CLS].

    A configured normalisation takes precedence.
    """
    settings: Any = getattr(source_model, "pretrained_cfg", source_model) or {}
    statistics = tuple(tuple(settings.get(key) or ()) for key in ("mean", "std"))
    if config.normalisation is None and all(statistics) and statistics != config.statistics:
        value = json.dumps(statistics).replace(" ", "")
        raise ConfigError(
            f"{source} was trained with other mean and deviation of pixels than "
            f"{config.statistics}: set image.normalisation={value}"
        )
    # Other classes of timm, such as Eva, average by default, even with weights that train [CLS].
    if not isinstance(source_model, VisionTransformer) or source_model.cls_token is None:
        return
    if config.pooling == "cls" and source_model.global_pool in ("avg", "avgmax", "max"):
        raise ConfigError(
            f"{source} was trained with patches pooled by {source_model.global_pool}, and "
            "image.pooling cls would read its untrained [CLS]: set image.pooling=mean"
        )


# Settings of transformers that do not change an encoder's output; all others must be equal.
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
    model_settings, source_settings = model_config.to_dict(), source_config.to_dict()
    # Settings that also inference reads: ESM scales embeddings by its `token_dropout`.
    inference_keys = {"pad_token_id", "token_dropout"}
    # DeBERTa buckets offsets by the number of positions; other models have a table of that size.
    if model_settings.get("relative_attention"):
        inference_keys.add("max_position_embeddings")
    keys = {
        key
        for key in source_settings.keys() & model_settings.keys()
        if key in inference_keys or not _TRAINING_SETTINGS.fullmatch(key)
    }
    if model_config.model_type != source_config.model_type:
        keys = {"model_type"}
    _require_equal("text.architecture.{} is", source_settings, model_settings, keys, source)
    return []


def _require_equal(
    label: str,
    source_settings: Mapping[str, Any],
    settings: Mapping[str, Any],
    keys: Iterable[str],
    source: str,
) -> None:
    """Require equal settings of the source and of the model; `label` formats a key for messages."""
    values = (
        (key, source_settings.get(key, "missing"), settings.get(key, "missing")) for key in keys
    )
    problems = [
        f"{label.format(key)} {source_value} there and {value} here"
        for key, source_value, value in values
        if source_value != value
    ]
    if problems:
        raise ConfigError(f"{source} does not fit: {join_names(sorted(problems))}")


def check_folder(
    config: ModelConfig,
    trained_config: ModelConfig,
    name: str,
    processor_folder: Path | None = None,
    match_is_trained: bool = True,
) -> None:
    """Require the settings of a folder's training that the shapes of its weights do not show.

    processor_folder: folder with the training's processor, to compare pixel normalisation; None if
    that processor is used anyway. match_is_trained: compare cross.layout, which the match score
    depends on.
    """
    keys = ["image.pooling", "image.pooled_layers", "text.pooling", "cross.heads"]
    keys += ["cross.layout"] if match_is_trained else []
    architecture = config.image.architecture
    trained_architecture = trained_config.image.architecture
    keys += ["image.heads"] if architecture is None and trained_architecture is None else []
    keys += ["text.heads"] if config.text.architecture is None else []
    settings = [(key, attrgetter(key)(config), attrgetter(key)(trained_config)) for key in keys]
    if processor_folder is not None and (processor_folder / FILE_NAME).is_file():
        pixels = Preprocessing.load(processor_folder)
        settings += [("image.normalisation", config.image.statistics, (pixels.mean, pixels.std))]
    for key, value, trained_value in settings:
        if value != trained_value:
            is_tuple = isinstance(trained_value, tuple)
            text = json.dumps(trained_value).replace(" ", "") if is_tuple else trained_value
            raise ValueError(
                f"{name} was trained with {key} {trained_value}, not {value}: set {key}={text}"
            )
    # Towers of other settings, such as heads, may have the same weights.
    if architecture != trained_architecture:
        with torch.device("meta"):
            tower, trained_tower = map(create_tower, (config.image, trained_config.image))
        check_image_tower(trained_tower, tower, tower.state_dict(), name)
    text_architecture = trained_config.text.architecture
    if text_architecture is not None and config.text.architecture not in (None, text_architecture):
        check_text_tower(transformers_config(trained_config.text).to_dict(), config, name)


class LoadReport(NamedTuple):
    """Report of a weight copy."""

    source: str
    matched: list[str]  # tensors of the model that were copied unchanged
    resized: list[str]  # tensors of the model that were copied resampled
    missing: list[str]  # parts of the model that keep their initialisation, `*` for every layer
    unused: list[str]  # keys of the source
    notes: tuple[str, ...] = ()  # casts, and settings that differ or were assumed

    def __str__(self) -> str:
        """Return one line for the log."""
        parts = [f"{len(self.matched)} matched", f"{len(self.resized)} resized"]
        if self.missing:
            parts.append(
                f"{len(self.missing)} keep their initialisation ({', '.join(self.missing)})"
            )
        parts += [f"{len(self.unused)} not used", *self.notes]
        return f"{self.source}: {'; '.join(parts)}"


def copy_weights(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    unused: list[str],
    optional: tuple[str, ...],
    resized: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> LoadReport:
    """Copy tensors into a module after all checks.

    Args:
        weights: tensors by the module's names.
        unused: source keys that are not copied.
        optional: patterns of name prefixes that may keep their initialisation; the first match
            names the part in the report.
        resized: names in `weights` of resampled tensors, for the report.
    """
    target = module.state_dict()
    unknown = sorted(set(weights) - set(target))
    if unknown:
        raise ValueError(f"{source}: the model has no such weights: {join_names(unknown)}")
    missing, initial_parts = [], set()
    for name in target.keys() - weights.keys():
        matches = [match for pattern in optional if (match := re.match(pattern, name))]
        if matches:
            initial_parts.add(re.sub(r"\.\d+\.", ".*.", matches[0].group()).rstrip("."))
        else:
            missing.append(name)
    if missing:
        raise ValueError(f"{source}: these weights are missing: {join_names(sorted(missing))}")
    casts = set()
    for name, tensor in weights.items():
        model_tensor = target[name]
        if tensor.shape != model_tensor.shape:
            raise ValueError(
                f"{source}: {name} is {tuple(tensor.shape)} there and "
                f"{tuple(model_tensor.shape)} here"
            )
        # Values of 8 bits are quantised: they need scales, which no model here reads.
        is_float = tensor.is_floating_point() and tensor.itemsize > 1
        if model_tensor.is_floating_point() and not is_float:
            raise ValueError(
                f"{source}: {name} is {_dtype_name(tensor)} there, no float of 16 bits or more"
            )
        if not tensor.is_meta and not tensor.to(model_tensor.dtype).isfinite().all():
            raise ValueError(f"{source}: {name} has values that are not finite")
        if tensor.dtype != model_tensor.dtype:
            casts.add(f"{_dtype_name(tensor)} there, {_dtype_name(model_tensor)} here")
    with torch.no_grad():
        for name, tensor in weights.items():
            target[name].copy_(tensor)
    matched = sorted(set(weights) - set(resized))
    all_notes = (*sorted(casts), *notes)
    return LoadReport(source, matched, list(resized), sorted(initial_parts), unused, all_notes)


def join_names(names: Sequence[str]) -> str:
    """Join the first eight names for a message, and add the number of the others."""
    others = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + others


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Norm parameters in checkpoints converted from TensorFlow.
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}
# Parts of an image encoder that public weights lack.
IMAGE_OPTIONAL = (r"projection\.", r"adapter\.", r"vit\.(\S+\.)?positions\.")
_IMAGE_UNUSED = ("head", "pre_logits.", "fc_norm.", "attn_pool.", "mask_token")


def load_image_tower(model: VLPModel, name: str) -> LoadReport:
    """Initialise an image tower of timm from public weights; timm's filter resamples positions."""
    encoder, source = model.image_encoder, f"{name} -> {model.config.image.tower_name}"
    state, source_model = read_vit(name)
    check_inputs(source_model, model.config.image, source)
    notes = check_image_tower(source_model, encoder.vit, state, source)
    tower_state = fit_image_tower(encoder.vit, state)
    target = encoder.vit.state_dict()
    unused = [key for key in tower_state if key not in target and key.startswith(_IMAGE_UNUSED)]
    weights = {f"vit.{key}": tensor for key, tensor in tower_state.items() if key not in unused}
    resized = [
        f"vit.{key}"
        for key, tensor in state.items()
        if tower_state.get(key, tensor).shape != tensor.shape
    ]
    return copy_weights(encoder, weights, source, unused, IMAGE_OPTIONAL, resized, notes)


def load_text_tower(
    model: VLPModel, state: Mapping[str, Tensor], source: str, settings: Mapping[str, Any] | None
) -> LoadReport:
    """Initialise a text tower from weights of the same architecture; heads are not used.

    state: weights by the names of transformers, with the model's prefix (`roberta.`) or without.
    """
    notes = check_text_tower(settings, model.config, source)
    encoder = model.text_encoder
    tower: Any = encoder.tower
    parts = {name for name, _ in tower.named_children()}
    tensors = current_names(state, source, f"{tower.base_model_prefix}.")
    unused = [
        name
        for name in tensors
        if name.partition(".")[0] not in parts or name.endswith(".position_ids")
    ]
    weights = {f"tower.{name}": tensors[name][1] for name in tensors.keys() - unused}
    optional = (r"projection\.", r"adapter\.")
    return copy_weights(
        encoder, weights, f"{source} -> text encoder", unused, optional, notes=notes
    )


def current_names(
    state: Mapping[str, Tensor], source: str, prefix: str = "bert."
) -> dict[str, tuple[str, Tensor]]:
    """Return (source key, tensor) by current name: without prefix, gamma and beta renamed."""
    tensors: dict[str, tuple[str, Tensor]] = {}
    for key, tensor in state.items():
        module, dot, parameter = key.removeprefix(prefix).rpartition(".")
        if module.endswith("LayerNorm"):
            parameter = _OLD_NAMES.get(parameter, parameter)
        name = f"{module}{dot}{parameter}"
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
_BERT_LAYER_NAME = re.compile(r"encoder\.layer\.(\d+)\.(.+)")
_BLOCK = re.compile(r"blocks\.(\d+)\.")

# Weights that no public checkpoint has: the tables of ACE-RPE and other encodings.
POSITION_TABLES = r"(.+\.)?positions\."


def load_public_weights(model: VLPModel) -> list[LoadReport]:
    """Initialise the encoders from `text.weights`, `image.weights` and `cross.weights`.

    BERT's first layers go to the text encoder, and its next layers (or the last layers of the BERT
    in `cross.weights`) to the cross-modal encoder; its cross-attention keeps its initialisation.
    A ViT's first blocks go to the image encoder; positions of another grid are resampled. A tower
    of `architecture` gets all weights.
    """
    reports = []
    if name := model.config.text.weights:
        with _errors_name_key("text.weights"):
            bert = read_bert(name)
            if model.config.text.architecture:
                reports.append(load_text_tower(model, bert.state, name, bert.settings))
            else:
                reports += load_bert(model, bert.state, name, bert.settings)
    if name := model.config.cross.weights:
        with _errors_name_key("cross.weights"):
            bert = read_bert(name)
            reports.append(load_cross(model, bert.state, name, bert.settings))
    if name := model.config.image.weights:
        with _errors_name_key("image.weights"):
            if model.config.image.architecture:
                reports.append(load_image_tower(model, name))
            else:
                vit = read_vit(name)
                reports.append(load_vit(model, vit.state, name, vit.settings))
    return reports


@contextmanager
def _errors_name_key(key: str) -> Iterator[None]:
    """Prefix errors with the configuration key, and raise value errors as ConfigError."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{key}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def _bert_parts(
    state: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return the weights of a BERT's embeddings and of each layer, by this package's names.

    Heads are left out.
    """
    embedding: dict[str, Tensor] = {}
    layers: dict[int, dict[str, Tensor]] = {}
    unknown = []
    for name, (key, tensor) in current_names(state, source).items():
        module, _, parameter = name.rpartition(".")
        layer = _BERT_LAYER_NAME.fullmatch(module)
        if module in BERT_EMBEDDING:
            embedding[f"{BERT_EMBEDDING[module]}.{parameter}"] = tensor
        elif layer and layer[2] in BERT_LAYER:
            layers.setdefault(int(layer[1]), {})[f"{BERT_LAYER[layer[2]]}.{parameter}"] = tensor
        elif not name.startswith(BERT_UNUSED):
            unknown.append(key)
    if unknown:
        raise ValueError(f"{source}: no rule maps these keys of BERT: {join_names(unknown)}")
    return embedding, [layers.get(number, {}) for number in range(max(layers, default=-1) + 1)]


def _layer_weights(layers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the weights of all layers, with the prefixes `layers.0.`, `layers.1.`, ..."""
    return {
        f"layers.{number}.{name}": tensor
        for number, layer in enumerate(layers)
        for name, tensor in layer.items()
    }


def _unused_keys(state: Mapping[str, Tensor], *parts: Mapping[str, Tensor]) -> list[str]:
    """Return the keys of tensors in `state` that no part contains, under any name."""
    used = {id(tensor) for part in parts for tensor in part.values()}
    return [key for key, tensor in state.items() if id(tensor) not in used]


def last_bert_layers(
    state: Mapping[str, Tensor], count: int, source: str, key: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the last `count` layers of a BERT, numbered from 0, and unused source keys.

    key: configuration key that sets `count`.
    """
    _, layers = _bert_parts(state, source)
    if len(layers) < count:
        raise ConfigError(f"{source} has {len(layers)} layers, {key} needs {count}")
    weights = _layer_weights(layers[len(layers) - count :])
    return weights, _unused_keys(state, weights)


def load_bert(
    model: VLPModel,
    state: Mapping[str, Tensor],
    source: str,
    settings: Mapping[str, Any] | None = None,
) -> list[LoadReport]:
    """Copy a BERT's embeddings and first `text.layers` layers to the text encoder.

    Without `cross.weights`, the next `cross.layers` layers go to the cross-modal encoder.
    """
    text_layers, has_cross_source = model.config.text.layers, bool(model.config.cross.weights)
    cross_layers = 0 if has_cross_source else model.config.cross.layers
    embedding, layers = _bert_parts(state, source)
    text_weights = embedding | _layer_weights(layers[:text_layers])
    cross_weights = _layer_weights(layers[text_layers : text_layers + cross_layers])
    unused, count = _unused_keys(state, text_weights, cross_weights), len(layers)
    # A BERT of `text.layers` layers leaves the cross-modal encoder as it is.
    if count < text_layers or text_layers < count < text_layers + cross_layers:
        raise ConfigError(
            f"{source} has {count} layers; text.layers {text_layers} and cross.layers "
            f"{cross_layers} need {text_layers + cross_layers} (or {text_layers}, which leaves the "
            "cross-modal encoder at its initialisation)"
        )
    notes = check_bert(settings, model.config, source, with_cross=bool(cross_weights))
    text_source, optional = f"{source} -> text encoder", (r"projection\.",)
    reports = [
        copy_weights(model.text_encoder, text_weights, text_source, unused, optional, notes=notes)
    ]
    if not has_cross_source:
        reports.append(_copy_to_cross(model, cross_weights, source, [], notes))
    return reports


def load_cross(
    model: VLPModel, state: Mapping[str, Tensor], source: str, settings: Mapping[str, Any] | None
) -> LoadReport:
    """Copy the last layers of a BERT to the cross-modal encoder."""
    count = model.config.cross.layers
    weights, unused = last_bert_layers(state, count, source, "cross.layers")
    notes = check_bert(settings, model.config, source, with_cross=True, with_text=False)
    return _copy_to_cross(model, weights, source, unused, notes)


def _copy_to_cross(
    model: VLPModel,
    weights: Mapping[str, Tensor],
    source: str,
    unused: list[str],
    notes: Sequence[str],
) -> LoadReport:
    # BERT has neither cross-attention nor tables of position encodings.
    new_parts = (POSITION_TABLES, r"layers\.\d+\.cross_attention\.", r"layers\.\d+\.cross_norm\.")
    optional = new_parts if weights else (r"layers\.", *new_parts)
    return copy_weights(
        model.cross_encoder,
        weights,
        f"{source} -> cross-modal encoder",
        unused,
        optional,
        notes=notes,
    )


def load_vit(
    model: VLPModel,
    state: Mapping[str, Tensor],
    source: str,
    settings: Mapping[str, Any] | nn.Module | None = None,
) -> LoadReport:
    """Copy the first blocks of a ViT or DeiT in timm's names; positions are resampled.

    settings: as in `Published`.
    """
    config = model.config.image
    check_inputs(settings, config, source)
    blocks = {int(block[1]) for key in state if (block := _BLOCK.match(key))}
    if len(blocks) < config.layers:
        raise ConfigError(f"{source} has {len(blocks)} blocks, image.layers needs {config.layers}")
    target = model.image_encoder.state_dict()
    weights: dict[str, Tensor] = {}
    unused, unknown, resized, notes = [], [], [], []
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
            weights[f"vit.{key}"] = tensor
    if unknown:
        raise ValueError(f"{source}: no rule maps these keys of a ViT: {join_names(unknown)}")
    positions = weights.get("vit.pos_embed")
    if positions is not None:
        # Prefix tokens of a distilled DeiT: [CLS], then the distillation token.
        if "dist_token" in state:
            positions = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
            notes.append("the distillation token and its position are left out")
        weights["vit.pos_embed"] = resample_positions(positions, config.tower_grid, source)
        if weights["vit.pos_embed"] is not positions:
            resized.append("vit.pos_embed")
    notes += check_vit(settings, vit_settings(model.image_encoder.vit, "image encoder"), source)
    copy_source = f"{source} -> image encoder"
    return copy_weights(
        model.image_encoder, weights, copy_source, unused, IMAGE_OPTIONAL, resized, notes
    )


def resample_positions(
    positions: Tensor, grid: tuple[int, int], source: str, antialias: bool = True
) -> Tensor:
    """Resample a ViT's learned positions to a grid (rows, columns): bicubic, [CLS] unchanged.

    positions (1, 1 + M, width) of a square grid -> (1, 1 + rows * columns, width) in float32 or
    better; the same tensor if it has that shape already. antialias: True as in timm; False as in
    the code of DeiT and ALBEF.
    """
    from timm.layers.pos_embed import resample_abs_pos_embed

    rows, columns = grid
    if positions.ndim == 3 and positions.shape[1] == 1 + rows * columns:
        return positions
    patches = positions.shape[1] - 1 if positions.ndim == 3 else 0
    if patches < 1 or math.isqrt(patches) ** 2 != patches:
        raise ValueError(
            f"{source}: positions {tuple(positions.shape)} are not (1, 1 + a square, width)"
        )
    return resample_abs_pos_embed(
        at_least_float32(positions),
        [rows, columns],
        num_prefix_tokens=1,
        antialias=antialias,
        verbose=False,
    )
