"""The DeepSpeed configuration of a run: YAML says how to train, a JSON file how to share memory."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from vlp.config import ConfigError
from vlp.io import parse_json
from vlp.training.config import LoopConfig

# Where the YAML says what DeepSpeed's JSON could say, too.
_OWNED_BY_YAML = {
    "optimizer": "training.optimiser",
    "scheduler": "training.optimiser",
    "gradient_clipping": "training.optimiser.clip",
    "train_batch_size": "training.batch",
    "train_micro_batch_size_per_gpu": "training.batch",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "bfloat16": "training.precision",
    "amp": "training.precision",
    "torch_autocast": "training.precision",
    "data_types": "training.precision",
}


def deepspeed_file(name: str) -> Path:
    """Return the JSON file of `training.deepspeed`: a path, or one of configs/deepspeed.

    Raises:
        ConfigError: there is no such file; the known names are listed.
    """
    if name.endswith(".json") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"training.deepspeed: there is no file {path}")
        return path
    folder = Path(str(resources.files("configs"))) / "deepspeed"
    path = folder / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.json")))
        raise ConfigError(f"training.deepspeed: unknown name {name!r}; known are {known}")
    return path


def deepspeed_config(config: LoopConfig, world_size: int) -> dict[str, Any]:
    """Merge the YAML's batch, accumulation and clipping with the JSON's ZeRO settings.

    Parameters and optimiser state stay float32 at every precision: the task autocasts itself.

    Raises:
        ConfigError: the JSON says what the YAML owns or asks for an offload, or the ranks do not
            divide the batch.
    """
    path = deepspeed_file(config.deepspeed)
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    for key in values:
        if key in _OWNED_BY_YAML:
            raise ConfigError(f"{path}: '{key}' belongs in the YAML file, as {_OWNED_BY_YAML[key]}")
        if not key.startswith("zero_"):
            raise ConfigError(f"{path}: '{key}' is not about ZeRO; this file speaks of ZeRO only")
    zero = values.get("zero_optimization", {})
    if zero.get("stage") not in (0, 1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage must be 0, 1, 2 or 3")
    for key, value in zero.items():
        if key.startswith("offload_") and value:
            raise ConfigError(f"{path}: {key} is not supported; the state stays on the device")
    config.require_equal_shares(world_size)
    clip = config.optimiser.clip
    return values | {
        "train_batch_size": config.batch * config.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": config.batch // world_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        # Stage 0 is clipped by our engine, with the formula that the other stages use.
        "gradient_clipping": 0.0 if clip is None or zero["stage"] == 0 else clip,
        "steps_per_print": None,
    }
