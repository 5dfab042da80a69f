"""Heads of an earlier pretraining as the start of this one's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from vlp.config import ConfigError
from vlp.models.folder import HEADS, read_heads
from vlp.models.pretrained.load import LoadReport, copy_weights
from vlp.models.pretrained.local_copy import local_folder


def start_heads(modules: Mapping[str, nn.Module], init_from: str) -> list[LoadReport]:
    """Copy those weights of a model folder's heads that fit; others keep their own start.

    Args:
        modules: heads of the objectives, by the names that the folder has them under.
        init_from: model folder, or a name on the hub.

    Returns:
        What was copied; nothing for a folder without heads.

    Raises:
        ConfigError: the folder's heads are damaged.
    """
    own = nn.ModuleDict(dict(modules))
    here = own.state_dict()
    try:
        heads = read_heads(local_folder(init_from))
        fitting = {
            name: head
            for name, head in heads.items()
            if name in here and head.shape == here[name].shape
        }
        unused = sorted(heads.keys() - fitting.keys())
        report = copy_weights(own, fitting, f"{init_from}/{HEADS}", unused, (".+",))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return [report] if heads else []
