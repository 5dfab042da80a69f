"""The cross-modal encoder: both streams through the same layers, with ACE-RPE between them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from vlp.compilation import on_gpu
from vlp.layers.attention import Attention
from vlp.layers.blocks import CrossLayer, gather_tokens
from vlp.models.config import SHORTHANDS, CrossConfig
from vlp.positions import (
    CROSS_MODAL,
    PositionContext,
    PositionEncoding,
    acts_on_tokens,
    create_fitting_position,
    create_position,
    position_options,
)
from vlp.positions.anchor_field import AnchorPaths
from vlp.positions.base import ByModality, call_method

# Initial standard deviation of learned positions, which are added to states of deviation 1.
APE_STD = 0.5

# For each layer's cross-attention: keys and values (I, 1 + M, width) of I images.
ImageKeyValues = tuple[tuple[Tensor, Tensor], ...]


class PairIndices(NamedTuple):
    """Rows of the text and of the image of each of B pairs, (B,) int64."""

    texts: Tensor
    images: Tensor


class CrossEncoder(nn.Module):
    """Cross-modal encoder: 53,277,696 parameters at the paper's sizes (`ace`, tables for q, k, v).

    In layout `ace` text attends to image and image to text, with the same weights. In `text` only
    text attends to image, whose states stay those of the image encoder. `albef` is `text` with
    an output projection in cross-attention.
    """

    def __init__(
        self, config: CrossConfig, width: int, max_tokens: int, grid: tuple[int, int]
    ) -> None:
        super().__init__()
        self.config, self.grid = config, grid
        names = encodings_by_module(config)
        create_encoding = partial(
            create_stream_encoding, config=config, width=width, max_tokens=max_tokens, grid=grid
        )
        self.positions = nn.ModuleList(create_encoding(name) for name in names["tokens"])
        self.layers = nn.ModuleList(
            CrossLayer(
                width,
                config.heads,
                config.intermediate,
                cross_output=config.layout == "albef",
                positions=[
                    _create_cross_modal(name, config, width) for name in names["cross_attention"]
                ],
                self_positions=[create_encoding(name) for name in names["self_attention"]],
                dropout=config.dropout,
            )
            for _ in range(config.layers)
        )

    def forward(
        self,
        text: Tensor,
        image: Tensor,
        text_mask: Tensor,
        paths: AnchorPaths | None,
        pairs: PairIndices | None = None,
        need_image: bool = True,
        image_kv: ImageKeyValues | None = None,
        query_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute cross-modal states of pairs: text (B, N, width), image (B, 1 + M, width) or None.

        Args:
            text: (T, N, width).
            image: (I, 1 + M, width), or (I, P (1 + M), width) of P images concatenated along
                tokens; self-attention stays within an image.
            text_mask: (T, N) bool, True = not padding.
            paths: of the B pairs, for ACE-RPE.
            pairs: indices of text and image of each pair; None pairs them row by row.
            need_image: False skips the image output of the last layer.
            image_kv: `image_key_values` of the I images, for repeated passes; needs
                `shares_images`.
            query_indices: (B, Q) int64, text tokens of each pair to compute: the text output is
                (B, Q, width); needs `shares_images`.
        """
        needs_sharing = image_kv is not None or query_indices is not None
        if needs_sharing and not self.shares_images(text):
            raise ValueError(
                "image_kv and query_indices need layout text or albef, a CPU, and encodings that "
                "do not change keys and values; check `shares_images` first"
            )
        two_streams = self.config.layout == "ace"
        text_grid = (1, text.shape[1] - 1)
        text_context = PositionContext(text_grid, prefix_tokens=1, anchors=paths, text_queries=True)
        image_context = PositionContext(
            self.grid, prefix_tokens=1, anchors=paths, text_queries=False
        )
        for encoding in self.positions:
            text = call_method(encoding, PositionEncoding.tokens, text, text_context)
        # With `image_kv` no layer reads image states. Without it each layer projects keys and
        # values per pair, which saves gathering them if no pairs share an image.
        image_states = self._add_positions(image) if image_kv is None else None
        for number, layer in enumerate(self.layers):
            is_last = number == len(self.layers) - 1
            queries = query_indices if is_last else None
            # The first self-attention runs once per text and per image, before pairing, and on
            # whole texts, as pairs of one text may select different queries.
            is_paired = number > 0 or pairs is None
            text = call_method(
                layer,
                CrossLayer.self_attend,
                text,
                text_mask,
                text_context,
                queries if is_paired else None,
            )
            if two_streams and image_states is not None:
                images = self._split_images(image_states)
                image_states = call_method(
                    layer, CrossLayer.self_attend, images, None, image_context
                ).reshape_as(image_states)
            if number == 0 and pairs is not None:
                text, text_mask = text[pairs.texts], text_mask[pairs.texts]
                text = text if queries is None else gather_tokens(text, queries)
                image_states = None if image_states is None else image_states[pairs.images]
            if queries is not None and paths is not None:
                text_context = replace(text_context, anchors=paths.select_text(queries))
            layer_kv = None if image_kv is None else image_kv[number]
            if layer_kv is not None and pairs is not None:
                key, value = layer_kv
                layer_kv = key.index_select(0, pairs.images), value.index_select(0, pairs.images)
            terms = call_method(layer, CrossLayer.kernel_terms, text)
            text_context = replace(text_context, kernel_terms=terms)
            image_context = replace(image_context, kernel_terms=terms)
            text_output = call_method(
                layer, CrossLayer.cross_attend, text, image_states, None, text_context, layer_kv
            )
            if two_streams and image_states is not None and (need_image or not is_last):
                image_states = call_method(
                    layer, CrossLayer.cross_attend, image_states, text, text_mask, image_context
                )
            # Replaced last: in layout `ace` the image attends to the text's input of this layer.
            text = text_output
        return text, image_states if two_streams and need_image else None

    def shares_images(self, states: Tensor) -> bool:
        """Return whether pairs of one image may share its projected keys and values.

        They may in layouts `text` and `albef` on a CPU (device of `states`, (B, T, width)), unless
        an encoding changes keys and values.
        """
        # The GPU kernel needs keys and values per pair.
        if self.config.layout == "ace" or on_gpu(states):
            return False
        attentions: list[Attention] = [layer.cross_attention for layer in self.layers]  # type: ignore[misc]
        # Custom encodings may change keys and values by pair.
        return all(attention.shares_keys for attention in attentions)

    def image_key_values(self, image: Tensor) -> ImageKeyValues:
        """Project images (I, 1 + M, width) to each layer's keys and values, of the same shape."""
        image = self._add_positions(image)
        return tuple(call_method(layer, CrossLayer.project, image) for layer in self.layers)

    def _add_positions(self, image: Tensor) -> Tensor:
        """Apply the token encodings to images, shaped as in `forward`."""
        context = PositionContext(self.grid, prefix_tokens=1, text_queries=False)
        for encoding in self.positions:
            images = self._split_images(image)
            images = call_method(encoding, PositionEncoding.tokens, images, context)
            image = images.reshape_as(image)
        return image

    def _split_images(self, states: Tensor) -> Tensor:
        """Split concatenated images: (I, P (1 + M), width) -> (I P, 1 + M, width)."""
        return states.unflatten(1, (-1, 1 + self.grid[0] * self.grid[1])).flatten(0, 1)


def encodings_by_module(config: CrossConfig) -> dict[str, tuple[str, ...]]:
    """Return names of `cross.position`, in module order, by what the encodings act on.

    Keys are `tokens`, `self_attention` and `cross_attention`.
    """
    stream_names = [name for name in config.position if name not in (*SHORTHANDS, *CROSS_MODAL)]
    token_names = [name for name in stream_names if acts_on_tokens(name)]
    attention_names = [name for name in stream_names if not acts_on_tokens(name)]
    # Shorthands come last, wherever `position` lists them.
    token_names += ["ape"] if "ape" in config.position else []
    attention_names += ["rpe"] if "rpe" in config.position else []
    return {
        "tokens": tuple(token_names),
        "self_attention": tuple(attention_names),
        "cross_attention": tuple(name for name in config.position if name in CROSS_MODAL),
    }


def _create_cross_modal(name: str, config: CrossConfig, width: int) -> PositionEncoding:
    """Create ACE-RPE, `uniform` (ACE-RPE on constant paths), or another cross-modal encoding."""
    if name not in ("anchor", "uniform"):
        sizes = {"width": width, "heads": config.heads}
        return create_fitting_position(name, sizes, **config.options.get(name, {}))
    options = config.anchor_options.model_dump(include={"roles", "mode", "shared_heads", "scale"})
    sizes = {"width": width, "heads": config.heads, "groups": config.anchor.groups}
    return create_position(name, **sizes, **options)


def create_stream_encoding(
    name: str, config: CrossConfig, width: int, max_tokens: int, grid: tuple[int, int]
) -> ByModality:
    """Create the text and image encodings of a name in `cross.position` that acts in streams."""
    shorthands: dict[str, tuple[str, dict[str, Any]]] = {
        "ape": ("learned-1d", {"deviation": APE_STD}),
        "rpe": ("irpe-product", {"roles": ("query", "key")}),
    }
    name, shorthand_options = shorthands.get(name, (name, {}))
    options = {**config.options.get(name, {}), **shorthand_options}
    text_size: dict[str, Any] = {"grid": (1, max_tokens - 1)}
    if "length" in position_options(name):
        # With a grid the encoding would refuse shorter texts.
        text_size = {"length": max_tokens - 1}
    sizes = {"width": width, "heads": config.heads}
    return ByModality(
        create_fitting_position(name, sizes | text_size, **options),
        create_fitting_position(name, sizes | {"grid": grid}, **options),
    )


class ImageFeatures(NamedTuple):
    """Output of the image encoder for B images."""

    states: Tensor  # (B, 1 + M, width), [CLS] first
    feature: Tensor  # (B, d) of unit length
    tokens: Tensor  # (B, M, d) of unit length, of the patches

    def select(self, indices: Tensor) -> ImageFeatures:
        """Select rows `indices` (int64 or bool)."""
        return ImageFeatures(*(field[indices] for field in self))


class TextFeatures(NamedTuple):
    """Output of the text encoder for B texts."""

    states: Tensor  # (B, N, width), [CLS] first
    feature: Tensor  # (B, d) of unit length
    tokens: Tensor  # (B, N, d) of unit length
    attention_mask: Tensor  # (B, N) bool, True = not padding
    word_mask: Tensor  # (B, N) bool, True = word piece; False also at [CLS] and [SEP]

    def select(self, indices: Tensor) -> TextFeatures:
        """Select rows `indices` (int64 or bool)."""
        return TextFeatures(*(field[indices] for field in self))


class CrossFeatures(NamedTuple):
    """Output of the cross-modal encoder for B pairs."""

    text: Tensor  # states (B, N, width), the joint [CLS] first (papers.md#ace-a29)
    image: Tensor | None  # states (B, 1 + M, width); None if not requested
    paths: AnchorPaths | None  # None without ACE-RPE
    attention_mask: Tensor  # (B, N) bool, True = not padding
    token_score: Tensor | None = None  # (B,) output of `TokenScore`, a term of the match score
