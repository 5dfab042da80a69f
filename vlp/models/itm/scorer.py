"""Image-text matching of many pairs: what one side alone decides is computed once.

Re-ranking scores every image with hundreds of texts. What `VLPModel.match` computes for each pair
by itself is taken apart here; the scores are the same up to rounding.

- The first self-attention of a text, and in layout `ace` of an image, sees no other side.
- The keys and values of an image are the same for all its texts: in layouts `text` and `albef` in
  every layer, in layout `ace` in the first.
- ACE-RPE adds mean(P) W of the pair to what is projected (Eq. 10). Projections are linear, so keys
  and values that are shared get a term of rank G instead of being projected for each pair.
- Where the score reads [CLS] alone (`cross.pooling: cls`), it is the only query of the last layer.
  A single query needs no projected keys and values, as q (W y) = (W^T q) y.

Where the cross-attention holds an encoding of one's own, the first of these is all that is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vlp.compute.full_precision import at_least_float32
from vlp.compute.gpu_form import off_cpu
from vlp.layers.pooling import pool_states
from vlp.layers.post_norm import CrossLayer
from vlp.models.features import ImageFeatures, TextFeatures
from vlp.models.itm.attention import (
    attend_once,
    attend_shared_image,
    attend_texts,
    by_head,
    image_self_attention,
    path_shift,
    text_self_attention,
)
from vlp.models.vlp import VLPModel
from vlp.positions import CROSS_MODAL, PositionContext
from vlp.positions.anchor import group_similarity
from vlp.positions.anchor_field import AnchorField, field_of_similarity, uniform_field

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
    that all texts can share, none where the cross-attention is not taken apart; query (1, heads,
    1 + M, head width) is layout `ace`'s, of the first.
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
        self.layers: list[CrossLayer] = list(model.cross_encoder.layers)  # type: ignore[arg-type]
        attentions = [layer.cross_attention for layer in self.layers]
        self.apart = all(each.takes_apart for each in attentions)
        self.reads_padding = self.config.reads_padding
        groups, kind = self.config.anchor.groups, model.anchor_threshold.device.type
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            self.shifts = [path_shift(each, groups) if self.apart else None for each in attentions]

    @torch.no_grad()
    def prepare_texts(self, text: TextFeatures) -> PreparedTexts:
        """Compute the part of T texts that no image changes."""
        states, context = text.states, self._text_asks(text.states.shape[1], None)
        for encoding in self.model.cross_encoder.positions:
            states = encoding("tokens", states, context)
        states = self.layers[0]("attend_self", states, text.attention_mask, context)
        tokens = text.states if self.config.anchor.features == "encoder" else text.tokens
        return PreparedTexts(states, tokens, text.attention_mask, text.word_mask)

    @torch.no_grad()
    def prepare_image(self, image: ImageFeatures) -> PreparedImage:
        """Compute the part of one image, a single row of features, that no text changes."""
        states, context = image.states, self._image_asks(None)
        for encoding in self.model.cross_encoder.positions:
            states = encoding("tokens", states, context)
        if self.both:
            states = image_self_attention(self.layers[0], states, context)
        tokens = image.states[:, 1:] if self.config.anchor.features == "encoder" else image.tokens
        shared = self.layers[: 1 if self.both else None] if self.apart else []
        asked = [layer.cross_attention for layer in shared]
        return PreparedImage(
            states,
            tokens[0],
            keys=[by_head(each, each.key(states))[0] for each in asked],
            values=[by_head(each, each.value(states))[0] for each in asked],
            query=by_head(asked[0], asked[0].query(states)) if asked and self.both else None,
        )

    @torch.no_grad()
    def match(self, image: PreparedImage, texts: PreparedTexts) -> Tensor:
        """Log-odds that each text describes the image: (T,) float32."""
        if not self.both or off_cpu(texts.states):
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
        image = image if self.apart else image.expand(len(text), -1, -1)
        alone = self.apart and self.config.pooling == "cls"
        for number, (layer, shift) in enumerate(zip(self.layers, self.shifts)):
            attention, last = layer.cross_attention, number == len(self.layers) - 1
            if number and self.both:
                image = image_self_attention(layer, image, image_asks)
            if number:
                text = text_self_attention(layer, text, mask, text_asks, last and alone)
            if last and alone:
                text, text_asks = text[:, :1], _first_query(text_asks)
            if number < len(prepared.keys):
                shared = prepared.keys[number], prepared.values[number]
                crossed = attend_shared_image(attention, text, *shared, text_asks, shift)
            elif last and alone:
                crossed = attend_once(attention, text, image, text_asks, shift)
            else:
                crossed = attention(text, image, None, text_asks)
            if self.both and not last:
                if number or prepared.query is None:
                    answer = attention(image, text, mask, image_asks)
                else:
                    answer = attend_texts(attention, prepared.query, text, mask, image_asks, shift)
                image = layer.add_crossed(image, answer)
            text = layer.add_crossed(text, crossed)
        pooled = pool_states(text, self.config.pooling, None if alone else mask)
        logits = self.model.match_head(pooled).float()
        odds = logits[:, 1] - logits[:, 0]
        if self.config.token_score:
            score = self.model.token_score(prepared.tokens, texts.tokens, texts.word_mask)
            odds = odds + score.float()
        return odds

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
            tokens = at_least_float32(texts.tokens).flatten(0, 1)
            similarity = group_similarity(at_least_float32(image.tokens), tokens, anchor.groups)
            similarity = similarity.unflatten(1, words.shape).permute(1, 3, 0, 2).contiguous()
            similarity = similarity.permute(0, 2, 3, 1)
        return field_of_similarity(similarity, words, **self.model.path_settings)


def _first_query(context: PositionContext) -> PositionContext:
    """The context of a text whose first token alone asks."""
    field = context.anchors
    if field is not None:
        field = field._replace(
            text_path=field.text_path[:, :1],
            text_mean=field.text_mean[:, :1],
            alignment=None if field.alignment is None else field.alignment[:, :, :1],
        )
    return PositionContext(context.grid, 1, anchors=field, text_queries=True)


def _padded(field: Tensor, tokens: int) -> Tensor:
    """(T, N) or (T, N, channels) with zeros, False in masks, up to N = tokens."""
    short = tokens - field.shape[1]
    return functional.pad(field, (0, 0, 0, short) if field.ndim == 3 else (0, short))
