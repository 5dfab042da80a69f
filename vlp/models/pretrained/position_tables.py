"""Position encodings of a model folder, for a model that may list others or have other sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product

import torch
from torch import Tensor, nn

from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import create_stream_encoding, encodings_by_module
from vlp.models.image_encoder import ImageEncoder
from vlp.models.vlp import VLPModel
from vlp.positions import PositionEncoding, acts_on_tokens
from vlp.positions.carry_over import Grid, carry_over

# Names of the module lists of encodings in a model.
ENCODINGS = (
    r"(?:cross_encoder\.(?:layers\.\d+\.(?:cross_)?attention\.)?"
    r"|image_encoder\.vit\.(?:blocks\.\d+\.attn\.)?)positions"
)

_NAME = re.compile(rf"(?P<list>{ENCODINGS})\.(?P<number>\d+)\.(?P<part>.+)")
_CROSS = "cross_encoder.positions"
_CROSS_LAYERS = "cross_encoder.layers.*.attention.positions"
_TOWER = "image_encoder.vit.positions"
_TOWER_LAYERS = "image_encoder.vit.blocks.*.attn.positions"

# Names of encodings by the path of their module list (`_TOWER_LAYERS`, ...); `*` is every layer.
ModuleLists = Mapping[str, tuple[str, ...]]


# An encoding that was trained on another grid: path of the module in this model, name and stream
# for messages, trained module, this model's grid and the trained grid.
TrainedEncoding = tuple[str, str, nn.Module, Grid, Grid]


def carry_encodings(
    model: VLPModel, trained_config: ModelConfig, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Match the weights of a trained model to this model's encodings by name.

    Returns weights by this model's names, names of resized tables, and unused source names.
    Tables of another grid are resized where the encoding allows it; cross-attention tables of
    another number of channel groups are left out.
    """
    # Modules are numbered in the order of `cross.position` and `image.positions`, so a number
    # alone does not identify an encoding.
    trained_lists, lists = _module_lists(trained_config), _module_lists(model.config)
    model_state = model.state_dict()
    groups_differ = trained_config.cross.anchor.groups != model.config.cross.anchor.groups
    weights: dict[str, Tensor] = {}
    unused: list[str] = []
    for name, tensor in state.items():
        target = _target_name(name, trained_lists, lists)
        is_encoding = _NAME.fullmatch(name) is not None
        if target is None or (is_encoding and target not in model_state):
            unused.append(name)
            continue
        is_cross_table = is_encoding and ".cross_attention." in name
        if groups_differ and is_cross_table and tensor.shape != model_state[target].shape:
            unused.append(name)
        else:
            weights[target] = tensor
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    _resize_tables(model, trained_config, weights)
    resized = [name for name, shape in shapes.items() if weights[name].shape != shape]
    return weights, resized, unused


def _module_lists(config: ModelConfig) -> ModuleLists:
    cross = encodings_by_module(config.cross)
    tower = config.image.positions
    return {
        _CROSS: cross["tokens"],
        _CROSS_LAYERS: cross["self_attention"],
        "cross_encoder.layers.*.cross_attention.positions": cross["cross_attention"],
        _TOWER: tuple(name for name in tower if acts_on_tokens(name)),
        _TOWER_LAYERS: tuple(name for name in tower if not acts_on_tokens(name)),
    }


def _target_name(name: str, trained_lists: ModuleLists, lists: ModuleLists) -> str | None:
    """Return this model's name of a trained weight; None if this model lacks its encoding."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    pattern, number = re.sub(r"\.\d+\.", ".*.", match["list"]), int(match["number"])
    encodings, trained_encodings = lists[pattern], trained_lists[pattern]
    if number >= len(trained_encodings) or trained_encodings[number] not in encodings:
        return None
    return f"{match['list']}.{encodings.index(trained_encodings[number])}.{match['part']}"


def _resize_tables(model: VLPModel, trained_config: ModelConfig, state: dict[str, Tensor]) -> None:
    """Resize the encoding tables in `state`, in place, to the model's grids."""
    for path, label, trained_module, grid, trained_grid in (
        *_tower_encodings(model, trained_config),
        *_stream_encodings(model, trained_config),
    ):
        prefix = f"{path}."
        names = [name for name in state if name.startswith(prefix)]
        tables = {name.removeprefix(prefix): state[name] for name in names}
        encoding = model.get_submodule(path)
        assert isinstance(encoding, PositionEncoding)
        assert isinstance(trained_module, PositionEncoding)
        resized = carry_over(label, encoding, trained_module, tables, grid, trained_grid)
        state |= {f"{prefix}{part}": table for part, table in resized.items()}


def _tower_encodings(model: VLPModel, trained_config: ModelConfig) -> Iterator[TrainedEncoding]:
    """Yield the encodings of the image tower if its grid differs from the trained grid."""
    grid, trained_grid = model.config.image.tower_grid, trained_config.image.tower_grid
    if grid == trained_grid or not trained_config.image.positions:
        return
    blocks = getattr(model.image_encoder.vit, "blocks", ())
    in_layers = _module_lists(trained_config)[_TOWER_LAYERS]
    if in_layers and blocks and not hasattr(blocks[0], "attn"):
        raise ValueError(
            f"{trained_config.image.tower_name}: position encodings in its attention cannot be "
            "resampled to another image size"
        )
    with torch.device("meta"):
        tower = nn.ModuleDict(
            {"image_encoder": ImageEncoder(trained_config.image, trained_config.embed_dim)}
        )
    layers = {_TOWER: 1, _TOWER_LAYERS: len(blocks)}
    for name, paths, trained_path in _common_encodings(model.config, trained_config, layers):
        module = tower.get_submodule(trained_path)
        for path in paths:
            yield path, f"{name} of the image tower", module, grid, trained_grid


def _stream_encodings(model: VLPModel, trained_config: ModelConfig) -> Iterator[TrainedEncoding]:
    """Yield the cross-modal encoder's encodings of text and image if a grid differs."""
    config = model.config
    # This model's grid and the trained grid, by stream.
    grids = {
        "text": ((1, config.text.max_tokens - 1), (1, trained_config.text.max_tokens - 1)),
        "image": (config.image.grid, trained_config.image.grid),
    }
    if all(grid == trained_grid for grid, trained_grid in grids.values()):
        return
    layers = {_CROSS: 1, _CROSS_LAYERS: len(model.cross_encoder.layers)}
    for name, paths, _ in _common_encodings(config, trained_config, layers):
        encoding = create_stream_encoding(
            name,
            trained_config.cross,
            trained_config.text.width,
            trained_config.text.max_tokens,
            trained_config.image.grid,
        )
        for path, stream in product(paths, grids):
            label = f"{name} of the {stream} stream"
            module = encoding.get_submodule(stream)
            yield f"{path}.{stream}", label, module, *grids[stream]


def _common_encodings(
    config: ModelConfig, trained_config: ModelConfig, layers: Mapping[str, int]
) -> Iterator[tuple[str, list[str], str]]:
    """Yield the encodings that both models have: name, and paths of modules.

    Paths are of this model in all layers, then of the trained model in layer 0. layers: number of
    layers by pattern of module lists.
    """
    trained_lists, lists = _module_lists(trained_config), _module_lists(config)
    for pattern, count in layers.items():
        for number, name in enumerate(lists[pattern]):
            if name in trained_lists[pattern]:
                paths = [f"{pattern.replace('*', str(n))}.{number}" for n in range(count)]
                trained_number = trained_lists[pattern].index(name)
                yield name, paths, f"{pattern.replace('*', '0')}.{trained_number}"
