"""Image-text matching of many pairs: what one side alone decides is computed once.

Re-ranking scores every image with hundreds of texts. What `VLPModel.match` computes for each pair
by itself is taken apart here; the scores are the same up to rounding.

- The first self-attention of a text, and in layout `ace` of an image, sees no other side.
- The keys and values of an image are the same for all its texts: in layouts `text` and `albef` in
  every layer, in layout `ace` in the first.
- ACE-RPE adds mean(P) W of the pair to what is projected (Eq. 10). Projections are linear, so keys
  and values that are shared get a term of rank G instead of being projected for each pair.
- The score reads [CLS] alone: it is the only query of the last layer. A single query needs no
  projected keys and values, as q (W y) = (W^T q) y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vlp.layers.attention import Attention, attend, mask_bias
from vlp.layers.post_norm import CrossLayer
from vlp.models.config import SHORTHANDS
from vlp.models.features import ImageFeatures, TextFeatures
from vlp.models.vlp import VLPModel
from vlp.positions import CROSS_MODAL, PositionContext, PositionEncoding
from vlp.positions.anchor import anchor_distance, anchor_path, group_similarity
from vlp.positions.anchor_field import AnchorField, uniform_field, with_prefix

_CACHED_TOKENS = 2048
"""Image tokens at a time on a CPU."""


class PreparedTexts(NamedTuple):
    """T texts: states (T, N, width) after the first self-attention, tokens (T, N, D) for paths.

    attention_mask and word_mask are (T, N) bool.
    """

    states: Tensor
    tokens: Tensor
    attention_mask: Tensor
    word_mask: Tensor

    def select(self, rows: Tensor, tokens: int) -> PreparedTexts:
        """Texts `rows` (int64), cut to their first `tokens`."""
        return PreparedTexts(*(field[:, :tokens][rows] for field in self))

    @staticmethod
    def stack(parts: Sequence[PreparedTexts]) -> PreparedTexts:
        """All texts of some parts, padded to the longest."""
        longest = max(part.states.shape[1] for part in parts)
        columns = zip(*([_padded(field, longest) for field in part] for part in parts))
        return PreparedTexts(*(torch.cat(column) for column in columns))


class PreparedImage(NamedTuple):
    """One image: states (1, 1 + M, width), in layout `ace` after the first self-attention.

    tokens (M, D) are for paths. keys and values hold (heads, 1 + M, head width) for each layer
    that all texts can share; query (1, heads, 1 + M, head width) is layout `ace`'s, of the first.
    """

    states: Tensor
    tokens: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    query: Tensor | None


class ITMScorer:
    """Scores one image with many texts at a time, for inference.

    `reads_padding` says whether a score may depend on how far texts are padded; they should then
    come as long as in training.

    Args:
        model: its weights must not change from now on.
    """

    def __init__(self, model: VLPModel) -> None:
        self.model = model
        self.config, self.grid = model.config.cross, model.config.image.grid
        self.both = self.config.layout == "ace"
        # Encodings of a stream may count padding, or be bound to the length of training.
        self.reads_padding = not {*self.config.position} <= {*CROSS_MODAL, *SHORTHANDS}
        self.layers: list[CrossLayer] = list(model.cross_encoder.layers)  # type: ignore[arg-type]
        groups, kind = self.config.anchor.groups, model.anchor_threshold.device.type
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            self.shifts = [_shift(layer.cross_attention, groups) for layer in self.layers]

    @torch.no_grad()
    def prepare_texts(self, text: TextFeatures) -> PreparedTexts:
        """What no image changes of T texts."""
        states, context = text.states, self._text_asks(text.states.shape[1], None)
        for encoding in self.model.cross_encoder.positions:
            states = encoding("tokens", states, context)
        states = self.layers[0]("attend_self", states, text.attention_mask, context)
        tokens = text.states if self.config.anchor.features == "encoder" else text.tokens
        return PreparedTexts(states, tokens, text.attention_mask, text.word_mask)

    @torch.no_grad()
    def prepare_image(self, image: ImageFeatures) -> PreparedImage:
        """What no text changes of one image, a single row of features."""
        states, context = image.states, self._image_asks(None)
        for encoding in self.model.cross_encoder.positions:
            states = encoding("tokens", states, context)
        if self.both:
            states = _image_attends(self.layers[0], states, context)
        tokens = image.states[:, 1:] if self.config.anchor.features == "encoder" else image.tokens
        asked = [layer.cross_attention for layer in self.layers[: 1 if self.both else None]]
        return PreparedImage(
            states,
            tokens[0],
            keys=[_by_head(each, each.key(states))[0] for each in asked],
            values=[_by_head(each, each.value(states))[0] for each in asked],
            query=_by_head(asked[0], asked[0].query(states)) if self.both else None,
        )

    @torch.no_grad()
    def match(self, image: PreparedImage, texts: PreparedTexts) -> Tensor:
        """Log-odds that each text describes the image: (T,) float32."""
        if not self.both or texts.states.device.type != "cpu":
            return self._match(image, texts)
        # Every pair carries the states of a whole image: few of them fit a core's cache.
        few = max(1, _CACHED_TOKENS // image.states.shape[1])
        rows = torch.arange(len(texts.states)).split(few)
        longest = texts.states.shape[1]
        return torch.cat([self._match(image, texts.select(part, longest)) for part in rows])

    def _match(self, prepared: PreparedImage, texts: PreparedTexts) -> Tensor:
        field = self._field(prepared, texts)
        text_asks, image_asks = (
            self._text_asks(texts.states.shape[1], field),
            self._image_asks(field),
        )
        text, mask, image = texts.states, texts.attention_mask, prepared.states
        for number, (layer, shift) in enumerate(zip(self.layers, self.shifts)):
            attention, last = layer.cross_attention, number == len(self.layers) - 1
            if number and self.both:
                image = _image_attends(layer, image, image_asks)
            if number:
                text = _text_attends(layer, text, mask, text_asks, last)
            if last:
                text, text_asks = text[:, :1], _first_query(text_asks)
            if number < len(prepared.keys):
                shared = prepared.keys[number], prepared.values[number]
                crossed = _ask_shared(attention, text, *shared, text_asks, shift)
            elif last:
                crossed = _ask_once(attention, text, image, text_asks, shift)
            else:
                crossed = attention(text, image, None, text_asks)
            if self.both and not last:
                if number:
                    answer = attention(image, text, mask, image_asks)
                else:
                    answer = _ask_texts(attention, prepared.query, text, mask, image_asks, shift)
                image = layer.add_crossed(image, answer)
            text = layer.add_crossed(text, crossed)
        logits = self.model.match_head(text[:, 0]).float()
        return logits[:, 1] - logits[:, 0]

    def _text_asks(self, tokens: int, field: AnchorField | None) -> PositionContext:
        return PositionContext((1, tokens - 1), 1, anchors=field, text_queries=True)

    def _image_asks(self, field: AnchorField | None) -> PositionContext:
        return PositionContext(self.grid, 1, anchors=field, text_queries=False)

    def _field(self, image: PreparedImage, texts: PreparedTexts) -> AnchorField | None:
        """Paths of the pairs, as `VLPModel.anchors` finds them."""
        anchor, words = self.config.anchor, texts.word_mask
        if "uniform" in self.config.position:
            field = uniform_field(words, len(image.tokens), anchor.groups)
            dtype = texts.states.dtype
            return field._replace(
                image_mean=field.image_mean.to(dtype), text_mean=field.text_mean.to(dtype)
            )
        if not {*CROSS_MODAL} & {*self.config.position}:
            return None
        with torch.autocast(words.device.type, enabled=False):
            # One product for the tokens of all texts, (M, T N, G), then pair by pair in memory.
            tokens = _wide(texts.tokens).flatten(0, 1)
            similarity = group_similarity(_wide(image.tokens), tokens, anchor.groups)
            similarity = similarity.unflatten(1, words.shape).permute(1, 3, 0, 2).contiguous()
            similarity = similarity.permute(0, 2, 3, 1)
            distance = anchor_distance(
                similarity, self.model.anchor_threshold.clamp(min=1e-3), anchor.hard, anchor.tau
            )
            windows = anchor.text_window, anchor.patch_window
            path, _ = anchor_path(distance, self.grid, words, *windows, anchor.metric)
        return with_prefix(path, similarity, words)


class _Shift(NamedTuple):
    """What a unit of mean path adds, per group, to the inputs of projections and to their outputs.

    inputs (G, width) are added to queries and keys before they are projected; query, key and value
    (heads, G, head width) to the projected ones.
    """

    query_inputs: Tensor
    key_inputs: Tensor
    value_inputs: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


def _shift(attention: Attention, groups: int) -> _Shift | None:
    """Read off the hook `inputs`: zeros with a mean path of 1 in one group give its table's row."""
    for encoding in attention.positions:
        if not isinstance(encoding, PositionEncoding) or "inputs" not in encoding.hooks:
            continue
        weight = attention.query.weight
        unit = torch.eye(groups, dtype=weight.dtype, device=weight.device)[None]
        zeros = weight.new_zeros(1, groups, weight.shape[1])
        none = weight.new_zeros(0)
        field = AnchorField(none, none, unit, unit, none, none)
        context = PositionContext(anchors=field)
        inputs = [table[0] for table in encoding("inputs", zeros, zeros, zeros, context)]
        projections = attention.query, attention.key, attention.value
        moved = [
            _by_head(attention, functional.linear(table, projection.weight)[None])[0]
            for table, projection in zip(inputs, projections)
        ]
        return _Shift(*inputs, *moved)
    return None


def _image_attends(layer: CrossLayer, image: Tensor, context: PositionContext) -> Tensor:
    """The self-attention of images, fused where no encoding takes part in it."""
    attention = layer.attention
    if attention.positions:
        return layer("attend_self", image, None, context)
    query, key, value = (
        _by_head(attention, project(image))
        for project in (attention.query, attention.key, attention.value)
    )
    out = functional.scaled_dot_product_attention(query, key, value)
    return layer.attention_norm(image + _joined(attention, out))


def _text_attends(
    layer: CrossLayer, text: Tensor, mask: Tensor, context: PositionContext, first: bool
) -> Tensor:
    """The self-attention of texts; `first` asks for no more than the first token's states."""
    if first and not layer.attention.positions:
        attended = layer.attention(text[:, :1], text, mask, context)
        return layer.attention_norm(text[:, :1] + attended)
    return layer("attend_self", text, mask, context)


def _ask_shared(
    attention: Attention,
    text: Tensor,
    keys: Tensor,
    values: Tensor,
    context: PositionContext,
    shift: _Shift | None,
) -> Tensor:
    """Cross-attention of texts (T, Q, width) to the keys and values of one image."""
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


def _ask_once(
    attention: Attention,
    text: Tensor,
    image: Tensor,
    context: PositionContext,
    shift: _Shift | None,
) -> Tensor:
    """Cross-attention of a single query (T, 1, width) each to images (T, 1 + M, width)."""
    field = context.anchors
    if shift is not None and field is not None:
        text = text + field.text_mean @ shift.query_inputs
    query = _by_head(attention, attention.query(text))[:, :, 0]  # (T, heads, head width)
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


def _ask_texts(
    attention: Attention,
    query: Tensor | None,
    text: Tensor,
    mask: Tensor,
    context: PositionContext,
    shift: _Shift | None,
) -> Tensor:
    """Cross-attention of one image's queries (1, heads, 1 + M, head width) to texts."""
    assert query is not None
    field, keys, values = context.anchors, text, text
    if shift is not None and field is not None:
        query = query + field.image_mean[:, None] @ shift.query
        keys = text + field.text_mean @ shift.key_inputs
        values = text + field.text_mean @ shift.value_inputs
    out = attend(
        query.expand(len(text), -1, -1, -1),
        _by_head(attention, attention.key(keys)),
        _by_head(attention, attention.value(values)),
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


def _with_hook(attention: Attention, hook: str) -> list[PositionEncoding]:
    hooked = [each for each in attention.positions if isinstance(each, PositionEncoding)]
    return [encoding for encoding in hooked if hook in encoding.hooks]


def _by_head(attention: Attention, states: Tensor) -> Tensor:
    """(B, T, width) -> (B, heads, T, head width)."""
    return states.unflatten(-1, (attention.heads, -1)).transpose(1, 2)


def _joined(attention: Attention, out: Tensor) -> Tensor:
    """(B, heads, T, head width) -> (B, T, width), projected where the layer does so."""
    states = out.transpose(1, 2).flatten(-2)
    return states if attention.output is None else attention.output(states)


def _first_query(context: PositionContext) -> PositionContext:
    """The context of a text whose first token alone asks."""
    field = context.anchors
    if field is not None:
        field = field._replace(
            text_path=field.text_path[:, :1],
            text_mean=field.text_mean[:, :1],
            alignment=field.alignment[:, :, :1],
        )
    return PositionContext(context.grid, 1, anchors=field, text_queries=True)


def _padded(field: Tensor, tokens: int) -> Tensor:
    """(T, N) or (T, N, channels) with zeros, False in masks, up to N = tokens."""
    short = tokens - field.shape[1]
    return functional.pad(field, (0, 0, 0, short) if field.ndim == 3 else (0, short))


def _wide(x: Tensor) -> Tensor:
    """Float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
