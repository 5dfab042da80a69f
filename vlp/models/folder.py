"""The public model folder: weights, configuration, tokenizer and preprocessing.

A folder holds `model.safetensors`, `config.json`, the tokenizer's files and `preprocessing.json`;
one that pretraining wrote also `heads.safetensors`, the prediction heads of its objectives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vlp.data.text import TextProcessor
from vlp.data.transforms import Preprocessing
from vlp.models.config import ModelConfig
from vlp.models.vlp import VLPModel
from vlp.models.weights import LoadReport, copy_weights, resample_positions

# What one model may have and another may lack: encodings and token projections.
_OPTIONAL = r"(text|image)_tokens\.|cross_encoder\.(layers\.\d+\.(cross_)?attention\.)?positions\."

WEIGHTS, HEADS, CONFIG = "model.safetensors", "heads.safetensors", "config.json"


class Loaded(NamedTuple):
    """A model with what prepares its inputs.

    text: captions -> ids and masks, as `encode_text` takes them; preprocess: PIL picture ->
    (3, size, size) float32; heads: weights of pretraining's heads by name, such as
    `mlm_head.bias`, empty where the folder has none.
    """

    model: VLPModel
    text: TextProcessor
    preprocess: Preprocessing
    heads: Mapping[str, Tensor] = MappingProxyType({})


def save_pretrained(
    folder: str | Path,
    config: ModelConfig,
    state: dict[str, Tensor],
    text: TextProcessor,
    preprocess: Preprocessing,
    heads: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write a model folder that `from_pretrained` reads.

    Args:
        folder: made if missing.
        config: sizes of the model.
        state: full weights and buffers of a `VLPModel`, by name.
        text: tokenizer.
        preprocess: evaluation transform.
        heads: weights of pretraining's heads, by name.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text.save(folder)
    preprocess.save(folder)
    # A loaded folder needs no public weights: they are part of its own.
    plain = config.model_dump(mode="json")
    plain["text"]["weights"] = plain["image"]["weights"] = None
    (folder / CONFIG).write_text(
        json.dumps({"model_type": "vlp", **plain}, indent=2) + "\n", encoding="utf-8"
    )
    for file, tensors in ((WEIGHTS, state), (HEADS, heads)):
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        if own:
            save_file(own, folder / file, metadata={"format": "pt"})


def from_pretrained(folder_or_name: str | Path) -> Loaded:
    """Load a model folder, in evaluation mode on the CPU.

    A name that is no local folder is looked up on the hub (`huggingface_hub.snapshot_download`).

    Raises:
        FileNotFoundError: neither a folder nor a hub name, or a file is missing in it.
        ValueError: the weights do not fit the configuration, or a file is damaged.
    """
    folder = _local(folder_or_name)
    config_file, weights_file = folder / CONFIG, folder / WEIGHTS
    for file in (config_file, weights_file):
        if not file.is_file():
            raise FileNotFoundError(f"{folder} is not a model folder: {file.name} is missing")
    try:
        plain = json.loads(config_file.read_text(encoding="utf-8"))
        plain.pop("model_type", None)
        config = ModelConfig.model_validate(plain)
    except (json.JSONDecodeError, ValidationError) as error:
        raise ValueError(f"{config_file}: {error}") from error
    model = VLPModel(config)
    state = _read_weights(weights_file)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{weights_file} does not fit {config_file}: {error}") from error
    text = TextProcessor.load(folder, config.text.max_tokens)
    heads = _read_weights(folder / HEADS) if (folder / HEADS).is_file() else {}
    return Loaded(model.eval(), text, Preprocessing.load(folder), heads)


def start_from(model: VLPModel, folder_or_name: str | Path) -> LoadReport:
    """Start a model from a folder's weights; their configurations may differ in position encodings.

    Encodings and token projections that the folder lacks keep their own start (zero for ACE-RPE, so
    that the model computes at first what the folder's does); those it has and the model has not are
    left out. Image positions of another grid are resampled.

    Raises:
        FileNotFoundError: neither a folder nor a hub name, or it holds no weights.
        ValueError: anything else is missing, left over, or of another shape.
    """
    weights_file = _local(folder_or_name) / WEIGHTS
    if not weights_file.is_file():
        raise FileNotFoundError(f"{folder_or_name} is not a model folder: {WEIGHTS} is missing")
    state = _read_weights(weights_file)
    here = model.state_dict()
    unused = [name for name in state if name not in here and re.match(_OPTIONAL, name)]
    found = {name: tensor for name, tensor in state.items() if name not in unused}
    positions = "image_encoder.vit.pos_embed"
    resized = positions in found and found[positions].shape != here[positions].shape
    if resized:
        found[positions] = resample_positions(
            found[positions], model.config.image.grid, str(folder_or_name)
        )
    report = copy_weights(model, found, str(folder_or_name), unused, (_OPTIONAL,))
    return report._replace(resized=[positions] if resized else [])


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged ({error})") from error


def push_to_hub(folder: str | Path, repository: str, private: bool = False) -> str:
    """Upload a model folder to the hub and return its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    return str(api.upload_folder(folder_path=str(folder), repo_id=repository))


def _local(folder_or_name: str | Path) -> Path:
    folder = Path(folder_or_name)
    if folder.is_dir():
        return folder
    name = str(folder_or_name)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise FileNotFoundError(f"there is no model folder {name}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(f"{name} is neither a folder nor found on the hub") from error
