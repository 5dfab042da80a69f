"""Position encodings of a model folder, for a model that may list others or have other sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import StreamEncodings, encodings_by_place
from vlp.models.vlp import VLPModel
from vlp.positions import CROSS_MODAL, PositionEncoding
from vlp.positions.carry_over import carry_over

_NAME = re.compile(
    r"(?P<lead>cross_encoder\.(?:layers\.\d+\.(?P<attention>(?:cross_)?attention)\.)?positions)"
    r"\.(?P<number>\d+)\.(?P<part>.+)"
)
_STREAMS = ("text", "image")


class ResizedTables(NamedTuple):
    """state: all weights by this model's names; resized: names of tables of another size there;
    unused: names in the folder of encodings that this model has not, or has in other groups."""

    state: dict[str, Tensor]
    resized: list[str]
    unused: list[str]


def carry_encodings(
    model: VLPModel, trained: ModelConfig, state: Mapping[str, Tensor]
) -> ResizedTables:
    """Weights of a model trained as `trained` says, its encodings found by their names.

    Their modules are numbered as `cross.position` lists them, so a number alone does not say whose
    table it is. Tables of another grid become those of this model's where the encoding allows it;
    tables between both streams of another number of groups are left out.

    Raises:
        ValueError: an encoding is bound to the grid it was trained on.
    """
    theirs, ours = encodings_by_place(trained.cross), encodings_by_place(model.config.cross)
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


def _target(
    name: str, theirs: Mapping[str, tuple[str, ...]], ours: Mapping[str, tuple[str, ...]]
) -> str | None:
    """The name here of a weight there; None where it is of an encoding that is not here."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    place, number = found["attention"] or "tokens", int(found["number"])
    if number >= len(theirs[place]) or theirs[place][number] not in ours[place]:
        return None
    return f"{found['lead']}.{ours[place].index(theirs[place][number])}.{found['part']}"


def _to_sizes_of(model: VLPModel, trained: ModelConfig, state: dict[str, Tensor]) -> None:
    """Bring the tables of each stream's encodings to the model's grids, in place."""
    grids = {
        "text": ((1, trained.text.max_tokens - 1), (1, model.config.text.max_tokens - 1)),
        "image": (trained.image.grid, model.config.image.grid),
    }
    if all(before == after for before, after in grids.values()):
        return
    there = StreamEncodings(
        trained.cross, trained.text.width, trained.text.max_tokens, trained.image.grid
    )
    theirs = {name for names in encodings_by_place(trained.cross).values() for name in names}
    ours = encodings_by_place(model.config.cross)
    layers = range(len(model.cross_encoder.layers))
    leads = {
        "tokens": ["cross_encoder.positions"],
        "attention": [f"cross_encoder.layers.{number}.attention.positions" for number in layers],
    }
    for place, each_lead in leads.items():
        for number, name in enumerate(ours[place]):
            if name not in theirs or name in CROSS_MODAL:
                continue
            made = there.make(name)
            for path in (f"{lead}.{number}.{stream}" for lead in each_lead for stream in _STREAMS):
                stream = path.rpartition(".")[2]
                tables = {
                    key.removeprefix(f"{path}."): tensor
                    for key, tensor in state.items()
                    if key.startswith(f"{path}.")
                }
                encoding, old = model.get_submodule(path), made.get_submodule(stream)
                assert isinstance(encoding, PositionEncoding)
                assert isinstance(old, PositionEncoding)
                before, after = grids[stream]
                for part, table in carry_over(
                    f"{name} of the {stream} stream", encoding, old, tables, after, before
                ).items():
                    state[f"{path}.{part}"] = table
