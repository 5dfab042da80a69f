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

Norm = Literal["frozen", "batch", "group"]


class ResNetConfig(Config):
    """Configuration of a ResNet: its kind, its depth, and its trained parts."""

    name: str = Field("resnet50", description="a ResNet of timm")
    options: Mapping[str, Any] = Field({}, description="of timm.create_model: channels, ...")
    pretrained: bool = Field(False, description="timm's public weights, for `batch` and `frozen`")
    norm: Norm = Field(
        "frozen",
        description="frozen: batch norms as they were loaded (DETR); batch: batch norms that are "
        "trained, whose statistics depend on the ranks; group: group norm, for training from "
        "scratch",
    )
    stage: int = Field(
        4, ge=1, le=4, description="stage of the features: 4 has stride 32, 3 has 16"
    )
    frozen_stages: int = Field(
        0, ge=0, le=4, description="stages that are frozen with the stem; DETR: 1"
    )


class ResNet(nn.Module):
    """Images (B, 3, height, width) to features (B, channels, rows, columns)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        options = dict(config.options)
        if config.norm == "group":
            if config.pretrained:
                raise ConfigError(
                    f"backbone {config.name}: public weights belong to batch norms, not to "
                    "norm: group"
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
                f"backbone {config.name}: not a ResNet of timm, which has layer1 to 4"
            )
        self.body = freeze_batch_norm_2d(body) if config.norm == "frozen" else body
        self.channels: int = body.feature_info.channels()[0]
        self.stride: int = body.feature_info.reduction()[0]
        trained = tuple(f"layer{stage}." for stage in range(config.frozen_stages + 1, 5))
        if config.frozen_stages:
            for name, parameter in self.body.named_parameters():
                parameter.requires_grad_(name.startswith(trained))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the features of an image."""
        return math.ceil(height / self.stride), math.ceil(width / self.stride)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features of the chosen stage."""
        features: Tensor = self.body(pixels)[0]
        return features


def _group_norm(channels: int, **options: Any) -> GroupNorm:
    # 32 groups, or as many as divide both 32 and the channels.
    return GroupNorm(channels, math.gcd(32, channels), **options)


AddPosition = Callable[[Tensor], Tensor]


def no_position(states: Tensor) -> Tensor:
    """Return the states (B, T, width) unchanged."""
    return states


@dataclass(frozen=True)
class QueryKeyContext(PositionContext):
    """A context that also gives the states (B, T, width) their places, for queries and for keys."""

    query_position: AddPosition = no_position
    key_position: AddPosition = no_position


class QueryKeyPositions(PositionEncoding):
    """Encoding that asks the context for positions and has no parameters, so layers share one."""

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
    encoder_layers: int = Field(6, ge=0, description="layers of the encoder; 0 leaves it out")
    decoder_layers: int = Field(6, ge=1, description="layers of the decoder")
    queries: int = Field(100, ge=1, description="objects found at most")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="of what is added to the states; DETR has 0.1. Drawn by torch, so it depends "
        "on the ranks and on where a run was resumed",
    )
    positions: tuple[PositionConfig, ...] = Field(
        (), description="of the encoder; those of tokens also place the decoder's keys"
    )
    place: Literal["layers", "input"] = Field(
        "layers",
        description="where encodings of tokens act: queries and keys of every layer (DETR), or "
        "once on the encoder's input",
    )


class Detections(NamedTuple):
    """Predictions of every decoder layer, the last one last."""

    # (layers, B, queries, classes + 1), the last class is 'no object'
    logits: Tensor
    # (layers, B, queries, 4): centre x, y, width, height as shares of the image's width and height
    boxes: Tensor


class Detr(nn.Module):
    """Images of any sizes to a fixed number of boxes with classes.

    As DETR, but for padding and for dropout in attention, which are absent.

    Args:
        classes: without 'no object'.
        largest_side: pixels of the longest side in training; encodings with a table get one for a
            square of it, unless their options name a grid.
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
        layers = [
            attention_encodings(config.positions, width, config.heads, grid)
            for _ in range(config.encoder_layers)
        ]
        self.encoder = nn.ModuleList(DetrEncoderLayer(config, positions) for positions in layers)
        self.decoder = nn.ModuleList(DetrDecoderLayer(config) for _ in range(config.decoder_layers))
        self.decoder_norm = nn.LayerNorm(width)
        self.queries = nn.Embedding(config.queries, width)
        self.classify = nn.Linear(width, classes + 1)
        self.locate = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 4),
        )  # fmt: skip
        for layers_of in (self.encoder, self.decoder):
            _start(layers_of)

    def forward(self, images: Sequence[Tensor]) -> Detections:
        """Detect objects in B images (3, height, width), normalised, of any sizes."""
        # Images of one size are computed together and without padding, so that every position
        # encoding sees the real grid and a result does not depend on the batch. ZeRO-3 gathers
        # weights at every call and so needs equal numbers of sizes on every rank.
        groups: dict[torch.Size, list[int]] = defaultdict(list)
        for number, image in enumerate(images):
            groups[image.shape].append(number)
        parts = [self.detect(torch.stack([images[n] for n in rows])) for rows in groups.values()]
        order = torch.tensor([number for rows in groups.values() for number in rows]).argsort()
        return Detections(*(torch.cat(fields, 1)[:, order.to(fields[0].device)]
                            for fields in zip(*parts)))  # fmt: skip

    def detect(self, pixels: Tensor) -> Detections:
        """Detect objects in images of one size (B, 3, height, width)."""
        features = self.project(self.backbone(pixels))
        context = PositionContext((features.shape[-2], features.shape[-1]))
        memory, key_position = self.encode(features.flatten(2).transpose(1, 2), context)
        target = memory.new_zeros(len(memory), self.queries.num_embeddings, memory.shape[-1])
        query_position = _AddQueries(self.queries(_numbers(self.queries)))
        states = []
        for layer in self.decoder:
            target = layer(target, memory, query_position, key_position)
            states.append(self.decoder_norm(target))
        out = torch.stack(states)
        logits, boxes = self.classify(out), self.locate(out)
        # In half precision neighbouring boxes would be 4 pixels of 1,000 apart.
        exact = torch.promote_types(boxes.dtype, torch.float32)
        return Detections(logits.to(exact), boxes.to(exact).sigmoid())

    def encode(self, tokens: Tensor, context: PositionContext) -> tuple[Tensor, AddPosition]:
        """Encode a grid's tokens (B, T, width) -> memory (B, T, width), and its keys' places."""
        add: AddPosition = partial(self._add_positions, context=context)
        if self.place == "input":
            tokens, add = add(tokens), no_position
        layer_context = QueryKeyContext(context.grid, query_position=add, key_position=add)
        for layer in self.encoder:
            tokens = layer(tokens, layer_context)
        return tokens, add

    def require_grid(self, height: int, width: int) -> None:
        """Require that the position encodings can encode an image of this many pixels."""
        rows, columns = self.backbone.grid(height, width)
        like = self.project.weight
        tokens = like.new_zeros(1, rows * columns, like.shape[0])
        with torch.no_grad():
            _, add = self.encode(tokens, PositionContext((rows, columns)))
            add(tokens)

    def _add_positions(self, tokens: Tensor, context: PositionContext) -> Tensor:
        for encoding in self.positions:
            tokens = call_method(encoding, PositionEncoding.tokens, tokens, context)
        return tokens


class DetrEncoderLayer(nn.Module):
    """Self-attention and feed-forward, each added and then normalised."""

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
    """Queries attend to one another, then to the image; then the feed-forward."""

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
        self, target: Tensor, memory: Tensor, query: AddPosition, key: AddPosition
    ) -> Tensor:
        """Decode target (B, queries, width) with memory (B, T, width) -> (B, queries, width)."""
        self_context = QueryKeyContext(query_position=query, key_position=query)
        attended = self.attention(target, context=self_context)
        target = self.attention_norm(target + self.dropout(attended))
        cross_context = QueryKeyContext(query_position=query, key_position=key)
        crossed = self.cross_attention(target, memory, context=cross_context)
        target = self.cross_norm(target + self.dropout(crossed))
        return self.feed_forward_norm(target + self.dropout(self.feed_forward(target)))


class _AddQueries:
    def __init__(self, embeddings: Tensor) -> None:
        self.embeddings = embeddings

    def __call__(self, states: Tensor) -> Tensor:
        return states + self.embeddings.to(states.dtype)


def _feed_forward(config: DetrConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(config.width, config.intermediate), nn.ReLU(), nn.Dropout(config.dropout),
        nn.Linear(config.intermediate, config.width),
    )  # fmt: skip


def _numbers(embedding: nn.Embedding) -> Tensor:
    return torch.arange(embedding.num_embeddings, device=embedding.weight.device)


def _start(layers: nn.ModuleList) -> None:
    """Initialise linear layers by Xavier; encodings keep their own start."""
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear) and ".positions." not in name:
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
