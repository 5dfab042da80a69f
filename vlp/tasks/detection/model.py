"""DETR: a ResNet, an encoder with position encodings, and a decoder of object queries."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import timm
import torch
from pydantic import Field
from timm.layers import GroupNorm, freeze_batch_norm_2d
from torch import Tensor, nn

from vlp.config import Config, ConfigError
from vlp.layers.attention import Attention
from vlp.models.vision.backbone import attention_encodings, create_encoding, on_tokens
from vlp.positions.base import PositionContext, PositionEncoding, call_method
from vlp.positions.options import PositionConfig
from vlp.precision import at_least_float32

Norm = Literal["frozen", "batch", "group"]


class ResNetConfig(Config):
    """Configuration of a ResNet: model, norm, and trained stages."""

    name: str = Field("resnet50", description="a ResNet of timm")
    options: Mapping[str, Any] = Field({}, description="options of timm.create_model")
    pretrained: bool = Field(False, description="timm's public weights, for `batch` and `frozen`")
    norm: Norm = Field(
        "frozen",
        description="frozen: batch norm with fixed statistics and weights (DETR); batch: trained "
        "batch norm, with the statistics of each rank; group: group norm, for training from "
        "scratch",
    )
    stage: int = Field(
        4, ge=1, le=4, description="stage of the features: 4 has stride 32, 3 has stride 16"
    )
    frozen_stages: int = Field(
        0, ge=0, le=4, description="number of first stages that are frozen with the stem; DETR: 1"
    )


class ResNet(nn.Module):
    """Images (B, 3, height, width) to features (B, channels, rows, columns)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        options = dict(config.options)
        if config.norm == "group":
            if config.pretrained:
                raise ConfigError(
                    f"backbone {config.name}: public weights need batch norm, so `norm: group` "
                    "does not allow `pretrained: true`"
                )
            options["norm_layer"] = _group_norm
        try:
            body: Any = timm.create_model(
                config.name,
                pretrained=config.pretrained,
                features_only=True,
                out_indices=(config.stage,),
                **options,
            )
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"backbone {config.name}: {error}") from error
        if not hasattr(body, "layer1"):
            raise ConfigError(
                f"backbone {config.name}: not a ResNet of timm, which has layer1 to layer4"
            )
        self.body = freeze_batch_norm_2d(body) if config.norm == "frozen" else body
        self.channels: int = body.feature_info.channels()[0]
        self.stride: int = body.feature_info.reduction()[0]
        if config.frozen_stages:
            trainable = tuple(f"layer{stage}." for stage in range(config.frozen_stages + 1, 5))
            for name, parameter in self.body.named_parameters():
                parameter.requires_grad_(name.startswith(trainable))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the features of an image with these sides."""
        return math.ceil(height / self.stride), math.ceil(width / self.stride)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the features of the configured stage."""
        return self.body(pixels)[0]


def _group_norm(channels: int, **options: Any) -> GroupNorm:
    # At most 32 groups, and a divisor of the channels.
    return GroupNorm(channels, math.gcd(32, channels), **options)


AddPosition = Callable[[Tensor], Tensor]


def no_position(states: Tensor) -> Tensor:
    """Return the states (B, T, width) unchanged."""
    return states


@dataclass(frozen=True)
class QueryKeyContext(PositionContext):
    """A context with functions that add position encodings to the queries and to the keys."""

    query_position: AddPosition = no_position
    key_position: AddPosition = no_position


class QueryKeyPositions(PositionEncoding):
    """Encoding that applies the functions of a `QueryKeyContext`: all layers add the same."""

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, context: PositionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys (B, T, width) with positions, and unchanged values."""
        if not isinstance(context, QueryKeyContext):
            raise TypeError(f"a QueryKeyContext is needed, not {type(context).__name__}")
        return context.query_position(query), context.key_position(key), value


class DetrConfig(Config):
    """Sizes of DETR (Carion et al. 2020) with its defaults, and the encodings."""

    backbone: ResNetConfig = Field(ResNetConfig(), description="ResNet that reads the image")
    width: int = Field(256, ge=1, description="channels of a token")
    heads: int = Field(8, ge=1, description="attention heads, a divisor of the width")
    intermediate: int = Field(2048, ge=1, description="hidden channels of a feed-forward block")
    encoder_layers: int = Field(6, ge=0, description="layers of the encoder; 0: no encoder")
    decoder_layers: int = Field(6, ge=1, description="layers of the decoder")
    queries: int = Field(100, ge=1, description="object queries: detections per image")
    # Drawn by torch, so that results depend on the number of ranks.
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout of attention and feed-forward outputs; DETR: 0.1"
    )
    positions: tuple[PositionConfig, ...] = Field(
        (), description="encodings of the encoder; those of tokens also act on the decoder's keys"
    )
    place: Literal["layers", "input"] = Field(
        "layers",
        description="where encodings of tokens act: layers: on queries and keys of every layer "
        "(DETR); input: once on the encoder's input",
    )


class Detections(NamedTuple):
    """Predictions of every decoder layer, in their order."""

    # (layers, B, queries, classes + 1), the last class is 'no object'
    logits: Tensor
    # (layers, B, queries, 4): centre x, y, width, height as shares of the image's width and height
    boxes: Tensor


class Detr(nn.Module):
    """Images of any sizes to a fixed number of boxes with classes.

    As DETR, but without padding and without dropout of attention weights.

    Args:
        classes: number of classes without 'no object'.
        largest_side: largest longer side in pixels; learned tables are made for a square of this
            side, unless their options name a grid.
    """

    def __init__(self, config: DetrConfig, classes: int, largest_side: int) -> None:
        super().__init__()
        width = config.width
        if width % config.heads:
            raise ConfigError(f"model: {config.heads} heads do not divide width {width}")
        self.place = config.place
        self.backbone = ResNet(config.backbone)
        self.project = nn.Conv2d(self.backbone.channels, width, 1)
        grid = self.backbone.grid(largest_side, largest_side)
        self.positions = nn.ModuleList(
            create_encoding(position, width=width, grid=grid)
            for position in config.positions
            if on_tokens(position)
        )
        encodings_by_layer = [
            attention_encodings(config.positions, width, config.heads, grid)
            for _ in range(config.encoder_layers)
        ]
        self.encoder = nn.ModuleList(DetrEncoderLayer(config, e) for e in encodings_by_layer)
        self.decoder = nn.ModuleList(DetrDecoderLayer(config) for _ in range(config.decoder_layers))
        self.decoder_norm = nn.LayerNorm(width)
        self.queries = nn.Embedding(config.queries, width)
        self.classify = nn.Linear(width, classes + 1)
        self.locate = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 4),
        )  # fmt: skip
        for stack in (self.encoder, self.decoder):
            _init_weights(stack)

    def forward(self, images: Sequence[Tensor]) -> Detections:
        """Detect objects in B images (3, height, width), normalised, of any sizes."""
        # A batch per image size needs no padding: position encodings see the real grid, and a
        # result does not depend on the other images. Under ZeRO-3, which gathers weights in every
        # call, all ranks must have the same number of sizes.
        numbers_by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for number, image in enumerate(images):
            numbers_by_shape[image.shape].append(number)
        groups = list(numbers_by_shape.values())
        parts = [self.detect(torch.stack([images[n] for n in numbers])) for numbers in groups]
        logits, boxes = (torch.cat(fields, 1) for fields in zip(*parts))
        order = torch.tensor([n for numbers in groups for n in numbers]).argsort().to(logits.device)
        return Detections(logits[:, order], boxes[:, order])

    def detect(self, pixels: Tensor) -> Detections:
        """Detect objects in images of one size (B, 3, height, width)."""
        features = self.project(self.backbone(pixels))
        context = PositionContext((features.shape[-2], features.shape[-1]))
        memory, key_position = self.encode(features.flatten(2).transpose(1, 2), context)
        target = memory.new_zeros(len(memory), self.queries.num_embeddings, memory.shape[-1])
        # A call of the embedding, not its weight, so that ZeRO-3 gathers the weight.
        indices = torch.arange(self.queries.num_embeddings, device=memory.device)
        query_position = partial(_add, self.queries(indices))
        states_by_layer = []
        for layer in self.decoder:
            target = layer(target, memory, query_position, key_position)
            states_by_layer.append(self.decoder_norm(target))
        states = torch.stack(states_by_layer)
        logits, boxes = self.classify(states), self.locate(states)
        # In half precision, boxes on an image of 1,000 pixels would have steps of 4 pixels.
        return Detections(at_least_float32(logits), at_least_float32(boxes).sigmoid())

    def encode(self, tokens: Tensor, context: PositionContext) -> tuple[Tensor, AddPosition]:
        """Encode a grid's tokens (B, T, width); also return the encoding of the decoder's keys."""
        position: AddPosition = partial(self._add_positions, context=context)
        if self.place == "input":
            tokens, position = position(tokens), no_position
        layer_context = QueryKeyContext(
            context.grid, query_position=position, key_position=position
        )
        for layer in self.encoder:
            tokens = layer(tokens, layer_context)
        return tokens, position

    def require_grid(self, height: int, width: int) -> None:
        """Require that the encodings support an image with these sides; ValueError if not."""
        rows, columns = self.backbone.grid(height, width)
        like = self.project.weight
        tokens = like.new_zeros(1, rows * columns, like.shape[0])
        with torch.no_grad():
            _, key_position = self.encode(tokens, PositionContext((rows, columns)))
            key_position(tokens)

    def _add_positions(self, tokens: Tensor, context: PositionContext) -> Tensor:
        for encoding in self.positions:
            tokens = call_method(encoding, PositionEncoding.tokens, tokens, context)
        return tokens


class DetrEncoderLayer(nn.Module):
    """Post-norm self-attention and feed-forward."""

    def __init__(self, config: DetrConfig, positions: Sequence[PositionEncoding]) -> None:
        super().__init__()
        self.attention = Attention(
            config.width, config.heads, positions=[QueryKeyPositions(), *positions]
        )
        self.attention_norm = nn.LayerNorm(config.width)
        self.feed_forward = _feed_forward(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, context: QueryKeyContext) -> Tensor:
        """Compute (B, T, width) -> (B, T, width)."""
        attended = self.dropout(self.attention(tokens, context=context))
        tokens = self.attention_norm(tokens + attended)
        return self.feed_forward_norm(tokens + self.dropout(self.feed_forward(tokens)))


class DetrDecoderLayer(nn.Module):
    """Post-norm self-attention of queries, cross-attention to the image, and feed-forward."""

    def __init__(self, config: DetrConfig) -> None:
        super().__init__()
        width, heads = config.width, config.heads
        self.attention = Attention(width, heads, positions=[QueryKeyPositions()])
        self.attention_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, heads, positions=[QueryKeyPositions()])
        self.cross_norm = nn.LayerNorm(width)
        self.feed_forward = _feed_forward(config)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, target: Tensor, memory: Tensor, query_position: AddPosition, key_position: AddPosition
    ) -> Tensor:
        """Decode target (B, queries, width) with memory (B, T, width) -> (B, queries, width)."""
        context = QueryKeyContext(query_position=query_position, key_position=query_position)
        output = self.attention(target, context=context)
        target = self.attention_norm(target + self.dropout(output))
        context = QueryKeyContext(query_position=query_position, key_position=key_position)
        output = self.cross_attention(target, memory, context=context)
        target = self.cross_norm(target + self.dropout(output))
        return self.feed_forward_norm(target + self.dropout(self.feed_forward(target)))


def _add(embeddings: Tensor, states: Tensor) -> Tensor:
    return states + embeddings.to(states.dtype)


def _feed_forward(config: DetrConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(config.width, config.intermediate), nn.ReLU(), nn.Dropout(config.dropout),
        nn.Linear(config.intermediate, config.width),
    )  # fmt: skip


def _init_weights(layers: nn.ModuleList) -> None:
    """Initialise linear layers by Xavier; encodings keep their own initial weights."""
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear) and ".positions." not in name:
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
