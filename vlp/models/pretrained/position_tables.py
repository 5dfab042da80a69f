"""Position encodings of a model folder, for a model that may list others or have other sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import StreamEncodings, encodings_by_place
from vlp.models.image_encoder import ImageEncoder
from vlp.models.vlp import VLPModel
from vlp.positions import PositionEncoding, acts_on_tokens
from vlp.positions.carry_over import Grid, carry_over

ENCODINGS = (
    r"(?:cross_encoder\.(?:layers\.\d+\.(?:cross_)?attention\.)?"
    r"|image_encoder\.vit\.(?:blocks\.\d+\.attn\.)?)positions"
)
"""Names of the lists of encodings in a model."""

_NAME = re.compile(rf"(?P<list>{ENCODINGS})\.(?P<number>\d+)\.(?P<part>.+)")
_CROSS = "cross_encoder.positions"
_CROSS_LAYERS = "cross_encoder.layers.*.attention.positions"
_TOWER = "image_encoder.vit.positions"
_TOWER_LAYERS = "image_encoder.vit.blocks.*.attn.positions"

Lists = Mapping[str, tuple[str, ...]]
"""Names of the encodings in each list, `*` standing for every layer."""


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

    Modules are numbered by position in `cross.position` and `image.positions`, so numbers alone do
    not identify a table. Tables of another grid are resized where the encoding allows it; tables
    between both streams of another number of groups are left out.
    """
    theirs, ours = _lists(trained), _lists(model.config)
    here = model.state_dict()
    regrouped = trained.cross.anchor.groups != model.config.cross.anchor.groups
    carried: dict[str, Tensor] = {}
    unused: list[str] = []
    for name, tensor in state.items():
        target = _target(name, theirs, ours)
        grouped = regrouped and ".cross_attention." in name
        if target is not None and (
            not _NAME.fullmatch(name)
            or (target in here and not (grouped and tensor.shape != here[target].shape))
        ):
            carried[target] = tensor
        else:
            unused.append(name)
    before = {name: tensor.shape for name, tensor in carried.items()}
    _to_sizes_of(model, trained, carried)
    resized = [name for name, shape in before.items() if carried[name].shape != shape]
    return ResizedTables(carried, resized, unused)


def _lists(config: ModelConfig) -> Lists:
    cross = encodings_by_place(config.cross)
    tower = config.image.positions
    return {
        _CROSS: cross["tokens"],
        _CROSS_LAYERS: cross["attention"],
        "cross_encoder.layers.*.cross_attention.positions": cross["cross_attention"],
        _TOWER: tuple(name for name in tower if acts_on_tokens(name)),
        _TOWER_LAYERS: tuple(name for name in tower if not acts_on_tokens(name)),
    }


def _target(name: str, theirs: Lists, ours: Lists) -> str | None:
    """Return a weight's name here; None if its encoding is missing here."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    place, number = re.sub(r"\.\d+\.", ".*.", found["list"]), int(found["number"])
    if number >= len(theirs[place]) or theirs[place][number] not in ours[place]:
        return None
    return f"{found['list']}.{ours[place].index(theirs[place][number])}.{found['part']}"


def _to_sizes_of(model: VLPModel, trained: ModelConfig, state: dict[str, Tensor]) -> None:
    """Bring the tables of the image tower's and each stream's encodings to the model's grids."""
    for path, name, old, grid, trained_grid in (
        *_of_tower(model, trained),
        *_of_streams(model, trained),
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


def _of_tower(model: VLPModel, trained: ModelConfig) -> Iterator[_Trained]:
    """Yield the encodings of an image tower that has another grid."""
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
        there = nn.ModuleDict({"image_encoder": ImageEncoder(trained.image, trained.embed_dim)})
    layers = {_TOWER: 1, _TOWER_LAYERS: len(blocks)}
    for name, paths, their_path in _of_both(model.config, trained, layers):
        old = there.get_submodule(their_path)
        for path in paths:
            yield _Trained(path, f"{name} of the image tower", old, *grids)


def _of_streams(model: VLPModel, trained: ModelConfig) -> Iterator[_Trained]:
    """Yield the encodings of the cross-modal encoder's streams where a grid is another."""
    here = model.config
    grids = {
        "text": ((1, here.text.max_tokens - 1), (1, trained.text.max_tokens - 1)),
        "image": (here.image.grid, trained.image.grid),
    }
    if all(grid == trained_grid for grid, trained_grid in grids.values()):
        return
    there = StreamEncodings(
        trained.cross, trained.text.width, trained.text.max_tokens, trained.image.grid
    )
    layers = {_CROSS: 1, _CROSS_LAYERS: len(model.cross_encoder.layers)}
    for name, paths, _ in _of_both(here, trained, layers):
        old = there.make(name)
        for path, stream in product(paths, grids):
            module = old.get_submodule(stream)
            yield _Trained(
                f"{path}.{stream}", f"{name} of the {stream} stream", module, *grids[stream]
            )


def _of_both(
    config: ModelConfig, trained: ModelConfig, layers: Mapping[str, int]
) -> Iterator[tuple[str, list[str], str]]:
    """Yield encodings that both list: name, path here in each layer, path there in the first."""
    theirs, ours = _lists(trained), _lists(config)
    for place, count in layers.items():
        for number, encoding in enumerate(ours[place]):
            if encoding in theirs[place]:
                paths = [f"{place.replace('*', str(n))}.{number}" for n in range(count)]
                their_path = f"{place.replace('*', '0')}.{theirs[place].index(encoding)}"
                yield encoding, paths, their_path
