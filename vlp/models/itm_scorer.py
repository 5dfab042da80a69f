"""Image-text matching scores of one image with many texts, with the image's part computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vlp.compilation import off_cpu
from vlp.layers.attention import Attention, attend, mask_bias, select_by_hook
from vlp.layers.blocks import CrossLayer, pool_states
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.vlp import VLPModel
from vlp.positions import PositionContext
from vlp.positions.anchor import group_similarity
from vlp.positions.anchor_field import AnchorPaths, paths_from_similarity, uniform_paths
from vlp.positions.base import PositionEncoding, call_method
from vlp.precision import at_least_float32, no_autocast


class MeanPathTables(NamedTuple):
    """Terms that ACE-RPE adds per unit of the mean path, for each channel group."""

    # To the inputs of the projections, (G, width).
    query_inputs: Tensor
    key_inputs: Tensor
    value_inputs: Tensor
    # To the outputs of the projections, (heads, G, head width).
    query: Tensor
    key: Tensor
    value: Tensor


def mean_path_tables(attention: Attention, groups: int) -> MeanPathTables | None:
    """Return the tables of the first encoding with the hook `inputs`; None without such a hook."""
    encodings = select_by_hook(attention.positions, "inputs")
    if not encodings:
        return None
    # For inputs of zero and a mean path of 1 in one group, the hook returns that group's row.
    # Tables are float32 even if the layer's weights are bf16.
    weight = at_least_float32(attention.query.weight)
    unit = torch.eye(groups, dtype=weight.dtype, device=weight.device)[None]
    zeros = weight.new_zeros(1, groups, weight.shape[1])
    empty = weight.new_zeros(0)
    paths = AnchorPaths(
        image_path=empty,
        text_path=empty,
        image_mean=unit,
        text_mean=unit,
        alignment=empty,
        similarity=empty,
    )
    context = PositionContext(anchors=paths)
    tables = call_method(encodings[0], PositionEncoding.inputs, zeros, zeros, zeros, context)
    projections = attention.query, attention.key, attention.value
    outputs = [
        attention.split_heads(functional.linear(table, projection.weight.to(table)))[0]
        for table, projection in zip(tables, projections)
    ]
    return MeanPathTables(*(table[0] for table in tables), *outputs)


def image_self_attention(layer: CrossLayer, image: Tensor, context: PositionContext) -> Tensor:
    """Run self-attention of images (B, M, width), fused if no encoding acts in it."""
    attention = layer.attention
    if attention.positions:
        return call_method(layer, CrossLayer.self_attend, image, None, context)
    query, key, value = (
        attention.split_heads(project(image))
        for project in (attention.query, attention.key, attention.value)
    )
    out = functional.scaled_dot_product_attention(query, key, value)
    return layer.attention_norm(image + attention.merge_heads(out))


def attend_shared_image(
    attention: Attention,
    text: Tensor,
    keys: Tensor,
    values: Tensor,
    context: PositionContext,
    tables: MeanPathTables | None,
) -> Tensor:
    """Attend from texts (T, Q, width) to keys and values (heads, 1 + M, head width) of one image.

    tables: of ACE-RPE, or None. Returns (T, Q, width).
    """
    rows, queries, _ = text.shape
    paths = context.anchors
    if tables is not None and paths is not None:
        text = text + paths.text_mean @ tables.query_inputs
    # Heads first, so that one product has the queries of all texts.
    query = attention.query(text).unflatten(-1, (attention.heads, -1)).permute(2, 0, 1, 3)
    if not attention.positions:
        query = query.flatten(1, 2)[None]
        out = functional.scaled_dot_product_attention(query, keys[None], values[None])[0]
        return attention.merge_heads(out.unflatten(1, (rows, queries)).transpose(0, 1))
    query = query * query.shape[-1] ** -0.5
    logits = (query.flatten(1, 2) @ keys.mT).unflatten(1, (rows, queries))
    if tables is not None and paths is not None:
        path_logits = (query @ tables.key.mT[:, None]).to(logits.dtype)  # (heads, T, Q, G)
        image_mean = paths.image_mean.mT.to(logits.dtype)
        # Head by head: `baddbmm_` takes a single batch axis.
        for head_logits, head_path_logits in zip(logits, path_logits):
            head_logits.baddbmm_(head_path_logits, image_mean)
    probabilities = _softmax(attention, logits.transpose(0, 1), context, values.dtype)
    by_head = probabilities.transpose(0, 1)
    out = (by_head.flatten(1, 2) @ values).unflatten(1, (rows, queries))
    if tables is not None and paths is not None:
        pooled_paths = torch.stack([head @ paths.image_mean for head in by_head])
        out = out + pooled_paths @ tables.value[:, None]
    out = _add_value_terms(attention, out.transpose(0, 1), probabilities, context)
    return attention.merge_heads(out)


def attend_single_query(
    attention: Attention,
    text: Tensor,
    image: Tensor,
    context: PositionContext,
    tables: MeanPathTables | None,
) -> Tensor:
    """Attend from one query per text (T, 1, width) to images (T, 1 + M, width) -> (T, 1, width).

    Keys and values are not projected: the key projection's weight multiplies the query, and the
    value projection's weight multiplies the pooled image.
    """
    paths = context.anchors
    if tables is not None and paths is not None:
        text = text + paths.text_mean @ tables.query_inputs
    query = attention.split_heads(attention.query(text))[:, :, 0]  # (T, heads, head width)
    query = (query * query.shape[-1] ** -0.5).transpose(0, 1)
    # Without the keys' bias: it adds the same to all logits of a query, which softmax cancels.
    image_query = query @ attention.key.weight.unflatten(0, (attention.heads, -1))
    logits = image_query.transpose(0, 1) @ image.mT  # (T, heads, 1 + M)
    if tables is not None and paths is not None:
        path_logits = query @ tables.key.mT
        logits = logits + path_logits.transpose(0, 1) @ paths.image_mean.mT
    probabilities = _softmax(attention, logits[:, :, None], context, image.dtype)
    pooled_image = (probabilities[:, :, 0] @ image).transpose(0, 1)  # (heads, T, width)
    weight = attention.value.weight.unflatten(0, (attention.heads, -1)).mT
    out = pooled_image @ weight
    if attention.value.bias is not None:
        out = out + attention.value.bias.unflatten(0, (attention.heads, 1, -1))
    if tables is not None and paths is not None:
        pooled_paths = (probabilities[:, :, 0] @ paths.image_mean).transpose(0, 1)
        out = out + pooled_paths @ tables.value
    out = _add_value_terms(attention, out.transpose(0, 1)[:, :, None], probabilities, context)
    return attention.merge_heads(out)


def attend_texts(
    attention: Attention,
    query: Tensor,
    text: Tensor,
    mask: Tensor,
    context: PositionContext,
    tables: MeanPathTables | None,
) -> Tensor:
    """Attend from one image's queries (1, heads, 1 + M, head width) to texts (T, N, width).

    mask: (T, N) bool, True = not padding. Returns (T, 1 + M, width).
    """
    paths, key_inputs, value_inputs = context.anchors, text, text
    if tables is not None and paths is not None:
        query = query + paths.image_mean[:, None] @ tables.query
        key_inputs = text + paths.text_mean @ tables.key_inputs
        value_inputs = text + paths.text_mean @ tables.value_inputs
    out = attend(
        query.expand(len(text), -1, -1, -1),
        attention.split_heads(attention.key(key_inputs)),
        attention.split_heads(attention.value(value_inputs)),
        attention.positions,
        context,
        mask_bias(mask, query.dtype)[:, None, None, :],
        attention.fused,
    )
    return attention.merge_heads(out)


def _softmax(
    attention: Attention, logits: Tensor, context: PositionContext, dtype: torch.dtype
) -> Tensor:
    """Compute attention probabilities from scaled logits (T, heads, Q, K) and the hooks `bias`."""
    for encoding in select_by_hook(attention.positions, "bias"):
        # A cross-modal bias reads paths only, so any tensor may stand for queries and keys.
        term = call_method(encoding, PositionEncoding.bias, logits, logits, context)
        logits = logits if term is None else logits + term.to(logits.dtype)
    # Heads first is the layout in memory: softmax copies tensors that are not contiguous.
    return logits.transpose(0, 1).softmax(-1).transpose(0, 1).to(dtype)


def _add_value_terms(
    attention: Attention, out: Tensor, probabilities: Tensor, context: PositionContext
) -> Tensor:
    """Add the terms of the hooks `value` to the output (T, heads, Q, head width)."""
    for encoding in select_by_hook(attention.positions, "value"):
        term = call_method(encoding, PositionEncoding.value, probabilities, context)
        out = out if term is None else out + term
    return out


# Number of image tokens per pass on a CPU: their states fit a core's cache.
_CACHED_TOKENS = 2048


class PreparedTexts(NamedTuple):
    """The part of T texts that does not depend on the image."""

    states: Tensor  # (T, N, width), after the first self-attention
    tokens: Tensor  # (T, N, D), inputs of Eq. 3
    attention_mask: Tensor  # (T, N) bool, True = not padding
    word_mask: Tensor  # (T, N) bool, True = word piece

    def select(self, rows: Tensor, tokens: int) -> PreparedTexts:
        """Select texts `rows` (int64), cut to their first `tokens`."""
        return PreparedTexts(*(field[:, :tokens][rows] for field in self))

    @staticmethod
    def stack(parts: Sequence[PreparedTexts]) -> PreparedTexts:
        """Concatenate texts along T, padded to the longest part."""
        longest = max(part.states.shape[1] for part in parts)
        columns = zip(*([_padded(field, longest) for field in part] for part in parts))
        return PreparedTexts(*(torch.cat(column) for column in columns))


class PreparedImage(NamedTuple):
    """The part of one image that does not depend on texts."""

    states: Tensor  # (1, 1 + M, width), in layout `ace` after the first self-attention
    tokens: Tensor  # (M, D), inputs of Eq. 3
    # (heads, 1 + M, head width) for each layer in which all texts share them.
    keys: list[Tensor]
    values: list[Tensor]
    query: Tensor | None  # (1, heads, 1 + M, head width) of the first layer; layout `ace` only


class ITMScorer:
    """Scorer of one image with many texts at a time, for inference with constant weights."""

    def __init__(self, model: VLPModel) -> None:
        self.model = model
        self.config, self.grid = model.config.cross, model.config.image.grid
        self.two_streams = self.config.layout == "ace"
        self.layers: list[CrossLayer] = list(model.cross_encoder.layers)  # type: ignore[arg-type]
        attentions = [layer.cross_attention for layer in self.layers]
        self.shares_keys = all(attention.shares_keys for attention in attentions)
        # True: scores may depend on padding, and texts should be padded as in training.
        self.reads_padding = self.config.reads_padding
        groups = self.config.anchor.groups
        with torch.no_grad(), no_autocast(model.anchor_threshold):
            self.tables = [
                mean_path_tables(attention, groups) if self.shares_keys else None
                for attention in attentions
            ]

    @torch.no_grad()
    def prepare_texts(self, text: TextFeatures) -> PreparedTexts:
        """Compute the part of T texts that does not depend on the image."""
        states, context = text.states, self._text_context(text.states.shape[1], None)
        for encoding in self.model.cross_encoder.positions:
            states = call_method(encoding, PositionEncoding.tokens, states, context)
        states = call_method(
            self.layers[0], CrossLayer.self_attend, states, text.attention_mask, context
        )
        tokens = text.states if self.model.anchor_options.features == "encoder" else text.tokens
        return PreparedTexts(states, tokens, text.attention_mask, text.word_mask)

    @torch.no_grad()
    def prepare_image(self, image: ImageFeatures) -> PreparedImage:
        """Compute the part of one image (one row of features) that does not depend on texts."""
        states, context = image.states, self._image_context(None)
        for encoding in self.model.cross_encoder.positions:
            states = call_method(encoding, PositionEncoding.tokens, states, context)
        if self.two_streams:
            states = image_self_attention(self.layers[0], states, context)
        tokens = (
            image.states[:, 1:] if self.model.anchor_options.features == "encoder" else image.tokens
        )
        # In layout `ace`, texts change the image's states after the first layer.
        layers = self.layers[:1] if self.two_streams else self.layers
        attentions = [layer.cross_attention for layer in layers if self.shares_keys]
        query = None
        if self.two_streams and attentions:
            query = attentions[0].split_heads(attentions[0].query(states))
        return PreparedImage(
            states,
            tokens[0],
            keys=[attention.split_heads(attention.key(states))[0] for attention in attentions],
            values=[attention.split_heads(attention.value(states))[0] for attention in attentions],
            query=query,
        )

    @torch.no_grad()
    def match(self, image: PreparedImage, texts: PreparedTexts) -> Tensor:
        """Compute log-odds that each text describes the image: (T,) float32."""
        if not self.two_streams or off_cpu(texts.states):
            return self._match(image, texts)
        # In layout `ace` image states differ by pair: a chunk of pairs fits a core's cache.
        chunk_size = max(1, _CACHED_TOKENS // image.states.shape[1])
        tokens = texts.states.shape[1]
        chunks = torch.arange(len(texts.states)).split(chunk_size)
        return torch.cat([self._match(image, texts.select(rows, tokens)) for rows in chunks])

    def _match(self, prepared: PreparedImage, texts: PreparedTexts) -> Tensor:
        """Compute `match` for one chunk of texts."""
        paths = self._paths(prepared, texts)
        text_context = self._text_context(texts.states.shape[1], paths)
        image_context = self._image_context(paths)
        text, mask, image = texts.states, texts.attention_mask, prepared.states
        # Custom encodings may change keys by pair: each text gets a copy of the image.
        image = image if self.shares_keys else image.expand(len(text), -1, -1)
        cls_only = self.shares_keys and self.config.pooling == "cls"
        for number, (layer, tables) in enumerate(zip(self.layers, self.tables)):
            attention, is_last = layer.cross_attention, number == len(self.layers) - 1
            # The match score reads [CLS] alone, so it is the last layer's only query.
            single_query = is_last and cls_only
            # Prepared states are after the first layer's self-attention.
            if number and self.two_streams:
                image = image_self_attention(layer, image, image_context)
            if number and single_query and not layer.attention.positions:
                attended = layer.attention(text[:, :1], text, mask, text_context)
                text = layer.attention_norm(text[:, :1] + attended)
            elif number:
                text = call_method(layer, CrossLayer.self_attend, text, mask, text_context)
            if single_query:
                text, text_context = text[:, :1], _first_query_context(text_context)
            if number < len(prepared.keys):
                key_values = prepared.keys[number], prepared.values[number]
                attended = attend_shared_image(attention, text, *key_values, text_context, tables)
            elif single_query:
                attended = attend_single_query(attention, text, image, text_context, tables)
            else:
                attended = attention(text, image, None, text_context)
            if self.two_streams and not is_last:
                if number or prepared.query is None:
                    image_attended = attention(image, text, mask, image_context)
                else:
                    image_attended = attend_texts(
                        attention, prepared.query, text, mask, image_context, tables
                    )
                image = layer.add_cross_attention(image, image_attended)
            text = layer.add_cross_attention(text, attended)
        pooled = pool_states(text, self.config.pooling, None if cls_only else mask)
        logits = self.model.match_head(pooled).float()
        log_odds = logits[:, 1] - logits[:, 0]
        if self.config.token_score:
            score = self.model.token_score(prepared.tokens, texts.tokens, texts.word_mask)
            log_odds = log_odds + score.float()
        return log_odds

    def _text_context(self, tokens: int, paths: AnchorPaths | None) -> PositionContext:
        return PositionContext((1, tokens - 1), prefix_tokens=1, anchors=paths, text_queries=True)

    def _image_context(self, paths: AnchorPaths | None) -> PositionContext:
        return PositionContext(self.grid, prefix_tokens=1, anchors=paths, text_queries=False)

    def _paths(self, image: PreparedImage, texts: PreparedTexts) -> AnchorPaths | None:
        """Compute the paths of the image with each text, as `VLPModel.anchor_paths` does."""
        anchor, word_mask = self.config.anchor, texts.word_mask
        if "uniform" in self.config.position:
            paths = uniform_paths(word_mask, len(image.tokens), anchor.groups)
            dtype = texts.states.dtype
            return paths._replace(
                image_mean=paths.image_mean.to(dtype), text_mean=paths.text_mean.to(dtype)
            )
        if not self.config.has_paths:
            return None
        with no_autocast(word_mask):
            # One product for the tokens of all texts, (M, T N, G).
            tokens = at_least_float32(texts.tokens).flatten(0, 1)
            similarity = group_similarity(at_least_float32(image.tokens), tokens, anchor.groups)
            # (T, M, N, G), with the tokens contiguous in memory, as `group_similarity` leaves them.
            similarity = similarity.unflatten(1, word_mask.shape).permute(1, 3, 0, 2).contiguous()
            similarity = similarity.permute(0, 2, 3, 1)
        return paths_from_similarity(similarity, word_mask, self.model.path_settings)


def _first_query_context(context: PositionContext) -> PositionContext:
    """Return the context of each text's first token as the only query."""
    paths = context.anchors
    if paths is not None:
        paths = paths._replace(
            text_path=paths.text_path[:, :1],
            text_mean=paths.text_mean[:, :1],
            alignment=None if paths.alignment is None else paths.alignment[:, :, :1],
        )
    return PositionContext(context.grid, prefix_tokens=1, anchors=paths, text_queries=True)


def _padded(states: Tensor, tokens: int) -> Tensor:
    """Pad (T, N) or (T, N, channels) with zeros or False to N = tokens."""
    missing = tokens - states.shape[1]
    return functional.pad(states, (0, 0, 0, missing) if states.ndim == 3 else (0, missing))
