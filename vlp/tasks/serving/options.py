"""Options of `from_pretrained` that transformers' classes take."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch

from vlp.models.config import ModelConfig

_IGNORED = {
    *("adapter_kwargs", "attn_implementation", "ignore_mismatched_sizes", "low_cpu_mem_usage"),
    "output_loading_info",
    *("trust_remote_code", "use_safetensors", "weights_only", "state_dict", "tp_plan"),
}
"""Arguments of transformers' `from_pretrained` that change nothing here."""
OF_PROCESSORS = {
    *("backend", "code_revision", "use_fast"),
    *("device_map", "dtype", "torch_dtype", *ModelConfig.model_fields),
}
"""Those of processors beside; pipelines give image processors the model's, too."""


def type_of(dtype: torch.dtype | str | None, options: dict[str, Any]) -> torch.dtype | str | None:
    """Return the type that weights are to have; None, as of "auto", leaves them.

    Args:
        dtype: argument of `from_pretrained`.
        options: its others, which lose `torch_dtype`, the old name of it.
    """
    former = options.pop("torch_dtype", None)
    dtype = former if dtype is None else dtype
    return None if dtype == "auto" else dtype


def known_options(options: Mapping[str, Any], known: Container[str] = ()) -> dict[str, Any]:
    """Return those of `from_pretrained`'s options that change something.

    Raises:
        TypeError: one is neither known nor an argument of transformers.
    """
    changes = {name: value for name, value in options.items() if name not in _IGNORED}
    for name in changes:
        if name not in known:
            raise TypeError(f"from_pretrained() has no argument {name!r}")
    return changes


def one_device(device_map: Any) -> Any:
    """Return the one device that a map of transformers names.

    Raises:
        ValueError: it names several.
    """
    if isinstance(device_map, Mapping):
        devices = set(device_map.values())
        if len(devices) > 1:
            raise ValueError("device_map spreads the model over devices; name one device")
        return next(iter(devices), None)
    if device_map in ("auto", "balanced", "sequential"):
        return "cuda" if torch.cuda.is_available() else None
    return device_map
