"""The configuration of transformers' classes: `config.json` of a model folder as it stands."""

from __future__ import annotations

import importlib
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from vlp.config import merge, require_plugins, validate
from vlp.models.config import ModelConfig
from vlp.positions import list_positions

_MODELS = ("vlp.serving.model", "vlp.serving.model")


class VlpConfig(PreTrainedConfig):
    """Sizes of a `VlpModel`: the keys of `vlp.models.config.ModelConfig`.

    Args:
        plugins: module of each encoding of another package, as `config.json` has them; they must be
            imported already.
        options: transformers' own, such as `id2label`; they are not saved.
    """

    model_type = "vlp"

    def __init__(
        self,
        text: Mapping[str, Any] | None = None,
        image: Mapping[str, Any] | None = None,
        cross: Mapping[str, Any] | None = None,
        embed_dim: int = 256,
        temperature: float = 0.07,
        feature_dropout: float = 0,
        token_projection: bool = True,
        plugins: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        values = {
            "text": text or {},
            "image": image or {},
            "cross": cross or {},
            "embed_dim": embed_dim,
            "temperature": temperature,
            "feature_dropout": feature_dropout,
            "token_projection": token_projection,
        }
        require_plugins(plugins or {}, list_positions(), "encoding", "VlpConfig")
        sizes = validate(values, ModelConfig, "VlpConfig").model_dump(mode="json")
        super().__init__(**options)
        for name, value in sizes.items():
            setattr(self, name, value)
        # Before an Auto class looks for the model of a configuration.
        for module in _MODELS:
            importlib.import_module(module)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Return the configuration of a `config.json`, changed by `options`.

        Options are keys, of which a part of a section leaves its rest, and transformers' own.
        """
        # Layers choose it by device.
        options.pop("attn_implementation", None)
        changes = {name: options.pop(name) for name in ModelConfig.model_fields if name in options}
        return super().from_dict(merge(config_dict, changes), **options)

    @property
    def sizes(self) -> ModelConfig:
        """Return the keys as a `ModelConfig`."""
        values = {name: getattr(self, name) for name in ModelConfig.model_fields}
        return validate(values, ModelConfig, "VlpConfig")

    @classmethod
    def of(cls, sizes: ModelConfig, **options: Any) -> VlpConfig:
        """Return the configuration of a model of these sizes."""
        return cls(**sizes.model_dump(mode="json"), **options)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **options: Any
    ) -> None:
        """Write `config.json`, as training does."""
        # Imported only when a model is saved.
        from vlp.models.folder import save_sizes

        folder = Path(save_directory)
        save_sizes(folder, self.sizes)
        if push_to_hub:
            self.push_to_hub(options.pop("repo_id", folder.name), **options)


AutoConfig.register("vlp", VlpConfig, exist_ok=True)


# Arguments of transformers' `from_pretrained` that change nothing here.
_IGNORED = {
    *("adapter_kwargs", "attn_implementation", "ignore_mismatched_sizes", "low_cpu_mem_usage"),
    *("trust_remote_code", "use_safetensors", "weights_only", "tp_plan"),
}
# Options of processors, which pipelines mix with the model's.
OF_PROCESSORS = {
    *("backend", "code_revision", "use_fast"),
    *("device_map", "dtype", "torch_dtype", *ModelConfig.model_fields),
}


def weights_dtype(
    dtype: torch.dtype | str | None, options: dict[str, Any]
) -> torch.dtype | str | None:
    """Return the type of the weights; None, as of "auto", leaves them."""
    # The old name of the option, which pipelines still pass.
    torch_dtype = options.pop("torch_dtype", None)
    dtype = torch_dtype if dtype is None else dtype
    return None if dtype == "auto" else dtype


def require_options(options: Mapping[str, Any], supported: Container[str] = ()) -> dict[str, Any]:
    """Return the options of `from_pretrained` that change something; others raise TypeError."""
    changes = {name: value for name, value in options.items() if name not in _IGNORED}
    for name in changes:
        if name not in supported:
            raise TypeError(f"from_pretrained() has no argument {name!r}")
    return changes


def single_device(device_map: Any) -> Any:
    """Return the one device that a map of transformers names."""
    if isinstance(device_map, Mapping):
        devices = set(device_map.values())
        if len(devices) > 1:
            raise ValueError("device_map spreads the model over devices; name one device")
        return next(iter(devices), None)
    if device_map in ("auto", "balanced", "sequential"):
        return "cuda" if torch.cuda.is_available() else None
    return device_map
