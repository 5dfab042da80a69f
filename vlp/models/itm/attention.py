"""Attention of one image and many texts with what one side alone decides computed once.

The functions give what `vlp.layers` computes for each pair by itself, up to rounding, where
`Attention.takes_apart` says so of the cross-attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.compute.full_precision import at_least_float32
from vlp.layers.attention import Attention, attend, mask_bias
from vlp.layers.post_norm import CrossLayer
from vlp.positions import PositionContext
from vlp.positions.anchor_field import AnchorField
from vlp.positions.base import hooks_of


class PathShift(NamedTuple):
    """Additions per unit of mean path, by group, to the inputs of projections and their outputs.

    inputs (G, width) are added to queries and keys before they are projected; query, key and value
    (heads, G, head width) to the projected ones.
    """

    query_inputs: Tensor
    key_inputs: Tensor
    value_inputs: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


def path_shift(attention: Attention, groups: int) -> PathShift | None:
    """Read off the hook `inputs`: zeros with a mean path of 1 in one group give its table's row."""
    for encoding in attention.positions:
        if "inputs" not in hooks_of(encoding):
            continue
        # Tables stay float32 where layers keep their weights in bf16.
        weight = at_least_float32(attention.query.weight)
        unit = torch.eye(groups, dtype=weight.dtype, device=weight.device)[None]
        zeros = weight.new_zeros(1, groups, weight.shape[1])
        none = weight.new_zeros(0)
        field = AnchorField(none, none, unit, unit, none, none)
        context = PositionContext(anchors=field)
        inputs = [table[0] for table in encoding("inputs", zeros, zeros, zeros, context)]
        projections = attention.query, attention.key, attention.value
        moved = [
            by_head(attention, functional.linear(table, projection.weight.to(table))[None])[0]
            for table, projection in zip(inputs, projections)
        ]
        return PathShift(*inputs, *moved)
    return None


def image_self_attention(layer: CrossLayer, image: Tensor, context: PositionContext) -> Tensor:
    """Return the self-attention of images (B, M, width), fused where no encoding takes part."""
    attention = layer.attention
    if attention.positions:
        return layer("attend_self", image, None, context)
    query, key, value = (
        by_head(attention, project(image))
        for project in (attention.query, attention.key, attention.value)
    )
    out = functional.scaled_dot_product_attention(query, key, value)
    return layer.attention_norm(image + _joined(attention, out))


def text_self_attention(
    layer: CrossLayer, text: Tensor, mask: Tensor, context: PositionContext, first: bool
) -> Tensor:
    """Return the self-attention of texts (B, N, width); `first`: of their first token alone."""
    if first and not layer.attention.positions:
        attended = layer.attention(text[:, :1], text, mask, context)
        return layer.attention_norm(text[:, :1] + attended)
    return layer("attend_self", text, mask, context)


def attend_shared_image(
    attention: Attention,
    text: Tensor,
    keys: Tensor,
    values: Tensor,
    context: PositionContext,
    shift: PathShift | None,
) -> Tensor:
    """Return the cross-attention of texts (T, Q, width) to the keys and values of one image."""
    rows, queries, _ = text.shape
    field = context.anchors
    if shift is not None and field is not None:
        text = text + field.text_mean @ shift.query_inputs
    # Heads first: the queries of all texts then meet a head's keys in one product.
    query = attention.query(text).unflatten(-1, (attention.heads, -1)).permute(2, 0, 1, 3)
    if not attention.positions:
        query = query.flatten(1, 2)[None]
        out = functional.scaled_dot_product_attention(query, keys[None], values[None])[0]
        return _joined(attention, out.unflatten(1, (rows, queries)).transpose(0, 1))
    query = query * query.shape[-1] ** -0.5
    logits = (query.flatten(1, 2) @ keys.mT).unflatten(1, (rows, queries))
    if shift is not None and field is not None:
        along = (query @ shift.key.mT[:, None]).to(logits.dtype)  # (heads, T, Q, G)
        means = field.image_mean.mT.to(logits.dtype)
        for of_head, part in zip(logits, along):
            of_head.baddbmm_(part, means)
    attended = _softmax(attention, logits.transpose(0, 1), context, values.dtype)
    by_head = attended.transpose(0, 1)
    out = (by_head.flatten(1, 2) @ values).unflatten(1, (rows, queries))
    if shift is not None and field is not None:
        pooled = torch.stack([part @ field.image_mean for part in by_head])
        out = out + pooled @ shift.value[:, None]
    return _joined(attention, _with_values(attention, out.transpose(0, 1), attended, context))


def attend_once(
    attention: Attention,
    text: Tensor,
    image: Tensor,
    context: PositionContext,
    shift: PathShift | None,
) -> Tensor:
    """Return the cross-attention of one query (T, 1, width) each to images (T, 1 + M, width)."""
    field = context.anchors
    if shift is not None and field is not None:
        text = text + field.text_mean @ shift.query_inputs
    query = by_head(attention, attention.query(text))[:, :, 0]  # (T, heads, head width)
    query = (query * query.shape[-1] ** -0.5).transpose(0, 1)
    # The keys' bias adds the same to all logits of a query, which softmax does not see.
    seeking = query @ attention.key.weight.unflatten(0, (attention.heads, -1))
    logits = seeking.transpose(0, 1) @ image.mT  # (T, heads, 1 + M)
    if shift is not None and field is not None:
        along = query @ shift.key.mT
        logits = logits + along.transpose(0, 1) @ field.image_mean.mT
    attended = _softmax(attention, logits[:, :, None], context, image.dtype)
    gathered = (attended[:, :, 0] @ image).transpose(0, 1)  # (heads, T, width)
    weight = attention.value.weight.unflatten(0, (attention.heads, -1)).mT
    out = gathered @ weight
    if attention.value.bias is not None:
        out = out + attention.value.bias.unflatten(0, (attention.heads, 1, -1))
    if shift is not None and field is not None:
        pooled = (attended[:, :, 0] @ field.image_mean).transpose(0, 1)
        out = out + pooled @ shift.value
    out = out.transpose(0, 1)[:, :, None]
    return _joined(attention, _with_values(attention, out, attended, context))


def attend_texts(
    attention: Attention,
    query: Tensor,
    text: Tensor,
    mask: Tensor,
    context: PositionContext,
    shift: PathShift | None,
) -> Tensor:
    """Return the cross-attention of one image's queries (1, heads, 1 + M, head width) to texts."""
    field, keys, values = context.anchors, text, text
    if shift is not None and field is not None:
        query = query + field.image_mean[:, None] @ shift.query
        keys = text + field.text_mean @ shift.key_inputs
        values = text + field.text_mean @ shift.value_inputs
    out = attend(
        query.expand(len(text), -1, -1, -1),
        by_head(attention, attention.key(keys)),
        by_head(attention, attention.value(values)),
        attention.positions,
        context,
        mask_bias(mask, query.dtype)[:, None, None, :],
        attention.fused,
    )
    return _joined(attention, out)


def _softmax(
    attention: Attention, logits: Tensor, context: PositionContext, dtype: torch.dtype
) -> Tensor:
    """Probabilities of scaled logits (T, heads, Q, K), after the hooks `bias`."""
    for encoding in _with_hook(attention, "bias"):
        addition = encoding("bias", logits, logits, context)  # between streams: of paths alone
        logits = logits if addition is None else logits + addition.to(logits.dtype)
    # Softmax would bring another order in memory into its own.
    return logits.transpose(0, 1).softmax(-1).transpose(0, 1).to(dtype)


def _with_values(
    attention: Attention, out: Tensor, attended: Tensor, context: PositionContext
) -> Tensor:
    """The output (T, heads, Q, head width) and what the hooks `value` add to it."""
    for encoding in _with_hook(attention, "value"):
        addition = encoding("value", attended, context)
        out = out if addition is None else out + addition
    return out


def _with_hook(attention: Attention, hook: str) -> list[nn.Module]:
    return [encoding for encoding in attention.positions if hook in hooks_of(encoding)]


def by_head(attention: Attention, states: Tensor) -> Tensor:
    """(B, T, width) -> (B, heads, T, head width)."""
    return states.unflatten(-1, (attention.heads, -1)).transpose(1, 2)


def _joined(attention: Attention, out: Tensor) -> Tensor:
    """(B, heads, T, head width) -> (B, T, width), projected where the layer does so."""
    states = out.transpose(1, 2).flatten(-2)
    return states if attention.output is None else attention.output(states)
