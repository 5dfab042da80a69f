"""The image generation model of Li et al. 2021 (section 4.1): a transformer over channels.

A token is a channel value; the tokens are in raster scan, red, green and blue of each pixel in
turn: 12,288 at 64 x 64. Layers are the paper's (Reformer, with exact attention) or a transformer's.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vlp.config import Config, ConfigError
from vlp.layers.attention import CausalAttention
from vlp.layers.blocks import FeedForward
from vlp.models.vision.backbone import attention_encodings, create_encoding, on_tokens
from vlp.positions.base import PositionContext, PositionEncoding, call_method
from vlp.positions.options import PositionConfig
from vlp.tasks.pixels.data import CHANNELS


class SharedQueryAttention(nn.Module):
    """Causal self-attention without biases; the keys are the queries at unit length."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.value = nn.Linear(width, heads * head_width, bias=False)
        self.output = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Attend causally, (B, T, width) -> (B, T, width)."""
        query, value = (
            project(states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.value)
        )
        key = functional.normalize(query, dim=-1)
        # Query t sees keys 0 to t - 1, not its own: equal to the query, it would get most of the
        # attention. Hence the shift by one. The first token attends to itself.
        earlier = functional.scaled_dot_product_attention(
            query[:, :, 1:], key[:, :, :-1], value[:, :, :-1], is_causal=True, scale=1.0
        )
        out = torch.cat([value[:, :, :1], earlier], -2)
        return self.output(out.transpose(1, 2).flatten(-2))


class ReformerLayer(nn.Module):
    """Two residual streams: attention reads the second and adds to the first, feed-forward back."""

    def __init__(self, width: int, heads: int, head_width: int, feed_forward: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SharedQueryAttention(width, heads, head_width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, feed_forward)

    def forward(self, x: Tensor, context: PositionContext) -> Tensor:
        """Compute (B, T, 2 * width), both streams -> same shape; the context is ignored."""
        first, second = x.chunk(2, -1)
        first = first + self.attention(self.attention_norm(second))
        second = second + self.feed_forward(self.feed_forward_norm(first))
        return torch.cat([first, second], -1)


LEVELS = 256
# Input token before the first value.
START = LEVELS

# Encodings of a token's index in the sequence; all others encode the position of its pixel.
SEQUENCE_ENCODINGS = ("learned-1d", "sine-1d")


class PixelModelConfig(Config):
    """Sizes of the transformer, and its position encodings."""

    width: int = Field(256, ge=1, description="channels of the model")
    layers: int = Field(6, ge=1, description="number of layers")
    layer: Literal["transformer", "reformer"] = Field(
        "transformer",
        description="reformer: the paper's layer, with queries as keys and two residual streams; "
        "it takes only encodings of tokens (papers.md#fourier-f14)",
    )
    heads: int = Field(8, ge=1, description="attention heads, a divisor of the width")
    head_width: int | None = Field(
        None, ge=1, description="channels of a head of layer reformer; null: width / heads"
    )
    feed_forward: int = Field(1024, ge=1, description="hidden channels of the feed-forward block")
    channel_width: int | None = Field(
        None,
        ge=1,
        description="channels of the width that encode red, green or blue, if the encoding is one "
        "of pixels; null: a quarter of the width, as the paper's 256 of 1024",
    )
    positions: tuple[PositionConfig, ...] = Field(
        (), description="learned-2d is the paper's Embed-2D, learned-1d its Embed-1D"
    )


class PixelPosition(nn.Module):
    """Position encoding of the value that each token predicts (Li et al., section 4.1).

    The last `channel_width` channels encode red, green or blue, the others the pixel: the paper
    concatenates 768 and 256 channels. `SEQUENCE_ENCODINGS` get all channels and need no colour.
    """

    def __init__(self, config: PixelModelConfig, size: int) -> None:
        super().__init__()
        self.size = size
        tokens = [position for position in config.positions if on_tokens(position)]
        sequence = [position for position in tokens if position.name in SEQUENCE_ENCODINGS]
        pixel = [position for position in tokens if position.name not in SEQUENCE_ENCODINGS]
        channel_width = config.width // 4 if config.channel_width is None else config.channel_width
        if not 0 < channel_width < config.width:
            raise ConfigError(
                f"model.channel_width {channel_width} must be above 0 and below model.width "
                f"{config.width}"
            )
        self.pixel_width = config.width - channel_width
        self.sequence = nn.ModuleList(
            create_encoding(position, width=config.width, grid=(size, CHANNELS * size))
            for position in sequence
        )
        self.pixel = nn.ModuleList(
            create_encoding(position, width=self.pixel_width, grid=(size, size))
            for position in pixel
        )
        # Embed-1D has 12,288 vectors of width 1024 (papers.md#fourier-f13).
        self.colours = None
        if pixel or not sequence:
            self.colours = nn.Parameter(0.02 * torch.randn(CHANNELS, channel_width))

    def forward(self, x: Tensor) -> Tensor:
        """Add the encoding to (B, size * size * 3, width) -> same shape."""
        for encoding in self.sequence:
            x = call_method(encoding, PositionEncoding.tokens, x, sequence_context(self.size))
        if self.colours is None:
            return x
        pixel, colour = x.split([self.pixel_width, x.shape[-1] - self.pixel_width], -1)
        # Encode three images of one channel each, as their pixels have the same positions.
        pixel = pixel.unflatten(1, (-1, CHANNELS)).transpose(1, 2).flatten(0, 1)
        context = PositionContext(grid=(self.size, self.size))
        for encoding in self.pixel:
            pixel = call_method(encoding, PositionEncoding.tokens, pixel, context)
        pixel = pixel.unflatten(0, (-1, CHANNELS)).transpose(1, 2).flatten(1, 2)
        return torch.cat([pixel, colour + self.colours.repeat(self.size**2, 1)], -1)


class PixelLayer(nn.Module):
    """Pre-norm causal self-attention and feed-forward."""

    def __init__(self, config: PixelModelConfig, size: int) -> None:
        super().__init__()
        width, heads = config.width, config.heads
        grid = (size, CHANNELS * size)
        encodings = attention_encodings(config.positions, width, heads, grid, causal=True)
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, encodings)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, config.feed_forward)

    def forward(self, x: Tensor, context: PositionContext) -> Tensor:
        """Compute (B, T, width) -> same shape; see `CausalAttention`."""
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.feed_forward(self.feed_forward_norm(x))


class PixelTransformer(nn.Module):
    """p(image) as the product of p(value | all values before it in raster scan)."""

    def __init__(self, config: PixelModelConfig, size: int) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ConfigError(
                f"model.heads {config.heads} do not divide model.width {config.width}"
            )
        self.size = size
        self.embedding = nn.Embedding(LEVELS + 1, config.width)
        self.places = PixelPosition(config, size)
        self.layers = nn.ModuleList(_layer(config, size) for _ in range(config.layers))
        self.streams = 2 if config.layer == "reformer" else 1
        self.norm = nn.LayerNorm(self.streams * config.width)
        self.head = nn.Linear(self.streams * config.width, LEVELS)
        # Between the scales of learned positions (0.02) and of sinusoids (about 1).
        nn.init.normal_(self.embedding.weight, std=0.1)
        # Nearly equal logits: an untrained model needs about 8 bits per value.
        nn.init.normal_(self.head.weight, std=0.02 / config.width**0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, values: Tensor) -> Tensor:
        """Return logits (B, size, size, 3, 256) of every value given all values before it.

        Args:
            values: (B, size, size, 3) int64, 0 to 255.
        """
        shape = (self.size, self.size, CHANNELS)
        if tuple(values.shape[1:]) != shape:
            raise ValueError(f"images of {shape} each are needed, not {tuple(values.shape)}")
        # The input at an index is the previous value, with the encoding of the value to predict.
        before = functional.pad(values.flatten(1)[:, :-1], (1, 0), value=START)
        x = self.places(self.embedding(before)).repeat(1, 1, self.streams)
        context = sequence_context(self.size)
        for layer in self.layers:
            x = layer(x, context)
        return self.head(self.norm(x)).unflatten(1, shape)

    def nats(self, values: Tensor) -> Tensor:
        """Return -ln p of every value, float32 of the shape of `values`; an image's is the sum."""
        logits = self(values).float()
        return functional.cross_entropy(logits.movedim(-1, 1), values, reduction="none")


def _layer(config: PixelModelConfig, size: int) -> nn.Module:
    if config.layer == "transformer":
        if config.head_width is not None:
            raise ConfigError("model.head_width is only for `layer: reformer`; leave it null")
        return PixelLayer(config, size)
    for position in config.positions:
        if not on_tokens(position):
            raise ConfigError(
                f"model.positions: {position.name} acts in attention, which `layer: reformer` does "
                "not support; choose encodings of tokens, or `layer: transformer`"
            )
    head_width = config.head_width or config.width // config.heads
    return ReformerLayer(config.width, config.heads, head_width, config.feed_forward)


def sequence_context(size: int) -> PositionContext:
    """Return the grid (size, 3 * size) of an image's tokens, in which a channel is a column."""
    return PositionContext(grid=(size, CHANNELS * size))
