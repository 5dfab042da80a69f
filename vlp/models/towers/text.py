"""Text towers from outside: any BERT-like encoder of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vlp.config import ConfigError
from vlp.io import may_be_on_hub, parse_json
from vlp.models.config import ModelConfig, TextConfig

# They say where a configuration comes from, or in which type its weights are stored.
_LEFT_OUT = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype"}
_CONFIG = "config.json"


def with_architecture(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the settings that `text.architecture` names in its place.

    Raises:
        ConfigError: it names neither a folder nor a model of the hub with a `config.json`.
    """
    name = config.text.architecture
    if not isinstance(name, str):
        return config
    try:
        settings = parse_json(_config_file(name).read_text(encoding="utf-8"))
    except Exception as error:  # of the name, the network, the service, the disk or the file
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"text.architecture {name}: no {_CONFIG} of transformers in such a folder or on the "
            f"hub ({reason})"
        ) from error
    text = config.text.model_copy(update={"architecture": settings})
    return config.model_copy(update={"text": text})


def create_text_tower(config: TextConfig) -> nn.Module:
    """Make the model that `text.architecture` describes, without a pooler and without weights.

    It takes `input_ids` and `attention_mask`, and returns `last_hidden_state`.

    Raises:
        ConfigError: transformers has no such model, it is no encoder that reads whole texts, or its
            vocabulary or its positions do not fit.
    """
    from transformers import AutoModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

    settings = transformers_config(config)
    kind = settings.model_type
    if type(settings) not in MODEL_FOR_MASKED_LM_MAPPING or settings.is_encoder_decoder:
        raise ConfigError(
            f"text.architecture: {kind} is not BERT-like; choose bert, roberta, mpnet, distilbert, "
            "electra, modernbert or another encoder that predicts masked words"
        )
    if settings.vocab_size != config.vocab_size:
        raise ConfigError(
            f"text.vocab_size is {config.vocab_size}, and text.architecture has "
            f"{settings.vocab_size} word pieces; set text.vocab_size={settings.vocab_size}"
        )
    most = getattr(settings, "max_position_embeddings", config.max_tokens)
    if config.max_tokens > most:
        raise ConfigError(
            f"text.max_tokens {config.max_tokens} is more than the {most} positions of "
            "text.architecture"
        )
    make, kinds = partial(AutoModel.from_config, settings), MODEL_MAPPING[type(settings)]
    one: Any = kinds[0] if isinstance(kinds, tuple) else kinds
    if "add_pooling_layer" in inspect.signature(one).parameters:
        make = partial(make, add_pooling_layer=False)
    try:
        tower: nn.Module = make()
    except Exception as error:  # of any setting
        raise ConfigError(
            f"text.architecture: transformers makes no {kind} of it ({error!r})"
        ) from error
    return tower


def transformers_config(config: TextConfig) -> Any:
    """Return `text.architecture` as a configuration of transformers.

    Raises:
        ConfigError: it names no `model_type` that transformers knows, or has values that fit none.
    """
    from transformers import AutoConfig

    if not isinstance(config.architecture, Mapping):
        raise ConfigError(f"text.architecture {config.architecture!r} is no mapping of settings")
    plain = {key: value for key, value in config.architecture.items() if key not in _LEFT_OUT}
    try:
        return AutoConfig.for_model(plain.pop("model_type"), **plain)
    except Exception as error:  # of the name or any value
        raise ConfigError(
            f"text.architecture: transformers reads no configuration from it ({error!r})"
        ) from error


def word_width(config: TextConfig) -> int:
    """Return the channels of the text encoder's table of word pieces."""
    if config.architecture is None:
        return config.width
    settings = transformers_config(config)
    return int(getattr(settings, "embedding_size", None) or settings.hidden_size)


def blocks_of(tower: nn.Module) -> str:
    """Return the dotted name of a tower's list of layers: its longest list of modules."""
    lists = {n: part for n, part in tower.named_modules() if isinstance(part, nn.ModuleList)}
    return max(lists, key=lambda name: len(lists[name]))


def _config_file(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name) / _CONFIG
    if not may_be_on_hub(name):
        raise FileNotFoundError("there is no such folder")
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, _CONFIG))
