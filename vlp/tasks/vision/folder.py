"""The model folder of a vision task: weights and the configuration that they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vlp.config import Config
from vlp.io import parse_json, write_json, write_tensors

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MODEL_TYPE = "vlp-vision"


def save_task(
    folder: Path, config: Config, state: dict[str, Tensor], known: dict[str, Any] | None = None
) -> None:
    """Write a folder that `load_task` reads.

    Args:
        folder: made if missing.
        config: of the task, with its `kind`.
        state: full weights and buffers of the task, by name.
        known: what the data told when it was opened, such as class names; plain JSON values.
    """
    plain = {"model_type": MODEL_TYPE, "task": config.model_dump(mode="json"), "known": known or {}}
    write_json(folder / CONFIG, plain)
    weights = {name: value.detach().cpu().clone() for name, value in state.items()}
    write_tensors(folder / WEIGHTS, weights, {"format": "pt"})


def read_task(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """The task's configuration, what the data told, and the weights, as `save_task` had them.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: it is the folder of something else, or damaged.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is not a model folder: {name} is missing")
    try:
        plain = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        if plain.get("model_type") != MODEL_TYPE:
            raise ValueError(f"{folder} holds no vision task but {plain.get('model_type')!r}")
        return plain["task"], plain["known"], load_file(folder / WEIGHTS)
    except (json.JSONDecodeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{folder}: damaged ({error})") from error
