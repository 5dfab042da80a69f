"""Sources of public weights: a folder, the hub, one file, or a name that timm knows.

No code of a file is run, and nothing is filled in: what a file lacks is missing here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vlp.io import may_be_on_hub, parse_json
from vlp.models.pretrained.pth import read_pth
from vlp.models.pretrained.transformers_vit import timm_names, timm_settings

CONFIG = "config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")
_LOCAL, _HUB = "local-dir:", ("hf-hub:", "hf_hub:")


class Published(NamedTuple):
    """Tensors under the source's own names, and what no shape of theirs tells.

    settings: of a BERT its config.json; of a ViT as `vit_settings` gives them; None of a file
    alone, which says nothing beside its tensors.
    """

    state: dict[str, Tensor]
    settings: Mapping[str, Any] | None = None


def read_bert(name: str) -> Published:
    """A public BERT: a folder or hub name in transformers' form, or one file.

    Raises:
        FileNotFoundError: it is neither here nor on the hub, or a file of it is missing.
        ValueError: a file is damaged, or cannot be read without running code.
    """
    if Path(name).suffix in _SUFFIXES and not Path(name).is_dir():
        return Published(read_tensors(Path(name)))
    config, weights = _find(name)
    return Published(read_tensors(weights), _read_config(config))


def read_vit(name: str, with_settings: bool = True) -> Published:
    """A public ViT or DeiT in timm's names: a file, folder, hub name, or model that timm knows.

    Folders and hub names are in timm's form (`save_for_hf`) or in that of transformers. Without
    settings, which `vit_settings` gives, any other model of timm is read, too.

    Raises:
        FileNotFoundError: it is neither here nor on the hub, or a file of it is missing.
        ValueError: a file is damaged or cannot be read without running code, or it is no ViT.
    """
    if Path(name).suffix in _SUFFIXES and not Path(name).is_dir():
        return Published(read_tensors(Path(name)))
    if not (name.startswith((_LOCAL, *_HUB)) or "/" in name or Path(name).is_dir()):
        return _from_timm(name, with_settings)
    config_file, weights = _find(name)
    config, state = _read_config(config_file), read_tensors(weights)
    if "architecture" in config:
        return Published(state, _settings_of_folder(config_file.parent) if with_settings else None)
    if config.get("model_type") in ("vit", "deit"):
        return Published(timm_names(state, name), timm_settings(config))
    raise ValueError(
        f"{config_file}: names neither a timm architecture nor model_type vit or deit "
        f"(model_type is {config.get('model_type')!r})"
    )


def vit_settings(vit: nn.Module, name: str) -> dict[str, Any]:
    """Return the ViT settings that tensors do not tell: heads, block form, activation, epsilon.

    Raises:
        ValueError: it is none of timm's vision transformers.
    """
    if not isinstance(vit, VisionTransformer):
        raise ValueError(f"{name} is a {type(vit).__name__}, not a vision transformer")
    block: Any = vit.blocks[0]
    return {
        "heads": block.attn.num_heads,
        "block": type(block).__name__,
        "activation": str(block.mlp.act),
        "norm_eps": block.norm1.eps,
    }


def read_tensors(file: Path) -> dict[str, Tensor]:
    """A state dict from `.safetensors`, or from any file that torch wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or cannot be read without running code.
    """
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if file.suffix != ".safetensors":
        return read_pth(file)
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged ({error})") from error


def _find(name: str) -> tuple[Path, Path]:
    """Configuration and weights of a folder, or of a name on the hub."""
    folder = Path(name.removeprefix(_LOCAL))
    if folder.is_dir():
        missing = [CONFIG] if not (folder / CONFIG).is_file() else []
        weights = [folder / file for file in WEIGHT_FILES if (folder / file).is_file()]
        if not weights:
            missing.append(" or ".join(WEIGHT_FILES))
        if missing:
            raise FileNotFoundError(f"cannot load {folder}: it has no {' and no '.join(missing)}")
        return folder / CONFIG, weights[0]
    if name.startswith(_LOCAL) or not (name.startswith(_HUB) or may_be_on_hub(name)):
        raise FileNotFoundError(f"cannot load {folder}: there is no such folder")
    for prefix in _HUB:
        name = name.removeprefix(prefix)
    return _from_hub(name)


def _from_hub(name: str) -> tuple[Path, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(name, CONFIG))
        for file in WEIGHT_FILES:
            try:
                return config, Path(hf_hub_download(name, file))
            except EntryNotFoundError as error:
                # Without a network, what is not in the cache may be on the hub all the same.
                last = error
    except Exception as error:  # of the name, the network, the service or the disk
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FileNotFoundError(
            f"cannot load {name}: no such folder here, and the hub gave none ({reason})"
        ) from error
    where = "in the cache" if isinstance(last, LocalEntryNotFoundError) else "on the hub"
    raise FileNotFoundError(f"cannot load {name}: no {' or '.join(WEIGHT_FILES)} {where}")


def _from_timm(name: str, with_settings: bool) -> Published:
    import timm

    if not timm.is_model(name):
        raise FileNotFoundError(
            f"cannot load {name}: neither a file, a folder, a hub name (OWNER/NAME) nor a model of "
            "timm"
        )
    try:
        vit = timm.create_model(name, pretrained=True)
    except Exception as error:  # of the tag, the network, the service or the disk
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FileNotFoundError(f"cannot load {name}: {reason}") from error
    return Published(dict(vit.state_dict()), vit_settings(vit, name) if with_settings else None)


def _settings_of_folder(folder: Path) -> dict[str, Any]:
    """Return the settings that timm reads from a folder's configuration, without its weights."""
    import timm

    try:
        with torch.device("meta"):
            vit = timm.create_model(f"{_LOCAL}{folder}", pretrained=False)
    except Exception as error:  # of any key that its configuration has
        raise ValueError(f"{folder / CONFIG}: timm makes no model of it ({error})") from error
    return vit_settings(vit, str(folder))


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: a configuration is a mapping of keys, not {config!r}")
    return MappingProxyType(config)
