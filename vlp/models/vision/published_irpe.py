"""Weights of iRPE as its authors publish them, in our models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from vlp.models.pth import read_pth
from vlp.positions.irpe import RelativePosition

Model = TypeVar("Model", bound=nn.Module)

_THEIRS = re.compile(
    r"(?P<layer>.*attn\.)rpe_(?P<role>[qkv])\.(?:(?P<axis>rp_rows|rp_cols)\.)?lookup_table_weight"
)
_ROLES = {"q": "query", "k": "key", "v": "value"}


def load_published_irpe(model: Model, file: str | Path) -> Model:
    """Load a published DeiT with iRPE, `deit_small_patch16_224_ctx_product_50_shared_k.pth` or so.

    The model is one of our entry points, `vlp_deit_small_patch16_irpe_k_224` for that file: product
    method, contextual mode. Every weight must find its place. Tables of queries are mirrored: the
    authors' code looks the pair i, j up at j, i (reading I11), where ours follows the paper.

    Returns:
        The model.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or its weights are not this model's.
    """
    state = from_published(read_pth(file))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{file} does not fit the model: {error}") from error
    for module in model.modules():
        if isinstance(module, RelativePosition) and (
            module.buckets["method"] != "product" or module.mode != "contextual"
        ):
            raise ValueError(f"{file}: only contextual iRPE-product is known, not {module.name}")
    return model


def from_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names and shapes of the published tables to ours; everything else as it is.

    Theirs are `blocks.0.attn.rpe_k.lookup_table_weight`, (1 or heads, head width, buckets), of
    values (1 or heads, buckets, head width); ours `blocks.0.attn.positions.0.tables.key`, buckets
    before channels.

    Raises:
        ValueError: tables of the cross method or of bias mode.
    """
    found = {}
    for name, weight in state.items():
        if "lookup_table" not in name:
            found[name] = weight
            continue
        match = _THEIRS.fullmatch(name)
        if match is None or match["axis"] is not None:
            raise ValueError(f"{name}: only tables of contextual iRPE-product are known")
        table = weight if match["role"] == "v" else weight.transpose(1, 2)
        if match["role"] == "q":
            # Offsets of j, i are those of i, j with other signs; the prefix bucket comes last.
            table = table.clone()
            table[:, :-1] = table[:, :-1].flip(1)
        found[f"{match['layer']}positions.0.tables.{_ROLES[match['role']]}"] = table.contiguous()
    return found
