"""Configuration of the three encoders; the defaults are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from vlp.config import Config, ConfigError
from vlp.data.config import ChannelDeviations, ChannelMeans
from vlp.data.image.transforms import MEAN, RGB, STD
from vlp.layers.blocks import Pooling, pooled_width
from vlp.positions import CROSS_MODAL, acts_on_tokens, list_positions
from vlp.positions.anchor import patch_window_reach, text_window_reach
from vlp.positions.anchor_field import Unreachable
from vlp.positions.options import suggestion
from vlp.positions.registry import BUILT_IN

Count = Annotated[int, Field(ge=1)]
Heads = Annotated[
    int, Field(ge=1, description="attention heads of every layer; a divisor of the width")
]
Intermediate = Annotated[
    int, Field(ge=1, description="channels between both layers of a feed-forward block")
]
Role = Literal["query", "key", "value"]
Dropout = Annotated[float, Field(ge=0, lt=1)]
# Names in `cross.position` that stand for an encoding with options, in both streams.
SHORTHANDS = ("ape", "rpe")
SOFT_ANCHOR = "anchor-soft"
# Tau of Eq. 4 with which soft anchors outperform hard anchors on photographs.
SOFT_TAU = 5.0


class AnchorConfig(Config):
    """Size of ACE-RPE's tables; all other settings are in `options.anchor`."""

    groups: int = Field(8, ge=1, description="G channel groups of Eq. 3")


class AnchorOptions(Config):
    """ACE-RPE (paper section 3.2): options of the encodings `anchor`, `uniform` and `alignment`."""

    threshold: float | None = Field(
        None, gt=0, description="delta of Eq. 4; null: the running quantile"
    )
    quantile: float = Field(
        0.9, gt=0, lt=1, description="quantile of the similarities S for the running threshold"
    )
    quantile_momentum: float = Field(
        0.99, ge=0, lt=1, description="momentum of the running quantile; 0: each batch's quantile"
    )
    tau: float | None = Field(
        None,
        gt=0,
        description="tau of Eq. 4, for soft anchors, such as 5; null: hard anchors, the limit of a "
        "large tau (papers.md#ace-a8). With 1e4, as printed, paths reach 1e20 and gradients are "
        "not finite",
    )
    text_window: Count | None = Field(5, description="B_t, an odd number of tokens; null: all")
    patch_window: Count | None = Field(9, description="B_p, an odd square of patches; null: all")
    path_gradient: bool = Field(
        False, description="pass gradients through paths to the image and text tokens"
    )
    mode: Literal["contextual", "bias"] = Field(
        "contextual",
        description="contextual: embeddings enter queries, keys and values (Eqs 10-12); bias: a "
        "bias on attention logits (Eq. 9)",
    )
    roles: tuple[Role, ...] = Field(
        ("query", "key", "value"), description="projections that get embeddings (contextual mode)"
    )
    shared_heads: bool = Field(False, description="one embedding for all heads (Table 6)")
    scale: float = Field(1.0, gt=0, description="factor of the path before it is embedded")
    metric: Literal["euclidean", "manhattan", "chebyshev"] = Field(
        "euclidean", description="distance between patches in the grid"
    )
    features: Literal["projected", "encoder"] = Field(
        "projected", description="inputs of Eq. 3: token projections, or the encoders' states"
    )
    unreachable: Unreachable = Field(
        "zero",
        description="path between a word and a patch without an anchor in reach, if anchors are "
        "hard: zero, or far, the longest possible path (papers.md#ace-a15)",
    )

    @model_validator(mode="after")
    def _require_consistent(self) -> AnchorOptions:
        text_window_reach(self.text_window)
        patch_window_reach(self.patch_window)
        if self.unreachable == "far" and self.tau is not None:
            raise ValueError(
                "unreachable: far needs hard anchors (tau: null), as soft anchors reach every patch"
            )
        if not self.roles or len(set(self.roles)) < len(self.roles):
            raise ValueError(f"roles must name query, key, value once each, not {self.roles}")
        return self


class CrossConfig(Config):
    """Cross-modal encoder of post-norm layers: self-attention, cross-attention, feed-forward block.

    `position` lists encodings of the cross-attention or of each stream (paper, Tables 1 and 2):

    - `anchor`: ACE-RPE. `anchor-soft`: the same with soft anchors, stored as
      `options.anchor.tau: 5`. `uniform`: its baseline, in which all paths are 1.
    - `alignment`: a bias of the cross-attention towards similar patches (not from the paper).
    - `ape`: learned positions, added to the tokens of both streams.
    - `rpe`: contextual iRPE-product on queries and keys in the self-attention of both streams.
    - Other names of `vlp.positions.list_positions()` act on each stream alone; a text is a grid of
      one row.
    """

    layers: Count = Field(6, description="number of layers")
    heads: Heads = 12
    intermediate: Intermediate = 3072
    layout: Literal["ace", "text", "albef"] = Field(
        "ace",
        description="ace: text and image attend to each other, with shared weights; text: only "
        "text attends to image; albef: as text, with an output projection in cross-attention",
    )
    position: tuple[str, ...] = Field(
        ("anchor",), description="names of encodings, none or several"
    )
    options: Mapping[str, Mapping[str, Any]] = Field(
        {},
        description="options of encodings by name, such as rope-axial: {theta: 10}; `uniform` and "
        "`alignment` read the options of `anchor`",
    )
    anchor: AnchorConfig = Field(AnchorConfig(), description="size of ACE-RPE's tables")
    pooling: Pooling = Field(
        "cls",
        description="input of the match score from the last layer's text stream: [CLS], the mean "
        "of the tokens, or both. [CLS] has no path, so with cls the last layer's paths of words do "
        "not reach the score",
    )
    token_score: float = Field(
        0,
        ge=0,
        description="initial factor, learned, of the mean over words of the best patch's cosine, "
        "which is added to the match score; 0: not added",
    )
    dropout: Dropout = Field(0, description="dropout of each sublayer's output")
    weights: str | None = Field(
        None,
        description="folder, file or hub name of a public BERT whose last layers initialise the "
        "cross-modal encoder; null: the layers of text.weights after those of the text encoder, if "
        "any",
        json_schema_extra={"resume": "tolerated"},
    )

    @property
    def anchor_options(self) -> AnchorOptions:
        """Return `options.anchor`, validated."""
        return AnchorOptions.model_validate(self.options.get("anchor", {}))

    @property
    def has_paths(self) -> bool:
        """Return whether an encoding acts on pairs of patch and token."""
        return any(name in CROSS_MODAL for name in self.position)

    @property
    def reads_padding(self) -> bool:
        """Return whether an encoding may depend on padding or on the padded length."""
        # Encodings of other packages may.
        return not {*self.position} <= {*BUILT_IN, *SHORTHANDS}

    @model_validator(mode="before")
    @classmethod
    def _replace_soft_anchor(cls, values: Any) -> Any:
        """Replace `anchor-soft` by `anchor` and the option tau, unless tau is configured."""
        # Values of a wrong type are left to the field's validation.
        position = values.get("position") if isinstance(values, Mapping) else None
        if not isinstance(position, list | tuple) or SOFT_ANCHOR not in position:
            return values
        options = values.get("options", {})
        anchor = options.get("anchor", {}) if isinstance(options, Mapping) else None
        if not isinstance(anchor, Mapping):
            return values
        soft_anchor = {**anchor, "tau": anchor.get("tau") or SOFT_TAU}
        names = ["anchor" if name == SOFT_ANCHOR else name for name in position]
        return {**values, "position": names, "options": {**options, "anchor": soft_anchor}}

    @model_validator(mode="after")
    def _require_consistent(self) -> CrossConfig:
        try:
            anchor = self.anchor_options
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(["options", "anchor", *map(str, first["loc"])])
            message = first["msg"].removeprefix("Value error, ")
            if first["type"] == "extra_forbidden":
                options = tuple(AnchorOptions.model_fields)
                hint = suggestion(str(first["loc"][0]), options)
                message = f"unknown option{hint or '; choose among ' + ', '.join(options)}"
            raise ValueError(f"{key}: {message}") from error
        if self.token_score and anchor.features == "encoder":
            raise ValueError(
                "token_score reads projected tokens: set options.anchor.features=projected"
            )
        if len(set(self.position)) < len(self.position):
            raise ValueError(f"position names an encoding twice: {', '.join(self.position)}")
        for name in ("anchor", "alignment"):
            if {name, "uniform"} <= set(self.position):
                raise ValueError(f"position: `{name}` and `uniform` exclude each other")
        available = (*SHORTHANDS, SOFT_ANCHOR, *CROSS_MODAL)
        # `list_positions` imports plugins, which may import this module: only for other names.
        if not set(self.position) <= set(available):
            available = (*SHORTHANDS, SOFT_ANCHOR, *list_positions())
        if unknown := [name for name in self.position if name not in available]:
            hint = suggestion(unknown[0], available) or f"; choose among {', '.join(available)}"
            raise ValueError(f"position {unknown[0]!r} is unknown{hint}")
        # A variant without anchors may inherit their options.
        configurable = {*self.position, "anchor"} - {*SHORTHANDS, "uniform"}
        if unused := sorted(set(self.options) - configurable):
            raise ValueError(f"options of {', '.join(unused)}, which position does not list")
        for name in self.position:
            in_stream = name not in (*SHORTHANDS, *CROSS_MODAL)
            in_attention = name == "rpe" or (in_stream and not acts_on_tokens(name))
            if in_attention and self.layout != "ace":
                raise ValueError(
                    f"position `{name}` needs layout `ace`: in `{self.layout}` patches have no "
                    "self-attention"
                )
        return self


Trainable = (
    Literal["all"]
    | Annotated[int, Field(ge=0)]
    | Annotated[str, Field(pattern="^lora-[1-9][0-9]*$")]
)


def lora_rank(trainable: Trainable) -> int | None:
    """Return RANK of `trainable: lora-RANK`; None for other values."""
    return int(str(trainable).removeprefix("lora-")) if str(trainable).startswith("lora-") else None


class TextConfig(Config):
    """BERT embeddings and the first `layers` post-norm layers, or a tower; widths in channels.

    With `architecture`, the keys of layers, heads, intermediate and positions have no effect.
    """

    architecture: Mapping[str, Any] | str | None = Field(
        None,
        description="BERT-like tower of transformers: the content of its config.json, with "
        "model_type, or the folder or hub name of a config.json, which is read when the model is "
        "created; null: a BERT with the sizes below, which loads BERT and MiniLM exactly",
    )
    vocab_size: int = Field(30522, ge=8, description="word pieces of the vocabulary")
    width: int = Field(768, ge=1, description="channels of a token")
    layers: int = Field(6, ge=0, description="number of layers")
    heads: Heads = 12
    intermediate: Intermediate = 3072
    max_positions: int = Field(
        512, ge=3, description="rows of the table of learned positions, at least max_tokens"
    )
    max_tokens: int = Field(
        30, ge=3, description="tokens of a padded caption, with [CLS] and [SEP]"
    )
    dropout: Dropout = Field(
        0, description="dropout of embeddings and sublayers' outputs; no effect with architecture"
    )
    length_groups: int = Field(
        1,
        ge=1,
        description="number of groups of similar length in which a batch of texts is encoded "
        "without common padding: half the work for short captions on a CPU; no effect on a GPU",
    )
    position_sines: float = Field(
        0,
        ge=0,
        description="learned positions start as sinusoids of this root mean square, relative to "
        "word embeddings; 0: small and random, as BERT's; no effect with public weights",
    )
    weights: str | None = Field(
        None,
        description="folder, file or hub name of a public BERT, or of a model of `architecture`",
        json_schema_extra={"resume": "tolerated"},
    )
    pooling: Pooling = Field(
        "cls", description="input of the contrastive projection: [CLS], the mean token, or both"
    )
    trainable: Trainable = Field(
        "all",
        description="all; N: the last N layers, without embeddings (0: a frozen text encoder); or "
        "lora-RANK: low-rank matrices for frozen queries and values (Hu et al. 2021), merged in "
        "model folders",
    )

    @model_validator(mode="after")
    def _require_consistent(self) -> TextConfig:
        if self.max_tokens > self.max_positions:
            raise ValueError(
                f"max_tokens {self.max_tokens} is more than max_positions {self.max_positions}"
            )
        if self.position_sines and self.width % 2:
            raise ValueError(f"position_sines needs an even width, not {self.width}")
        return self


class ImageConfig(Config):
    """A pre-norm vision transformer, or a tower of timm; sizes in pixels and channels.

    With `architecture`, the keys layers, heads, intermediate and position have no effect.
    """

    architecture: Mapping[str, Any] | str | None = Field(
        None,
        description="timm's name of a ViT-like tower (ViT, DeiT, EVA, BEiT, with registers or "
        "without [CLS]), such as vit_small_patch14_dinov2, or a mapping with `name` and further "
        "arguments of timm.create_model; null: a ViT with the sizes below",
    )
    image_size: int = Field(
        384, ge=1, description="side of the square input image in pixels, a multiple of patch_size"
    )
    patch_size: int = Field(16, ge=1, description="side of a square patch in pixels")
    pool: int = Field(
        1,
        ge=1,
        description="average squares of this many patches a side after the tower, so that the "
        "cross-modal encoder gets fewer patches; a divisor of the grid's side",
    )
    average_hflip: bool = Field(
        False,
        description="in evaluation, average the encoder's states of an image and of its "
        "horizontal flip, flipped back: twice the work; no effect on a student in training",
    )
    normalisation: tuple[ChannelMeans, ChannelDeviations] | None = Field(
        None,
        description="means and standard deviations of pixel values in [0, 1], by channel; null: "
        "those of timm's tower or weights, else 0.5",
    )
    width: int = Field(
        768, ge=1, description="channels of a token; a tower of another width gets an adapter"
    )
    layers: int = Field(6, ge=0, description="number of layers")
    heads: Heads = 12
    intermediate: Intermediate = 3072
    position: Literal["learned", "none"] | Annotated[float, Field(gt=0)] = Field(
        "learned",
        description="learned: positions start small and random, as ViT's; a number: learned, "
        "starting as 2D sinusoids of this amplitude, unless weights are loaded; none: no positions",
    )
    positions: Mapping[str, Mapping[str, Any]] = Field(
        {},
        description="encodings attached to the tower: options by name, with `roles`, letters of q, "
        "k, v; trained with the blocks that hold them, and with lora",
    )
    weights: str | None = Field(
        None,
        description="timm model name, folder or hub name in timm's or transformers' format, or a "
        ".pth/.safetensors file",
        json_schema_extra={"resume": "tolerated"},
    )
    pooling: Pooling = Field(
        "cls", description="input of the contrastive projection: [CLS], the mean patch, or both"
    )
    pooled_layers: Count = Field(
        1,
        description="number of last blocks of the tower that the contrastive projection reads, "
        "each normalised and pooled (4 in DINOv2's linear evaluation)",
    )
    trainable: Trainable = Field(
        "all", description="all, the number of trained last blocks, or lora-RANK: text.trainable"
    )

    @model_validator(mode="before")
    @classmethod
    def _move_architecture_options(cls, values: Any) -> Any:
        """Move the key `architecture_options` into a mapping `architecture`."""
        if not isinstance(values, Mapping) or "architecture_options" not in values:
            return values
        others = {key: value for key, value in values.items() if key != "architecture_options"}
        options, tower_name = values["architecture_options"], values.get("architecture")
        if not options:
            return others
        if not isinstance(tower_name, str):
            raise ValueError("architecture_options: name the tower in architecture")
        return others | {"architecture": {"name": tower_name, **options}}

    @model_validator(mode="after")
    def _require_consistent(self) -> ImageConfig:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )
        if self.tower_grid[0] % self.pool:
            raise ValueError(f"pool {self.pool} does not divide the {self.tower_grid[0]} patches")
        if isinstance(self.architecture, Mapping) and "name" not in self.architecture:
            raise ValueError("architecture: a mapping needs the key `name`, timm's model name")
        if self.pooled_layers > 1 and not self.architecture:
            raise ValueError("pooled_layers above 1 needs a tower: name it in architecture")
        if not isinstance(self.position, str) and self.width % 4:
            raise ValueError(f"width {self.width} is not a multiple of 4, as 2D sinusoids need")
        return self

    @property
    def tower_name(self) -> str | None:
        """Return timm's name of the tower; None without `architecture`."""
        tower = self.architecture
        return str(tower["name"]) if isinstance(tower, Mapping) else tower

    @property
    def tower_grid(self) -> tuple[int, int]:
        """Return the tower's patches (rows, columns)."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def grid(self) -> tuple[int, int]:
        """Return the encoder's patches (rows, columns), which `pool` averages from the tower's."""
        side = self.tower_grid[0] // self.pool
        return side, side

    @property
    def summary_tokens(self) -> int:
        """Return the number of summary tokens that `ImageEncoder.tower` appends to its tokens."""
        return (self.pooled_layers - 1) * pooled_width(self.pooling, 1)

    @property
    def _timm_weights(self) -> str | None:
        """Return the name of `weights` if it is a model of timm, else None."""
        if self.weights is None or "/" in self.weights:
            return None
        from timm.models import is_model

        return self.weights if is_model(self.weights) else None

    @property
    def statistics(self) -> tuple[RGB, RGB]:
        """Return the mean and standard deviation that pixel values are normalised by."""
        tower = self.tower_name or self._timm_weights
        if self.normalisation is not None or tower is None:
            return self.normalisation or (MEAN, STD)
        from timm.models import get_pretrained_cfg

        try:
            pretrained_cfg = get_pretrained_cfg(tower)
        except RuntimeError as error:
            raise ConfigError(f"image.architecture: {error}") from error
        if pretrained_cfg is None:
            return MEAN, STD
        (red, green, blue), (*std,) = pretrained_cfg.mean, pretrained_cfg.std
        return (red, green, blue), (std[0], std[1], std[2])


class ModelConfig(Config):
    """The whole VLP model; `embed_dim` is the width of the contrastive space of both encoders."""

    text: TextConfig = Field(TextConfig(), description="text encoder")
    image: ImageConfig = Field(ImageConfig(), description="image encoder")
    cross: CrossConfig = Field(CrossConfig(), description="cross-modal encoder")
    embed_dim: int = Field(256, ge=1, description="channels of the contrastive space")
    temperature: float = Field(
        0.07, ge=0.01, le=1, description="initial learned temperature; no effect with init_from"
    )
    feature_dropout: Dropout = Field(
        0, description="dropout of images' contrastive features, for few images and frozen towers"
    )
    token_projection: bool = Field(
        True, description="separate bias-free projections of tokens, which S (Eq. 3) reads"
    )

    @model_validator(mode="after")
    def _require_consistent(self) -> ModelConfig:
        for name, part in (("text", self.text), ("image", self.image)):
            if part.architecture is None and part.width % part.heads:
                raise ValueError(f"{name}.width {part.width} is not a multiple of its heads")
            if part.pooling == "cls+mean" and not self.token_projection:
                raise ValueError(
                    f"{name}.pooling cls+mean needs token_projection, as its projection reads two "
                    "states and cannot project one token"
                )
        if self.image.pooled_layers > 1 and not self.token_projection:
            raise ValueError(
                "image.pooled_layers needs token_projection, as its projection reads several "
                "states and cannot project one token"
            )
        if self.text.width != self.image.width:
            raise ValueError(
                "the cross-modal encoder needs text.width equal to image.width, not "
                f"{self.text.width} and {self.image.width}"
            )
        if self.text.width % self.cross.heads:
            raise ValueError(f"width {self.text.width} is not a multiple of cross.heads")
        groups = self.cross.anchor.groups
        name, channels = (
            ("embed_dim", self.embed_dim)
            if self.cross.anchor_options.features == "projected"
            else ("text.width", self.text.width)
        )
        if channels % groups:
            raise ValueError(f"cross.anchor.groups {groups} does not divide {name} {channels}")
        return self
