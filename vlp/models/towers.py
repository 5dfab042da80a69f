"""Image and text towers of timm and transformers, and which of their layers are trained."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from timm.layers.patch_embed import PatchEmbed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vlp.config import ConfigError
from vlp.io import check_hub, may_be_on_hub, parse_json
from vlp.models.config import ImageConfig, ModelConfig, TextConfig, Trainable
from vlp.positions.options import suggestion


def create_image_tower(config: ImageConfig) -> nn.Module:
    """Create timm's model of `image.architecture` at the configured size, without a head."""
    import timm

    architecture = config.architecture if isinstance(config.architecture, Mapping) else {}
    name = str(config.tower_name)
    options = {key: value for key, value in architecture.items() if key != "name"}
    if file_options := _WEIGHT_OPTIONS & options.keys():
        raise ConfigError(
            f"image.architecture.{min(file_options)} reads weights: remove it and set image.weights"
        )
    try:
        tower: Any = timm.create_model(
            name, pretrained=False, num_classes=0, img_size=config.image_size, **options
        )
        # Drop an attention pool, which nothing reads.
        tower.reset_classifier(0, "")
    except Exception as error:  # timm raises various types for a wrong name, option or size
        hint = "" if timm.is_model(name) else suggestion(name, timm.list_models())
        with_options = f" with {options}" if options else ""
        raise ConfigError(
            f"image.architecture {name}{hint}: timm cannot create it for {config.image_size} px"
            f"{with_options} ({error})"
        ) from error
    embeds = [tower._modules[name] for name in _EMBEDS if tower._modules.get(name)]
    patch_size = getattr(embeds[0], "patch_size", None) if embeds else None
    if patch_size is None or not isinstance(getattr(tower, "num_prefix_tokens", None), int):
        raise ConfigError(
            f"image.architecture {name}: a {type(tower).__name__} lacks `num_prefix_tokens` or "
            "one grid of patches; choose a ViT, DeiT, EVA or BEiT"
        )
    grid = getattr(embeds[0], "grid_size", None)
    if grid:
        # The `patch_size` of a hybrid's embedding counts cells of its feature map, not pixels.
        patch_size = config.image_size // grid[0]
    elif not isinstance(patch_size, int):
        patch_size = patch_size[0]
    if patch_size != config.patch_size:
        raise ConfigError(
            f"image.patch_size is {config.patch_size}, and {name} has patches of {patch_size} px; "
            f"set image.patch_size={patch_size}, and image.image_size to a multiple of {patch_size}"
        )
    return tower


def fit_image_tower(tower: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to a tower's names and sizes by timm's filter, which resamples positions."""
    # timm's filter is a function of the module that defines the tower's class. A tower with
    # encodings has a class of this package, derived from timm's.
    modules = (sys.modules[base.__module__] for base in type(tower).__mro__)
    filters = [m.checkpoint_filter_fn for m in modules if hasattr(m, "checkpoint_filter_fn")]
    try:
        return dict(filters[0](dict(state), tower)) if filters else dict(state)
    except Exception as error:  # various types for a wrong name or shape
        raise ValueError(
            f"timm cannot convert these weights for a {type(tower).__name__} ({error!r})"
        ) from error


# Attributes that hold a tower's patch embedding.
_EMBEDS = ("patch_embed", "embeds")
# Arguments of `timm.create_model` that load weights.
_WEIGHT_OPTIONS = {
    *("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"),
}

# Settings of a config.json that do not change the model.
_IGNORED = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype"}
_CONFIG = "config.json"
# Values of attention settings that need no code from the hub.
_ATTENTIONS = (None, "eager", "sdpa", True, False)
# Settings that may run code from the hub; quantised weights bring kernels.
_CODE = {"quantization_config", "custom_pipelines", "trust_remote_code", "use_kernels"}


def resolve_architecture(config: ModelConfig) -> ModelConfig:
    """Replace a name or folder in `text.architecture` by the settings of its config.json."""
    name = config.text.architecture
    if not isinstance(name, str):
        return config
    file = Path(name) / _CONFIG
    try:
        if not Path(name).is_dir():
            if not may_be_on_hub(name):
                raise FileNotFoundError("there is no such folder")
            from huggingface_hub import hf_hub_download

            check_hub()
            file = Path(hf_hub_download(name, _CONFIG))
        settings = parse_json(file.read_text(encoding="utf-8"))
    except Exception as error:  # of the network, the hub, the disk or the file
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"text.architecture {name}: cannot read a {_CONFIG} of transformers from a folder or "
            f"the hub ({reason})"
        ) from error
    text = config.text.model_copy(update={"architecture": settings})
    return config.model_copy(update={"text": text})


def create_text_tower(config: TextConfig) -> nn.Module:
    """Create transformers' model of `text.architecture`, without pooler and weights."""
    from transformers import AutoModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

    settings = transformers_config(config)
    model_type = settings.model_type
    if type(settings) not in MODEL_FOR_MASKED_LM_MAPPING or settings.is_encoder_decoder:
        raise ConfigError(
            f"text.architecture: {model_type} is not BERT-like; choose bert, roberta, mpnet, "
            "distilbert, electra, modernbert or another encoder with masked language modelling"
        )
    if settings.vocab_size != config.vocab_size:
        raise ConfigError(
            f"text.vocab_size is {config.vocab_size}, and text.architecture has "
            f"{settings.vocab_size} word pieces; set text.vocab_size={settings.vocab_size}"
        )
    classes = MODEL_MAPPING[type(settings)]
    tower_class: Any = classes[0] if isinstance(classes, tuple) else classes
    parameters = inspect.signature(tower_class).parameters
    options = {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}
    try:
        tower: nn.Module = AutoModel.from_config(settings, **options)
    except Exception as error:  # various types for a wrong setting
        raise ConfigError(
            f"text.architecture: transformers cannot create this {model_type} ({error!r})"
        ) from error
    table_rows = getattr(settings, "max_position_embeddings", config.max_tokens)
    positions = table_rows - position_offset(tower)
    if config.max_tokens > positions:
        raise ConfigError(
            f"text.max_tokens {config.max_tokens} is more than the {positions} positions of "
            "text.architecture"
        )
    return tower


def position_offset(tower: nn.Module) -> int:
    """Return the row of a text's first token in the table of positions."""
    # RoBERTa counts positions from its id of padding + 1.
    for name, module in tower.named_modules():
        pad_id: Any = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and pad_id is not None:
            return int(pad_id) + 1
    return 0


def require_padding(tower: nn.Module | None, pad_id: int) -> None:
    """Require that a tower that counts positions from its padding id has the same `pad_id`."""
    offset = 0 if tower is None else position_offset(tower)
    if offset and offset - 1 != pad_id:
        raise ConfigError(
            f"text.architecture.pad_token_id, from which this tower counts positions, is "
            f"{offset - 1}, and data.vocabulary pads with {pad_id}; set "
            f"text.architecture.pad_token_id={pad_id}, or use the vocabulary of the weights"
        )


def transformers_config(config: TextConfig) -> Any:
    """Return `text.architecture` as a configuration of transformers."""
    from transformers import AutoConfig

    if not isinstance(config.architecture, Mapping):
        raise ConfigError(f"text.architecture {config.architecture!r} is not a mapping of settings")
    settings = {key: value for key, value in config.architecture.items() if key not in _IGNORED}
    for key, value in settings.items():
        # transformers would download a kernel of that name from the hub, and run it.
        if ("implementation" in key and value not in _ATTENTIONS) or key in _CODE:
            raise ConfigError(
                f"text.architecture.{key} {value!r} may run code from the hub; remove the key"
            )
    try:
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except Exception as error:  # various types for a wrong name or value
        raise ConfigError(
            f"text.architecture: transformers cannot read this configuration ({error!r})"
        ) from error


def word_width(config: TextConfig) -> int:
    """Return the channels of the text encoder's table of word pieces."""
    if config.architecture is None:
        return config.width
    settings = transformers_config(config)
    return int(getattr(settings, "embedding_size", None) or settings.hidden_size)


def longest_module_list(tower: nn.Module) -> str:
    """Return the dotted name of a tower's longest `nn.ModuleList`: the list of its layers."""
    lists = {n: part for n, part in tower.named_modules() if isinstance(part, nn.ModuleList)}
    return max(lists, key=lambda name: len(lists[name]))


def require_maskable(image: ImageConfig) -> None:
    """Require a trained image encoder with patch embeddings (B, M, width), for MIM."""
    if image.pool > 1:
        raise ValueError(
            f"objectives.mim predicts single patches; image.pool {image.pool} mixes them"
        )
    if image.trainable == 0:
        raise ValueError("objectives.mim trains the image encoder, which image.trainable 0 freezes")
    if not image.architecture:
        return
    with torch.device("meta"):
        tower: Any = create_image_tower(image)
    embed = getattr(tower, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or not embed.flatten or tower.num_features != image.width:
        raise ConfigError(
            f"objectives.mim: the patches of {image.tower_name}, {tower.num_features} channels, "
            f"cannot be replaced by a mask token of {image.width}; set objectives.mim=null"
        )


class TrainableTower(nn.Module):
    """Base of both encoders: a tower of blocks, then an adapter and a projection.

    Subclasses set `blocks`, the dotted name of the list of blocks, and call `freeze_blocks`. A
    tower that is `frozen` as a whole stays in evaluation mode.
    """

    # Modules after the tower.
    AFTER: ClassVar[tuple[str, ...]] = ("projection", "adapter")
    blocks: str
    frozen: bool = False

    @property
    def depth(self) -> int:
        """Return the number of blocks."""
        return len(self.get_submodule(self.blocks))  # type: ignore[arg-type]

    def layer_distances(self) -> dict[str, int]:
        """Return each tower parameter's distance from the top, by name, as in BEiT's layer decay.

        It is 0 for norms after the last block, 1 for the last block, 2 for the block before, and so
        on; for embeddings and token encodings, with their norms, 1 more than for the first block.
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
                # Parameters come in order: a norm after the last block follows its parameters.
                is_top = is_norm and 1 in distances.values()
                distances[name] = 0 if is_top else self.depth + 1
        return distances

    def freeze_blocks(self, trainable: Trainable, key: str) -> None:
        """Freeze the tower except its last `trainable` blocks and the norms after them.

        key: configuration key of `trainable`, for messages.
        """
        # For "all" nothing is frozen. LoRA freezes the tower once its weights are loaded.
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
        """Set the mode, but keep a frozen tower and frozen batch norms in evaluation mode."""
        super().train(mode)
        for name, child in self.named_children():
            if self.frozen and name not in self.AFTER:
                child.eval()
        for norm in batch_norms(self):
            if not any(parameter.requires_grad for parameter in norm.parameters()):
                norm.eval()
        return self


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the batch norms in a module."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


def require_whole_batches(task: nn.Module, ranks: int, recomputed: str | None) -> None:
    """Require that a tower with trained batch norms gets each global batch whole and once.

    recomputed: configuration key that runs a pass in chunks or twice, if any.
    """
    towers = [part for part in task.modules() if isinstance(part, TrainableTower)]
    norms = [norm for tower in towers for norm in batch_norms(tower)]
    if (ranks > 1 or recomputed) and any(norm.training for norm in norms):
        raise ConfigError(
            f"a tower has batch norms, whose statistics {recomputed or 'several ranks'} would "
            "change: use a single rank and whole batches, or another tower, or freeze the tower "
            "(trainable: 0)"
        )
