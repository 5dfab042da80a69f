"""Weights of iRPE as its authors publish them, in our models."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from vlp.models.pretrained.published import read_pth
from vlp.positions.irpe import RelativePosition

Model = TypeVar("Model", bound=nn.Module)

_TABLE_NAME = re.compile(
    r"(?P<layer>.*attn\.)rpe_(?P<role>[qkv])\.(?:(?P<axis>rp_rows|rp_cols)\.)?lookup_table_weight"
)
_PUBLISHED = {"method": "product", "mode": "contextual", "function": "piecewise", "ratio": 1.9}
_ROLES = {"q": "query", "k": "key", "v": "value"}


def load_published_irpe(model: Model, file: str | Path) -> Model:
    """Load a published DeiT with iRPE, `deit_small_patch16_224_ctx_product_50_shared_k.pth` or so.

    Returns the entry point, here `vlp_deit_small_patch16_irpe_k_224` (product, contextual,
    piecewise buckets of ratio 1.9), with every weight matched.
    """
    weights = read_pth(file)
    encodings = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RelativePosition)
    }
    for name, encoding in encodings.items():
        settings = {**encoding.buckets, "mode": encoding.mode}
        for option, value in _PUBLISHED.items():
            if settings[option] != value:
                raise ValueError(
                    f"{file}: only contextual iRPE-product is known, whose {option} is {value!r}; "
                    f"{name} has {settings[option]!r}"
                )
    # The authors' code looks the query table of i, j up at j, i (papers.md#irpe-i11): query tables
    # are mirrored, except for encodings that do the same.
    state = from_published(
        weights, [name for name, encoding in encodings.items() if encoding.q_ids_transposed]
    )
    model_state = model.state_dict()
    for name in sorted(model_state.keys() | state.keys()):
        ours, theirs = _size(model_state.get(name)), _size(state.get(name))
        if ours != theirs:
            raise ValueError(
                f"{file} does not fit the model: {name} is {theirs} there and {ours} here"
            )
    model.load_state_dict(state)
    return model


def from_published(
    state: Mapping[str, Tensor], transposed: Collection[str] = ()
) -> dict[str, Tensor]:
    """Translate names and shapes of the published tables to ours; others stay as they are.

    `blocks.0.attn.rpe_k.lookup_table_weight`, (1 or heads, head width, buckets), of values (1 or
    heads, buckets, head width), becomes `blocks.0.attn.positions.0.tables.key`, buckets before
    channels. Tables of encodings outside `transposed`, which lists paths such as
    `blocks.0.attn.positions.0` that look queries up at j, i, are mirrored.
    """
    renamed = {}
    for name, weight in state.items():
        if "lookup_table" not in name:
            renamed[name] = weight
            continue
        match = _TABLE_NAME.fullmatch(name)
        if match is None or match["axis"] is not None:
            raise ValueError(f"{name}: only tables of contextual iRPE-product are known")
        table = weight if match["role"] == "v" else weight.transpose(1, 2)
        encoding = f"{match['layer']}positions.0"
        if match["role"] == "q" and encoding not in transposed:
            # Offsets of j, i are the negated offsets of i, j; the prefix bucket comes last.
            table = table.clone()
            table[:, :-1] = table[:, :-1].flip(1)
        renamed[f"{encoding}.tables.{_ROLES[match['role']]}"] = table.contiguous()
    return renamed


def _size(weight: Tensor | None) -> str:
    return "missing" if weight is None else str(tuple(weight.shape))
