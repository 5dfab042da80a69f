"""Position encodings of a model folder, for a model that may list others or have other sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import StreamEncodings, encodings_by_module
from vlp.models.image_encoder import ImageEncoder
from vlp.models.vlp import VLPModel
from vlp.positions import PositionEncoding, acts_on_tokens
from vlp.positions.carry_over import Grid, carry_over

# Names of the lists of encodings in a model.
ENCODINGS = (
    r"(?:cross_encoder\.(?:layers\.\d+\.(?:cross_)?attention\.)?"
    r"|image_encoder\.vit\.(?:blocks\.\d+\.attn\.)?)positions"
)

_NAME = re.compile(rf"(?P<list>{ENCODINGS})\.(?P<number>\d+)\.(?P<part>.+)")
_CROSS = "cross_encoder.positions"
_CROSS_LAYERS = "cross_encoder.layers.*.attention.positions"
_TOWER = "image_encoder.vit.positions"
_TOWER_LAYERS = "image_encoder.vit.blocks.*.attn.positions"

# Names of the encodings in each list, `*` standing for every layer.
Lists = Mapping[str, tuple[str, ...]]


class ResizedTables(NamedTuple):
    """Weights by this model's names (`state`), and names of resized and unused tables."""

    state: dict[str, Tensor]
    resized: list[str]
    unused: list[str]


class _Trained(NamedTuple):
    """An encoding trained on another grid: path of this model's, trained module, and name."""

    path: str
    name: str
    module: nn.Module
    grid: Grid
    trained_grid: Grid


def carry_encodings(
    model: VLPModel, trained: ModelConfig, state: Mapping[str, Tensor]
) -> ResizedTables:
    """Match the weights of a trained model to this model's encodings by name.

    Tables of another grid are resized where the encoding allows it; tables between both streams of
    another number of groups are left out.
    """
    # Modules are numbered in the order of `cross.position` and `image.positions`, so that numbers
    # alone do not identify a table.
    theirs, ours = _lists(trained), _lists(model.config)
    model_state = model.state_dict()
    regrouped = trained.cross.anchor.groups != model.config.cross.anchor.groups
    carried: dict[str, Tensor] = {}
    unused: list[str] = []
    for name, tensor in state.items():
        target = _target(name, theirs, ours)
        grouped = regrouped and ".cross_attention." in name
        if target is not None and (
            not _NAME.fullmatch(name)
            or (
                target in model_state
                and not (grouped and tensor.shape != model_state[target].shape)
            )
        ):
            carried[target] = tensor
        else:
            unused.append(name)
    shapes = {name: tensor.shape for name, tensor in carried.items()}
    _resize_tables(model, trained, carried)
    resized = [name for name, shape in shapes.items() if carried[name].shape != shape]
    return ResizedTables(carried, resized, unused)


def _lists(config: ModelConfig) -> Lists:
    cross = encodings_by_module(config.cross)
    tower = config.image.positions
    return {
        _CROSS: cross["tokens"],
        _CROSS_LAYERS: cross["self_attention"],
        "cross_encoder.layers.*.cross_attention.positions": cross["cross_attention"],
        _TOWER: tuple(name for name in tower if acts_on_tokens(name)),
        _TOWER_LAYERS: tuple(name for name in tower if not acts_on_tokens(name)),
    }


def _target(name: str, theirs: Lists, ours: Lists) -> str | None:
    """Return a weight's name here; None if its encoding is missing here."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    pattern, number = re.sub(r"\.\d+\.", ".*.", match["list"]), int(match["number"])
    if number >= len(theirs[pattern]) or theirs[pattern][number] not in ours[pattern]:
        return None
    return f"{match['list']}.{ours[pattern].index(theirs[pattern][number])}.{match['part']}"


def _resize_tables(model: VLPModel, trained: ModelConfig, state: dict[str, Tensor]) -> None:
    """Resize the encoding tables of the image tower and of both streams to the model's grids."""
    for path, name, old, grid, trained_grid in (
        *_tower_encodings(model, trained),
        *_stream_encodings(model, trained),
    ):
        tables = {
            key.removeprefix(f"{path}."): tensor
            for key, tensor in state.items()
            if key.startswith(f"{path}.")
        }
        encoding = model.get_submodule(path)
        assert isinstance(encoding, PositionEncoding)
        assert isinstance(old, PositionEncoding)
        carried = carry_over(name, encoding, old, tables, grid, trained_grid)
        state |= {f"{path}.{part}": table for part, table in carried.items()}


def _tower_encodings(model: VLPModel, trained: ModelConfig) -> Iterator[_Trained]:
    """Yield the encodings of the image tower if its grid differs."""
    grids = model.config.image.tower_grid, trained.image.tower_grid
    vit = model.image_encoder.vit
    if grids[0] == grids[1] or not trained.image.positions:
        return
    blocks = getattr(vit, "blocks", ())
    if _lists(trained)[_TOWER_LAYERS] and blocks and not hasattr(blocks[0], "attn"):
        raise ValueError(
            f"{trained.image.tower_name}: encodings of its attention do not carry over to "
            "another image size"
        )
    with torch.device("meta"):
        tower = nn.ModuleDict({"image_encoder": ImageEncoder(trained.image, trained.embed_dim)})
    layers = {_TOWER: 1, _TOWER_LAYERS: len(blocks)}
    for name, paths, their_path in _common_encodings(model.config, trained, layers):
        module = tower.get_submodule(their_path)
        for path in paths:
            yield _Trained(path, f"{name} of the image tower", module, *grids)


def _stream_encodings(model: VLPModel, trained: ModelConfig) -> Iterator[_Trained]:
    """Yield the encodings of both streams if a grid differs."""
    config = model.config
    grids = {
        "text": ((1, config.text.max_tokens - 1), (1, trained.text.max_tokens - 1)),
        "image": (config.image.grid, trained.image.grid),
    }
    if all(grid == trained_grid for grid, trained_grid in grids.values()):
        return
    streams = StreamEncodings(
        trained.cross, trained.text.width, trained.text.max_tokens, trained.image.grid
    )
    layers = {_CROSS: 1, _CROSS_LAYERS: len(model.cross_encoder.layers)}
    for name, paths, _ in _common_encodings(config, trained, layers):
        encoding = streams.create(name)
        for path, stream in product(paths, grids):
            module = encoding.get_submodule(stream)
            yield _Trained(
                f"{path}.{stream}", f"{name} of the {stream} stream", module, *grids[stream]
            )


def _common_encodings(
    config: ModelConfig, trained: ModelConfig, layers: Mapping[str, int]
) -> Iterator[tuple[str, list[str], str]]:
    """Yield encodings of both models: name, our path in each layer, their path in the first."""
    theirs, ours = _lists(trained), _lists(config)
    for pattern, count in layers.items():
        for number, encoding in enumerate(ours[pattern]):
            if encoding in theirs[pattern]:
                paths = [f"{pattern.replace('*', str(n))}.{number}" for n in range(count)]
                their_path = f"{pattern.replace('*', '0')}.{theirs[pattern].index(encoding)}"
                yield encoding, paths, their_path
