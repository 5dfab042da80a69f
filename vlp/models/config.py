"""Sizes of the three encoders and of ACE-RPE; the defaults are the paper's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vlp.config import Config

Role = Literal["query", "key", "value"]


class TextConfig(Config):
    """BERT embeddings and the first `layers` post-norm layers; widths in channels."""

    vocab_size: int = Field(30522, ge=8)
    width: int = 768
    layers: int = 6
    heads: int = 12
    intermediate: int = 3072
    max_positions: int = 512
    max_tokens: int = Field(30, ge=3, description="tokens of a padded caption, [CLS] and [SEP] in")
    weights: str | None = Field(None, description="folder or hub name of a public BERT")

    @model_validator(mode="after")
    def _room_for_tokens(self) -> TextConfig:
        if self.max_tokens > self.max_positions:
            raise ValueError(
                f"max_tokens {self.max_tokens} is more than max_positions {self.max_positions}"
            )
        return self


class ImageConfig(Config):
    """A pre-norm vision transformer; sizes in pixels and channels."""

    image_size: int = 384
    patch_size: int = 16
    width: int = 768
    layers: int = 6
    heads: int = 12
    intermediate: int = 3072
    weights: str | None = Field(None, description="timm model name, or a .pth/.safetensors file")

    @model_validator(mode="after")
    def _whole_patches(self) -> ImageConfig:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )
        return self

    @property
    def grid(self) -> tuple[int, int]:
        """Patches (rows, columns)."""
        side = self.image_size // self.patch_size
        return side, side


class AnchorConfig(Config):
    """ACE-RPE (paper section 3.2). `threshold` null means the running quantile."""

    groups: int = Field(8, ge=1)
    threshold: float | None = Field(None, gt=0)
    quantile: float = Field(0.9, gt=0, lt=1)
    quantile_momentum: float = Field(0.99, ge=0, lt=1)
    text_window: int | None = 5
    patch_window: int | None = 9
    metric: Literal["euclidean", "manhattan", "chebyshev"] = "euclidean"
    roles: tuple[Role, ...] = ("query", "key", "value")
    mode: Literal["contextual", "bias"] = "contextual"
    path_gradient: bool = False


class CrossConfig(Config):
    """Post-norm layers of self-attention, cross-attention and feed-forward."""

    layers: int = 6
    heads: int = 12
    intermediate: int = 3072
    layout: Literal["ace", "text", "albef"] = "ace"
    position: Literal["anchor", "uniform", "none"] = "anchor"
    anchor: AnchorConfig = AnchorConfig()


class ModelConfig(Config):
    """The whole VLP model; `embed_dim` is the width of the shared contrastive space."""

    text: TextConfig = TextConfig()
    image: ImageConfig = ImageConfig()
    cross: CrossConfig = CrossConfig()
    embed_dim: int = 256
    temperature: float = Field(0.07, gt=0, description="start of the learned temperature")
    token_projection: bool = Field(
        True, description="separate bias-free 256-d projections of tokens; they also feed S (Eq. 3)"
    )

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        for name, part in (("text", self.text), ("image", self.image)):
            if part.width % part.heads:
                raise ValueError(f"{name}.width {part.width} is not a multiple of its heads")
        if self.text.width != self.image.width:
            raise ValueError(
                "the cross-modal encoder needs text.width equal to image.width, not "
                f"{self.text.width} and {self.image.width}"
            )
        if self.text.width % self.cross.heads:
            raise ValueError(f"width {self.text.width} is not a multiple of cross.heads")
        if self.embed_dim % self.cross.anchor.groups:
            raise ValueError(
                f"cross.anchor.groups {self.cross.anchor.groups} does not divide embed_dim "
                f"{self.embed_dim}"
            )
        return self
