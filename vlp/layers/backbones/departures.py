"""Which layers of a model FlexAttention cannot compute, as far as layers tell before they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vlp.layers.backbones.adapters import Adapter, SwinAdapter
from vlp.layers.flex import NO_LOOKUPS, departure
from vlp.positions.base import PositionEncoding

OWN_BIASES = ("relative_position_bias_table", "cpb_mlp", "rel_pos", "rel_pos_h")
"""Attributes of layers whose logits have a bias of the model's own, zeros included."""


def refuse_departures(
    adapter: Adapter,
    layers: Iterable[Any],
    added: Sequence[PositionEncoding],
    fused: object,
    drop: bool,
) -> None:
    """Check that layers which are to attend by FlexAttention can.

    Args:
        adapter: of the model.
        layers: of attention.
        added: an encoding for each layer, or none at all.
        fused: "flex", or what else the layers are told; None leaves them as they are.
        drop: whether the model's own positions are dropped.

    Raises:
        ValueError: they cannot, with the reason.
    """
    for number, layer in enumerate(layers):
        asked = getattr(layer, "fused", None) if fused is None else fused
        encodings = [*getattr(layer, "positions", ()), *added[number : number + 1]]
        if asked != "flex" or not encodings:
            continue
        taken = drop and isinstance(adapter, SwinAdapter)
        biased = not taken and any(getattr(layer, one, None) is not None for one in OWN_BIASES)
        reason = departure(encodings, biased, layer.training and _dropout(layer) > 0)
        if reason not in (None, NO_LOOKUPS):  # one that is attached next may look up
            raise ValueError(f"fused='flex' cannot be, because {reason}")


def _dropout(layer: Any) -> float:
    """Share of the probabilities that a layer drops in training."""
    found = [getattr(layer, name, None) for name in ("attn_drop", "attention_dropout", "dropout")]
    rates = [getattr(each, "p", each) for each in found]
    return max((each for each in rates if isinstance(each, float)), default=0.0)
