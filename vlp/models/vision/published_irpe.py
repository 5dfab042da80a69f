"""Published weights of DeiT with iRPE, for the `vlp_deit_*` models."""

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
    """Load a published DeiT with iRPE into its entry point, in place, and return the model.

    `deit_small_patch16_224_ctx_product_50_shared_k.pth` fits `vlp_deit_small_patch16_irpe_k_224`
    (product, contextual, piecewise buckets of ratio 1.9). All weights must match.
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
                    f"{file}: only contextual iRPE-product fits, where {option} is {value!r}; "
                    f"{name} has {settings[option]!r}"
                )
    # The authors' code reads the query table of (i, j) at (j, i) (papers.md#irpe-i11): query tables
    # are mirrored, except for encodings with `q_ids_transposed`, which do the same.
    transposed = [name for name, encoding in encodings.items() if encoding.q_ids_transposed]
    state = from_published(weights, transposed)
    model_state = model.state_dict()
    for name in sorted(model_state.keys() | state.keys()):
        size, file_size = _size(model_state.get(name)), _size(state.get(name))
        if size != file_size:
            raise ValueError(
                f"{file} does not fit the model: {name} is {file_size} there and {size} here"
            )
    model.load_state_dict(state)
    return model


def from_published(
    state: Mapping[str, Tensor], transposed: Collection[str] = ()
) -> dict[str, Tensor]:
    """Convert names and shapes of published tables; other weights are returned unchanged.

    `blocks.0.attn.rpe_k.lookup_table_weight` (1 or heads, head width, buckets) becomes
    `blocks.0.attn.positions.0.tables.key` (1 or heads, buckets, head width); tables of values have
    the second shape already. Query tables are mirrored, unless the path of their encoding, such as
    `blocks.0.attn.positions.0`, is in `transposed`.
    """
    model_state = {}
    for name, weight in state.items():
        if "lookup_table" not in name:
            model_state[name] = weight
            continue
        match = _TABLE_NAME.fullmatch(name)
        if match is None or match["axis"] is not None:
            raise ValueError(f"{name}: only tables of contextual iRPE-product are supported")
        table = weight if match["role"] == "v" else weight.transpose(1, 2)
        encoding = f"{match['layer']}positions.0"
        if match["role"] == "q" and encoding not in transposed:
            # (j, i) has the negated offsets of (i, j); the last bucket is that of prefix tokens.
            table = table.clone()
            table[:, :-1] = table[:, :-1].flip(1)
        model_state[f"{encoding}.tables.{_ROLES[match['role']]}"] = table.contiguous()
    return model_state


def _size(weight: Tensor | None) -> str:
    return "missing" if weight is None else str(tuple(weight.shape))
