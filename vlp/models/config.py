"""Sizes of the three encoders; the defaults are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vlp.config import Config, ConfigError
from vlp.data.config import ChannelDeviations, ChannelMeans
from vlp.data.image.transforms import MEAN, RGB, STD
from vlp.layers.pooling import Pooling, pooled_width
from vlp.models.cross_config import Count, CrossConfig, Dropout
from vlp.positions.position_config import PositionConfig

Trainable = Literal["all"] | Annotated[int, Field(ge=0)]


class LoRAConfig(Config):
    """Low-rank adaptation of a tower's linear layers (LoRA, Hu et al. 2021) by peft.

    Model folders hold the merged weights and need no peft.
    """

    rank: int = Field(8, ge=1, description="columns of the low-rank matrices")
    alpha: float = Field(16, gt=0, description="their product is multiplied by alpha / rank")
    targets: tuple[str, ...] = Field(
        ("query", "value", "qkv", "q_proj", "v_proj", "q_lin", "v_lin", "attn.q", "attn.v", "Wqkv"),
        min_length=1,
        description="ends of names of linear layers; by default queries and values of ViT and BERT",
    )


class TextConfig(Config):
    """BERT embeddings and the first `layers` post-norm layers, or a tower; widths in channels.

    With `architecture` the tower has layers, heads, intermediate and positions of its own, and the
    keys of these say nothing.
    """

    architecture: Mapping[str, Any] | str | None = Field(
        None,
        description="a BERT-like tower of transformers: a mapping as of its config.json, with "
        "model_type, or the folder or hub name whose config.json is read when the model is made; "
        "null: the BERT of the keys below, which loads BERT and MiniLM exactly",
    )

    vocab_size: int = Field(30522, ge=8, description="word pieces of the vocabulary")
    width: int = Field(768, ge=1, description="channels of a token")
    layers: int = Field(6, ge=0, description="number of layers")
    heads: Count = Field(12, description="attention heads of every layer; a divisor of the width")
    intermediate: int = Field(
        3072, ge=1, description="channels between both layers of a feed-forward block"
    )
    max_positions: int = Field(
        512, ge=3, description="rows of the table of learned positions, at least max_tokens"
    )
    max_tokens: int = Field(30, ge=3, description="tokens of a padded caption, [CLS] and [SEP] in")
    dropout: Dropout = Field(
        0,
        description="share of embeddings and of each sublayer's output that is set to 0 in "
        "training; a tower of architecture has its own",
    )
    length_groups: int = Field(
        1,
        ge=1,
        description="groups of similar length that a batch of texts is encoded in, each without "
        "its padding: half the work of short captions on a CPU, a synchronisation each on a GPU",
    )
    position_sines: float = Field(
        0,
        ge=0,
        description="strength of the sines that learned positions start as, in words' strengths; "
        "0: small and random, as BERT's; with public weights it says nothing",
    )
    weights: str | None = Field(
        None,
        description="folder, file or hub name of a public BERT, or with architecture of that model",
        json_schema_extra={"resume": "tolerated"},
    )
    pooling: Pooling = Field(
        "cls",
        description="what the contrastive projection reads: [CLS], the mean of the tokens, or both "
        "side by side",
    )
    trainable: Trainable = Field(
        "all",
        description="number of the last layers that are trained, 0: the text encoder is frozen; "
        "with a number embeddings are frozen, too",
    )
    lora: LoRAConfig | None = Field(
        None, description="low-rank matrices that are trained in place of the encoder's weights"
    )

    @model_validator(mode="after")
    def _room_for_tokens(self) -> TextConfig:
        if self.max_tokens > self.max_positions:
            raise ValueError(
                f"max_tokens {self.max_tokens} is more than max_positions {self.max_positions}"
            )
        if self.position_sines and self.width % 2:
            raise ValueError(f"width {self.width} is odd, and positions start as sines in pairs")
        return self


class ImageConfig(Config):
    """A pre-norm vision transformer, or a tower from outside; sizes in pixels and channels.

    With `architecture` the tower has layers, heads, intermediate and positions of its own, and the
    keys of these say nothing.
    """

    architecture: str | None = Field(
        None,
        description="timm's name of a ViT-like tower (ViT, DeiT, EVA, BEiT, with registers or "
        "without [CLS]), such as vit_small_patch14_dinov2; null: the ViT of the keys below",
    )
    architecture_options: Mapping[str, Any] = Field(
        {}, description="further arguments of timm.create_model, such as {drop_path_rate: 0.1}"
    )
    image_size: int = Field(
        384, ge=1, description="side of the square input image in pixels, a multiple of patch_size"
    )
    patch_size: int = Field(16, ge=1, description="side of a square patch in pixels")
    pool: int = Field(
        1,
        ge=1,
        description="side of the squares of patches that are averaged before they leave the "
        "encoder, so that the cross-modal encoder sees fewer; a divisor of the grid's side",
    )
    average_hflip: bool = Field(
        False,
        description="in evaluation, average the encoder's states of an image and of its "
        "horizontal flip, flipped back: twice the work; a student in training sees single images",
    )
    mean: ChannelMeans | None = Field(
        None,
        description="of pixel values in [0, 1], by channel; null: the tower's, 0.5 without one",
    )
    std: ChannelDeviations | None = Field(None, description="deviation of pixel values, as mean")
    width: int = Field(
        768,
        ge=1,
        description="channels of a token; a tower of another width gets a linear layer to it",
    )
    layers: int = Field(6, ge=0, description="number of layers")
    heads: Count = Field(12, description="attention heads of every layer; a divisor of the width")
    intermediate: int = Field(
        3072, ge=1, description="channels between both layers of a feed-forward block"
    )
    position: Literal["learned", "none"] = Field(
        "learned",
        description="with none, what is where is left to the cross-modal encoder",
    )
    positions: tuple[PositionConfig, ...] = Field(
        (),
        description="encodings attached to the tower; trained where its blocks are, and with lora",
    )
    position_sines: float = Field(
        0,
        ge=0,
        description="amplitude of the 2D sines that learned positions start as; 0: small and "
        "random, as ViT's; with public weights it says nothing",
    )
    weights: str | None = Field(
        None,
        description="timm model name, a folder or hub name of timm's or transformers' form, or a "
        ".pth/.safetensors file",
        json_schema_extra={"resume": "tolerated"},
    )
    pooling: Pooling = Field(
        "cls",
        description="what the contrastive projection reads: [CLS], the mean of the patches, or "
        "both side by side",
    )
    pooled_layers: Count = Field(
        1,
        description="last blocks of the tower that the contrastive projection reads, each pooled "
        "and normalised as the last (DINOv2's linear evaluation takes 4)",
    )
    trainable: Trainable = Field(
        "all",
        description="number of the last blocks that are trained, 0: the tower is frozen; "
        "with a number embeddings are frozen, too",
    )
    lora: LoRAConfig | None = Field(
        None, description="low-rank matrices that are trained in place of the tower's weights"
    )

    @model_validator(mode="after")
    def _possible(self) -> ImageConfig:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )
        if self.tower_grid[0] % self.pool:
            raise ValueError(f"pool {self.pool} does not divide the {self.tower_grid[0]} patches")
        if self.architecture_options and not self.architecture:
            raise ValueError("architecture_options are of a tower; name it in architecture")
        if self.pooled_layers > 1 and not self.architecture:
            raise ValueError("pooled_layers are of a tower; name it in architecture")
        if self.position_sines and self.width % 4:
            raise ValueError(f"width {self.width} is not a multiple of 4, as 2D sines need")
        return self

    @property
    def tower_grid(self) -> tuple[int, int]:
        """Patches (rows, columns) of the tower."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def grid(self) -> tuple[int, int]:
        """Patches (rows, columns) that leave the encoder: the tower's, pooled."""
        side = self.tower_grid[0] // self.pool
        return side, side

    @property
    def summary_tokens(self) -> int:
        """Pooled states of blocks before the last, which the tower appends to its tokens."""
        return (self.pooled_layers - 1) * pooled_width(self.pooling, 1)

    @property
    def _timm_weights(self) -> str | None:
        """Return the name of the weights where timm knows it, and so how their images looked."""
        if self.weights is None or "/" in self.weights:
            return None
        from timm.models import is_model

        return self.weights if is_model(self.weights) else None

    @property
    def statistics(self) -> tuple[RGB, RGB]:
        """Mean and deviation of pixel values that images are normalised by.

        Raises:
            ConfigError: timm does not know the tower.
        """
        mean: tuple[float, ...] = MEAN
        std: tuple[float, ...] = STD
        if tower := self.architecture or self._timm_weights:
            from timm.models import get_pretrained_cfg

            try:
                known = get_pretrained_cfg(tower)
            except RuntimeError as error:
                raise ConfigError(f"image.architecture: {error}") from error
            mean, std = (known.mean, known.std) if known else (mean, std)
        (red, green, blue), (red_std, green_std, blue_std) = self.mean or mean, self.std or std
        return (red, green, blue), (red_std, green_std, blue_std)


class ModelConfig(Config):
    """The whole VLP model; `embed_dim` is the width of the shared contrastive space."""

    text: TextConfig = Field(TextConfig(), description="text encoder")
    image: ImageConfig = Field(ImageConfig(), description="image encoder")
    cross: CrossConfig = Field(CrossConfig(), description="cross-modal encoder")
    embed_dim: int = Field(
        256, ge=1, description="channels of the contrastive space that text and image share"
    )
    temperature: float = Field(
        0.07,
        ge=0.01,
        le=1,
        description="start of the learned temperature; that of the folder wins with init_from",
    )
    feature_dropout: Dropout = Field(
        0,
        description="share of the channels of an image's contrastive feature that is set to 0 in "
        "training; it keeps frozen towers' projections from overfitting few images",
    )
    token_projection: bool = Field(
        True, description="separate bias-free 256-d projections of tokens; they also feed S (Eq. 3)"
    )

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        for name, part in (("text", self.text), ("image", self.image)):
            if part.lora and part.trainable != "all":
                raise ValueError(
                    f"{name}.lora freezes the tower's own weights; leave {name}.trainable at all"
                )
            if part.architecture is None and part.width % part.heads:
                raise ValueError(f"{name}.width {part.width} is not a multiple of its heads")
            if part.pooling == "cls+mean" and not self.token_projection:
                raise ValueError(
                    f"{name}.pooling cls+mean needs token_projection: its projection reads two "
                    "states, a token is one"
                )
        if self.image.pooled_layers > 1 and not self.token_projection:
            raise ValueError(
                "image.pooled_layers needs token_projection: its projection reads several states, "
                "a token is one"
            )
        if self.text.width != self.image.width:
            raise ValueError(
                "the cross-modal encoder needs text.width equal to image.width, not "
                f"{self.text.width} and {self.image.width}"
            )
        if self.text.width % self.cross.heads:
            raise ValueError(f"width {self.text.width} is not a multiple of cross.heads")
        anchor = self.cross.anchor
        name, channels = (
            ("embed_dim", self.embed_dim)
            if anchor.features == "projected"
            else ("text.width", self.text.width)
        )
        if channels % anchor.groups:
            raise ValueError(
                f"cross.anchor.groups {anchor.groups} does not divide {name} {channels}"
            )
        return self
