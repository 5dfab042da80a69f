"""A transformer over the channels of an image, the image generation model of Li et al. 2021.

Section 4.1: a Reformer on the raster scan, red, green and blue of every pixel in turn: 12,288
tokens at 64 x 64. Its layers are a Reformer's, with exact attention, or a transformer's.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vlp.config import Config, ConfigError
from vlp.layers.blocks import FeedForward
from vlp.layers.causal import CausalAttention
from vlp.models.vision.backbone import attention_encodings, create_encoding, on_tokens
from vlp.positions.base import PositionContext, PositionEncoding, call_method
from vlp.positions.options import PositionConfig


class SharedQueryAttention(nn.Module):
    """Causal self-attention with queries at unit length as keys, without biases.

    `heads * head_width` may differ from the width.
    """

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
        # Row t sees the keys 0 .. t - 1, a causal square one row down: a token's own key would win,
        # being equal to its query. The first token attends to itself.
        earlier = functional.scaled_dot_product_attention(
            query[:, :, 1:], key[:, :, :-1], value[:, :, :-1], is_causal=True, scale=1.0
        )
        out = torch.cat([value[:, :, :1], earlier], -2)
        return self.output(out.transpose(1, 2).flatten(-2))


class ReformerLayer(nn.Module):
    """Two residual streams: attention reads the second and feeds the first, feed-forward back."""

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


CHANNELS = 3
LEVELS = 256
# Input before the first token.
START = LEVELS

# They number the tokens of the sequence, channels among them; the others know pixels.
SEQUENCES = ("learned-1d", "sine-1d")


class PixelModelConfig(Config):
    """Sizes of the transformer, and its encodings of the tokens' places."""

    width: int = Field(256, ge=1, description="channels of the model")
    layers: int = Field(6, ge=1, description="number of layers")
    layer: Literal["transformer", "reformer"] = Field(
        "transformer",
        description="reformer, the paper's: keys that are queries, two residual streams; it takes "
        "encodings of tokens alone (papers.md#fourier-f14)",
    )
    heads: int = Field(8, ge=1, description="attention heads, a divisor of the width")
    head_width: int | None = Field(
        None, ge=1, description="channels of a head of layer reformer; null: width / heads"
    )
    feed_forward: int = Field(1024, ge=1, description="channels between both of its layers")
    channel_width: int | None = Field(
        None,
        ge=1,
        description="channels of the model that tell red, green and blue apart, where the encoding "
        "only knows pixels; null is a quarter of the width, as the paper's 256 of 1024",
    )
    positions: tuple[PositionConfig, ...] = Field(
        (), description="learned-2d is the paper's Embed-2D, learned-1d its Embed-1D"
    )


class PixelPlaces(nn.Module):
    """Places of every token's pixel and channel to be predicted (Li et al., section 4.1).

    An encoding of pixels gets all channels but the last `channel_width`, to which a vector for red,
    green or blue is added: the paper concatenates 768 and 256 channels.
    """

    def __init__(self, config: PixelModelConfig, size: int) -> None:
        super().__init__()
        self.size = size
        tokens = [position for position in config.positions if on_tokens(position)]
        sequence = [position for position in tokens if position.name in SEQUENCES]
        pixel = [position for position in tokens if position.name not in SEQUENCES]
        share = config.width // 4 if config.channel_width is None else config.channel_width
        if not 0 < share < config.width:
            raise ConfigError(
                f"model.channel_width {config.channel_width} leaves no channels for pixels and "
                f"colours in model.width {config.width}"
            )
        self.pixel_width = config.width - share
        self.sequence = nn.ModuleList(
            create_encoding(position, width=config.width, grid=(size, CHANNELS * size))
            for position in sequence
        )
        self.pixel = nn.ModuleList(
            create_encoding(position, width=self.pixel_width, grid=(size, size))
            for position in pixel
        )
        # `learned-1d` and `sine-1d` number all tokens and so need no colours (12,288 vectors of
        # width 1024 in Embed-1D, papers.md#fourier-f13).
        self.colours = None
        if pixel or not sequence:
            self.colours = nn.Parameter(0.02 * torch.randn(CHANNELS, share))

    def forward(self, x: Tensor) -> Tensor:
        """Add places to (B, size * size * 3, width) -> same shape."""
        for encoding in self.sequence:
            x = call_method(encoding, PositionEncoding.tokens, x, sequence_context(self.size))
        if self.colours is None:
            return x
        pixel, colour = x.split([self.pixel_width, x.shape[-1] - self.pixel_width], -1)
        # Three images, one for each channel, with the same places of pixels.
        pixel = pixel.unflatten(1, (-1, CHANNELS)).transpose(1, 2).flatten(0, 1)
        for encoding in self.pixel:
            pixel = call_method(
                encoding,
                PositionEncoding.tokens,
                pixel,
                PositionContext(grid=(self.size, self.size)),
            )
        pixel = pixel.unflatten(0, (-1, CHANNELS)).transpose(1, 2).flatten(1, 2)
        return torch.cat([pixel, colour + self.colours.repeat(self.size**2, 1)], -1)


class PixelLayer(nn.Module):
    """Causal self-attention and feed-forward, each on normalised states and added."""

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
    """p(image) as the product of p(channel | all channels before it).

    Encodings of attention see a grid with the channels as columns, (size, 3 size).
    """

    def __init__(self, config: PixelModelConfig, size: int) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ConfigError(
                f"model.heads {config.heads} do not divide model.width {config.width}"
            )
        self.size = size
        self.embedding = nn.Embedding(LEVELS + 1, config.width)
        self.places = PixelPlaces(config, size)
        self.layers = nn.ModuleList(_layer(config, size) for _ in range(config.layers))
        self.streams = 2 if config.layer == "reformer" else 1
        self.norm = nn.LayerNorm(self.streams * config.width)
        self.head = nn.Linear(self.streams * config.width, LEVELS)
        # Between learned positions, which start at 0.02, and sinusoids, which are near 1.
        nn.init.normal_(self.embedding.weight, std=0.1)
        # So that all levels are about equally likely: an untrained model needs 8 bits a channel.
        nn.init.normal_(self.head.weight, std=0.02 / config.width**0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, values: Tensor) -> Tensor:
        """Return logits (B, size, size, 3, 256) of every channel given all before it.

        Args:
            values: (B, size, size, 3) int64, 0 to 255.
        """
        shape = (self.size, self.size, CHANNELS)
        if tuple(values.shape[1:]) != shape:
            raise ValueError(f"images are (B, {shape}), not {tuple(values.shape)}")
        # The input at a position is the previous value, with the place of the value to predict.
        before = functional.pad(values.flatten(1)[:, :-1], (1, 0), value=START)
        x = self.places(self.embedding(before)).repeat(1, 1, self.streams)
        context = sequence_context(self.size)
        for layer in self.layers:
            x = layer(x, context)
        return self.head(self.norm(x)).unflatten(1, shape)

    def nats(self, values: Tensor) -> Tensor:
        """Return -ln p of every channel: (B, size, size, 3), float32; an image's is the sum."""
        logits = self(values).float()
        return functional.cross_entropy(logits.movedim(-1, 1), values, reduction="none")


def _layer(config: PixelModelConfig, size: int) -> nn.Module:
    """Create a layer of the configured kind."""
    if config.layer == "transformer":
        if config.head_width is not None:
            raise ConfigError("model.head_width is of layer reformer; leave it null")
        return PixelLayer(config, size)
    for position in config.positions:
        if not on_tokens(position):
            raise ConfigError(
                f"model.layer reformer has no place for {position.name}, which acts in attention; "
                "choose encodings of tokens, or layer transformer"
            )
    head_width = config.head_width or config.width // config.heads
    return ReformerLayer(config.width, config.heads, head_width, config.feed_forward)


def sequence_context(size: int) -> PositionContext:
    """Return the tokens of an image as a grid, each channel a column of its own."""
    return PositionContext(grid=(size, CHANNELS * size))
