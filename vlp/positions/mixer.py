"""PEmixer: learned weights of tokens and positions (ViTARC), and the base of token encodings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlp.positions.base import PositionContext, PositionEncoding


def mix(tokens: Tensor, positions: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """PEmixer: alpha * token + beta * position, channel by channel (ViTARC, papers.md#vitarc-v8).

    Args:
        tokens: (..., width).
        positions: (..., width), broadcasts against the tokens.
        alpha: (width,), weights of the token's channels.
        beta: (width,), weights of the position's channels.

    Returns:
        Shape of both broadcast, number type of the tokens; half precision is computed in float32.
    """
    kind = torch.promote_types(tokens.dtype, torch.float32)
    mixed = alpha.to(kind) * tokens.to(kind) + beta.to(kind) * positions.to(kind)
    return mixed.to(tokens.dtype)


class TokenEncoding(PositionEncoding):
    """Base of the encodings that act once, at the token embeddings.

    A subclass says in `places` which vector belongs to every token after the prefix. Prefix tokens
    get the zero vector. The vectors are added to the tokens or, with `mixer`, weighted: PEmixer
    learns two vectors of the model's width, which start at 1, where it is the plain addition
    (papers.md#vitarc-v8). It scales prefix tokens, too, as it does every other.

    Args:
        name: what error messages call the encoding.
        width: channels of the tokens.
        mixer: learn the weights `alpha` of the tokens and `beta` of the positions.
    """

    def __init__(self, name: str, width: int, mixer: bool = False) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"{name}: width {width} has no channels")
        self.name, self.width = name, width
        self.alpha = nn.Parameter(torch.ones(width)) if mixer else None
        self.beta = nn.Parameter(torch.ones(width)) if mixer else None

    def places(self, x: Tensor, context: PositionContext) -> Tensor:
        """Vectors of the tokens after the prefix: (B or 1, T - prefix, width).

        Of x (B, T, width) only the shape, the number type and the device count, not the content.
        """
        raise NotImplementedError

    def tokens(self, x: Tensor, context: PositionContext) -> Tensor:
        """Add or mix in the places: (B, T, width), same shape and number type."""
        if x.ndim != 3 or x.shape[-1] != self.width:
            raise ValueError(
                f"{self.name} is for tokens (batch, tokens, {self.width}), not {tuple(x.shape)}"
            )
        places = self.places(x, context)
        if places.shape[0] not in (1, x.shape[0]):
            raise ValueError(
                f"{self.name}: places of {places.shape[0]} images do not fit a batch of "
                f"{x.shape[0]}"
            )
        places = functional.pad(places, (0, 0, context.prefix_tokens, 0))
        if self.alpha is None or self.beta is None:
            return x + places.to(x.dtype)
        return mix(x, places, self.alpha, self.beta)
