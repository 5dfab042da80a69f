"""A model folder's `config.json` as a configuration of transformers, and shared options."""

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


class VlpConfig(PreTrainedConfig):
    """Configuration of a `VlpModel`: the sections of `vlp.models.config.ModelConfig`.

    Args:
        plugins: module of each encoding of another package, as in `config.json`; the modules must
            be imported already.
        options: sections, such as `text`; and options of transformers, such as `id2label`, which
            are not saved.
    """

    model_type = "vlp"

    def __init__(self, *, plugins: Mapping[str, str] | None = None, **options: Any) -> None:
        require_plugins(plugins or {}, list_positions(), "encoding", "VlpConfig")
        sections = {name: options.pop(name, None) for name in ModelConfig.model_fields}
        sections = {name: section for name, section in sections.items() if section is not None}
        model_config = validate(sections, ModelConfig, "VlpConfig")
        super().__init__(**options)
        for name, section in model_config.model_dump(mode="json").items():
            setattr(self, name, section)
        # This import registers the models that Auto classes look up by this configuration.
        importlib.import_module("vlp.serving.model")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Return the configuration of a `config.json`, changed by `options`.

        Options are sections, whose keys are merged into the file's, and those of transformers.
        """
        # Without effect: layers choose their attention by device.
        options.pop("attn_implementation", None)
        changes = {name: options.pop(name) for name in ModelConfig.model_fields if name in options}
        return super().from_dict(merge(config_dict, changes), **options)

    @property
    def model_config(self) -> ModelConfig:
        """Return the sections as a `ModelConfig`."""
        sections = {name: getattr(self, name) for name in ModelConfig.model_fields}
        return validate(sections, ModelConfig, "VlpConfig")

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **options: Any
    ) -> None:
        """Write `config.json`, as training does."""
        from vlp.models.folder import save_sizes

        folder = Path(save_directory)
        save_sizes(folder, self.model_config)
        if push_to_hub:
            self.push_to_hub(options.pop("repo_id", folder.name), **options)


AutoConfig.register("vlp", VlpConfig, exist_ok=True)


# Arguments of transformers' `from_pretrained` that change nothing here.
_IGNORED = {
    *("adapter_kwargs", "attn_implementation", "ignore_mismatched_sizes", "low_cpu_mem_usage"),
    *("trust_remote_code", "use_safetensors", "weights_only", "tp_plan"),
}
# Options that pipelines pass to processors, some of them for the model only.
PROCESSOR_OPTIONS = {
    *("backend", "code_revision", "use_fast"),
    *("device_map", "dtype", "torch_dtype", *ModelConfig.model_fields),
}


def require_options(options: Mapping[str, Any], supported: Container[str] = ()) -> dict[str, Any]:
    """Return the `supported` options of `from_pretrained`; raise TypeError for unknown options."""
    supported_options = {name: value for name, value in options.items() if name not in _IGNORED}
    if unknown := [name for name in supported_options if name not in supported]:
        raise TypeError(f"from_pretrained() has no argument {unknown[0]!r}")
    return supported_options


def single_device(device_map: Any) -> Any:
    """Return the device in transformers' `device_map`; None: the CPU."""
    if isinstance(device_map, Mapping):
        devices = set(device_map.values())
        if len(devices) > 1:
            raise ValueError("device_map names several devices; the model needs a single device")
        return next(iter(devices), None)
    if device_map in ("auto", "balanced", "sequential"):
        return "cuda" if torch.cuda.is_available() else None
    return device_map
