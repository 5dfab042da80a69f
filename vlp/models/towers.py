"""Image and text towers of timm and transformers, and which of their layers are trained."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from timm.layers.patch_embed import PatchEmbed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vlp.config import ConfigError
from vlp.io import check_hub, may_be_on_hub, parse_json
from vlp.models.config import ImageConfig, ModelConfig, TextConfig, Trainable


def create_image_tower(config: ImageConfig) -> nn.Module:
    """Create the headless model of `image.architecture` at the configured size, like a timm ViT."""
    import timm

    tower_options = config.architecture if isinstance(config.architecture, Mapping) else {}
    name = str(config.tower_name)
    options = {key: value for key, value in tower_options.items() if key != "name"}
    # Weights come from `image.weights` alone.
    if file_options := _FILES & options.keys():
        raise ConfigError(
            f"image.architecture.{min(file_options)}: would read weights of its own; leave it out"
        )
    try:
        tower: Any = timm.create_model(
            name, pretrained=False, num_classes=0, img_size=config.image_size, **options
        )
        # Drop an attention pool, which nothing reads.
        tower.reset_classifier(0, "")
    except Exception as error:  # of any name, option or size
        raise ConfigError(
            f"image.architecture {name}: timm makes no ViT of {config.image_size} px of it with "
            f"{options} ({error})"
        ) from error
    embed: Any = next((part for part in map(tower.__dict__["_modules"].get, _EMBEDS) if part), None)
    size = getattr(embed, "patch_size", None)
    if size is None or not isinstance(getattr(tower, "num_prefix_tokens", None), int):
        raise ConfigError(
            f"image.architecture {name}: a {type(tower).__name__} gives no [CLS], registers and "
            "patches on one grid; choose a ViT, DeiT, EVA or BEiT"
        )
    grid = getattr(embed, "grid_size", None)
    patch = config.image_size // grid[0] if grid else size if isinstance(size, int) else size[0]
    if patch != config.patch_size:
        raise ConfigError(
            f"image.patch_size is {config.patch_size}, and {name} has patches of {patch} px; set "
            f"image.patch_size={patch} and an image_size that is a multiple of it"
        )
    return tower


def fit_image_tower(tower: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to a tower's names and sizes by timm's filter, which resamples positions."""
    # The class of a tower with encodings derives from timm's.
    modules = (sys.modules[kind.__module__] for kind in type(tower).__mro__)
    filters = (getattr(module, "checkpoint_filter_fn", None) for module in modules)
    convert = next(filter(None, filters), None)
    try:
        return dict(convert(dict(state), tower)) if convert else dict(state)
    except Exception as error:  # of any name or shape
        raise ValueError(
            f"timm cannot convert these weights for a {type(tower).__name__} ({error!r})"
        ) from error


_EMBEDS = ("patch_embed", "embeds")
_FILES = {"checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}


def require_editable(config: ImageConfig) -> None:
    """Require a tower with replaceable patch embeddings (B, M, width), as MIM needs."""
    with torch.device("meta"):
        tower: Any = create_image_tower(config)
    embed = getattr(tower, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or not embed.flatten or tower.num_features != config.width:
        raise ConfigError(
            f"objectives.mim: the patches of {config.tower_name}, {tower.num_features} channels, "
            f"cannot be replaced by a mask token of {config.width}; leave mim out"
        )


# Origin of a configuration, and the type that its weights are stored in.
_IGNORED = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype"}
_CONFIG = "config.json"
# Implementations without code from the hub. Quantised weights bring their own kernels.
_ATTENTIONS = (None, "eager", "sdpa", True, False)
_CODE = {"quantization_config", "custom_pipelines", "trust_remote_code", "use_kernels"}


def with_architecture(config: ModelConfig) -> ModelConfig:
    """Return the configuration with settings for a name or folder in `text.architecture`."""
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
    """Create transformers' model of `text.architecture`, without pooler and weights."""
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
    make, kinds = partial(AutoModel.from_config, settings), MODEL_MAPPING[type(settings)]
    tower_class: Any = kinds[0] if isinstance(kinds, tuple) else kinds
    # Not every class takes the argument.
    if "add_pooling_layer" in inspect.signature(tower_class).parameters:
        make = partial(make, add_pooling_layer=False)
    try:
        tower: nn.Module = make()
    except Exception as error:  # of any setting
        raise ConfigError(
            f"text.architecture: transformers makes no {kind} of it ({error!r})"
        ) from error
    positions = getattr(settings, "max_position_embeddings", config.max_tokens) - position_offset(
        tower
    )
    if config.max_tokens > positions:
        raise ConfigError(
            f"text.max_tokens {config.max_tokens} is more than the {positions} positions of "
            "text.architecture"
        )
    return tower


def position_offset(tower: nn.Module) -> int:
    """Return the index of a text's first position, 0 without an offset."""
    # RoBERTa counts positions from behind the id of padding.
    for name, module in tower.named_modules():
        padding: Any = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            return int(padding) + 1
    return 0


def require_padding(tower: nn.Module | None, pad_id: int) -> None:
    """Require the vocabulary's id of padding of a tower that counts positions from it."""
    offset = 0 if tower is None else position_offset(tower)
    if offset and offset - 1 != pad_id:
        raise ConfigError(
            f"text.architecture.pad_token_id is {offset - 1} and data.vocabulary pads with "
            f"{pad_id}, by which this tower finds the places of words; set "
            f"text.architecture.pad_token_id={pad_id}, or the vocabulary of the weights"
        )


def transformers_config(config: TextConfig) -> Any:
    """Return `text.architecture` as a configuration of transformers."""
    from transformers import AutoConfig

    if not isinstance(config.architecture, Mapping):
        raise ConfigError(f"text.architecture {config.architecture!r} is no mapping of settings")
    plain = {key: value for key, value in config.architecture.items() if key not in _IGNORED}
    for key, value in plain.items():
        # transformers would fetch a kernel of that name from the hub, and run it.
        if ("implementation" in key and value not in _ATTENTIONS) or key in _CODE:
            raise ConfigError(
                f"text.architecture.{key} {value!r} may name code of others; leave it out"
            )
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

    check_hub()
    return Path(hf_hub_download(name, _CONFIG))


def require_maskable(image: ImageConfig) -> None:
    """Require that MIM can mask patches of the image encoder and learn from them."""
    if image.pool > 1:
        raise ValueError(
            f"objectives.mim predicts single patches; image.pool {image.pool} mixes them"
        )
    if image.trainable == 0:
        raise ValueError("objectives.mim trains the image encoder, which image.trainable 0 freezes")
    if image.architecture:
        require_editable(image)


class TrainableTower(nn.Module):
    """Base of both encoders: a tower of blocks, then an adapter and a projection.

    Subclasses set `blocks`, the dotted name of the list of blocks, and call `restrict`. A wholly
    frozen tower stays in evaluation mode.
    """

    AFTER: ClassVar[tuple[str, ...]] = ("projection", "adapter")
    blocks: str
    frozen: bool = False

    @property
    def depth(self) -> int:
        """Return the number of blocks."""
        return len(self.get_submodule(self.blocks))  # type: ignore[arg-type]

    def layer_distances(self) -> dict[str, int]:
        """Return the distance of each tower parameter from the top, by name.

        Norms after the last block have 0, the last block 1, the one before 2; embeddings and token
        encodings, with their norms, one more than the first block (BEiT's layer ids from the top).
        """
        block = re.compile(rf"{re.escape(self.blocks)}\.(\d+)\.")
        distances: dict[str, int] = {}
        for name, _ in self.named_parameters():
            if name.startswith(self.AFTER):
                continue
            if match := block.match(name):
                distances[name] = self.depth - int(match[1])
            else:
                is_norm = "norm" in name.lower() and "positions." not in name
                is_top = is_norm and 1 in distances.values()
                distances[name] = 0 if is_top else self.depth + 1
        return distances

    def restrict(self, trainable: Trainable, key: str) -> None:
        """Freeze all of the tower but its last `trainable` blocks and the norms after them."""
        # All, or LoRA, which freezes the tower once its weights are loaded.
        if isinstance(trainable, str):
            return
        if trainable > self.depth:
            raise ConfigError(f"{key} is {trainable}, and the tower has {self.depth} blocks")
        parameters = dict(self.named_parameters())
        for name, distance in self.layer_distances().items():
            parameters[name].requires_grad_(trainable > 0 and distance <= trainable)
        self.frozen = trainable == 0
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, except of a frozen tower and of batch norms with frozen statistics."""
        super().train(mode)
        for name, child in self.named_children():
            if self.frozen and name not in self.AFTER:
                child.eval()
        for norm in batch_norms(self):
            if not any(parameter.requires_grad for parameter in norm.parameters()):
                norm.eval()
        return self


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the layers that keep statistics of batches."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


def require_whole_batches(task: nn.Module, ranks: int, recomputed: str | None) -> None:
    """Require that batch norms of towers see each global batch whole, and once.

    recomputed: configuration key that runs a pass in chunks or twice.
    """
    towers = [part for part in task.modules() if isinstance(part, TrainableTower)]
    if (ranks > 1 or recomputed) and any(
        norm.training for tower in towers for norm in batch_norms(tower)
    ):
        raise ConfigError(
            f"a tower has batch norms, whose statistics {recomputed or 'several ranks'} would "
            "change: use one rank without it, another tower, or freeze the tower (trainable: 0)"
        )
