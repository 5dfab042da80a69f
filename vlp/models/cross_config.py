"""The cross-modal encoder's sizes and ACE-RPE's settings; the defaults are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vlp.config import Config
from vlp.layers.pooling import Pooling
from vlp.positions import CROSS_MODAL, acts_on_tokens, list_positions
from vlp.positions.anchor_field import Unreachable
from vlp.positions.options import nearest
from vlp.positions.registry import BUILT_IN
from vlp.positions.windows import patch_reach, text_reach

Count = Annotated[int, Field(ge=1)]
Role = Literal["query", "key", "value"]
Dropout = Annotated[float, Field(ge=0, lt=1)]
SHORTHANDS = ("ape", "rpe")
SOFT = "anchor-soft"
HARD_TAU, SOFT_TAU = 1e4, 5.0
"""Tau of Eq. 4: as the paper prints it, and with which soft anchors do better on photographs."""


class AnchorConfig(Config):
    """ACE-RPE (paper section 3.2). `threshold` null means the running quantile."""

    groups: int = Field(8, ge=1, description="G channel groups of Eq. 3")
    threshold: float | None = Field(None, gt=0, description="delta of Eq. 4")
    quantile: float = Field(
        0.9, gt=0, lt=1, description="quantile of the similarities S that is the running threshold"
    )
    quantile_momentum: float = Field(
        0.99, ge=0, lt=1, description="momentum of the running quantile; 0 takes each batch's own"
    )
    hard: bool = Field(True, description="only anchors are passed through (papers.md#ace-a8)")
    tau: float = Field(
        HARD_TAU,
        gt=0,
        description="tau of Eq. 4, for the soft form; with 1e4, as printed, paths reach 1e20 and "
        "gradients are not finite: 5 can be trained",
    )
    unreachable: Unreachable = Field(
        "zero",
        description="path of a word to a patch without an anchor in reach, of hard anchors: 0, or "
        "far, as long as a path can be at most (papers.md#ace-a15)",
    )
    text_window: Count | None = Field(5, description="B_t, an odd number of tokens; null: all")
    patch_window: Count | None = Field(9, description="B_p, an odd square of patches; null: all")
    metric: Literal["euclidean", "manhattan", "chebyshev"] = Field(
        "euclidean", description="distance between patches in the grid"
    )
    features: Literal["projected", "encoder"] = Field(
        "projected", description="what enters Eq. 3: token projections, or the encoders' states"
    )
    mode: Literal["contextual", "bias"] = Field(
        "contextual",
        description="contextual: embeddings enter queries, keys and values (Eqs 10-12); bias: a "
        "bias on attention logits (Eq. 9)",
    )
    roles: tuple[Role, ...] = Field(
        ("query", "key", "value"), description="which carry the position in contextual mode"
    )
    shared_heads: bool = Field(False, description="one embedding for all heads (Table 6)")
    scale: float = Field(1.0, gt=0, description="factor of the path before it is embedded")
    value_pooled: bool = Field(
        True, description="values carry the mean embedding, too, as Eq. 12 does (papers.md#ace-a22)"
    )
    path_gradient: bool = Field(
        False, description="pass gradients through paths to the tokens they come from"
    )

    @model_validator(mode="after")
    def _possible(self) -> AnchorConfig:
        text_reach(self.text_window)
        patch_reach(self.patch_window)
        if self.unreachable == "far" and not self.hard:
            raise ValueError("unreachable: far is of hard anchors; soft ones reach every patch")
        if not self.roles or len(set(self.roles)) < len(self.roles):
            raise ValueError(f"roles must name query, key, value once each, not {self.roles}")
        return self


class CrossConfig(Config):
    """Post-norm layers of self-attention, cross-attention and feed-forward.

    `position` lists the encodings, none or several (paper, Tables 1 and 2): `anchor` is ACE-RPE,
    `anchor-soft` the same with soft anchors (`anchor: {hard: false, tau: 5}`, which are stored in
    its place), `uniform` its baseline with all paths 1, `alignment` leads words to the patches they
    resemble (beyond the paper), `ape` a learned position for every token of either stream, `rpe`
    contextual iRPE-product on queries and keys in the self-attention of each stream.
    Every other name of `vlp.positions.list_positions()` acts on each stream by itself, with
    `options` of its own: on the tokens before the first layer, or in the self-attention of every
    layer. A text is a grid of one row.
    """

    layers: Count = Field(6, description="number of layers")
    heads: Count = Field(12, description="attention heads of every layer; a divisor of the width")
    intermediate: int = Field(
        3072, ge=1, description="channels between both layers of a feed-forward block"
    )
    layout: Literal["ace", "text", "albef"] = Field(
        "ace",
        description="ace: text and image attend to each other, with shared weights; text: only "
        "text attends to image; albef: as text, with an output projection in cross-attention",
    )
    position: tuple[str, ...] = Field(
        ("anchor",), description="names of encodings, none or several"
    )
    options: Mapping[str, Mapping[str, Any]] = Field(
        {}, description="of encodings by name, such as rope-axial: {theta: 10}"
    )
    anchor: AnchorConfig = Field(AnchorConfig(), description="ACE-RPE's settings")
    pooling: Pooling = Field(
        "cls",
        description="what the match score reads of the last layer's text stream: [CLS], the mean "
        "of the tokens, or both. [CLS] is no word and has no path, so with cls the last layer's "
        "paths of words do not reach the score",
    )
    token_score: float = Field(
        0,
        ge=0,
        description="start of a learned factor with which the mean over words of the best patch's "
        "cosine enters the match score; 0: it does not",
    )
    dropout: Dropout = Field(
        0, description="share of each sublayer's output that is set to 0 in training"
    )
    weights: str | None = Field(
        None,
        description="folder, file or hub name of a public BERT whose last layers the cross-modal "
        "encoder starts from; null: from the layers that follow the text encoder's in "
        "text.weights, if there are any",
        json_schema_extra={"resume": "tolerated"},
    )

    @property
    def reads_padding(self) -> bool:
        """Return whether an encoding may count padding, or is bound to a length.

        Those of streams may, and those of one's own.
        """
        return not {*self.position} <= {*BUILT_IN, *SHORTHANDS}

    @model_validator(mode="before")
    @classmethod
    def _soft(cls, values: Any) -> Any:
        """Write `anchor-soft` as `anchor` with its settings; another tau than the default stays."""
        position = values.get("position") if isinstance(values, Mapping) else None
        if not isinstance(position, list | tuple) or SOFT not in position:
            return values
        given = values.get("anchor", {})
        given = given.model_dump() if isinstance(given, AnchorConfig) else given
        if not isinstance(given, Mapping):
            return values
        tau = given.get("tau", HARD_TAU)
        anchor = {**given, "hard": False, "tau": SOFT_TAU if tau == HARD_TAU else tau}
        names = ["anchor" if name == SOFT else name for name in position]
        return {**values, "position": names, "anchor": anchor}

    @model_validator(mode="after")
    def _possible(self) -> CrossConfig:
        if self.token_score and self.anchor.features == "encoder":
            raise ValueError("token_score reads projected tokens: set anchor.features=projected")
        if len(set(self.position)) < len(self.position):
            raise ValueError(f"position names an encoding twice: {', '.join(self.position)}")
        for name in ("anchor", "alignment"):
            if {name, "uniform"} <= set(self.position):
                raise ValueError(f"position: `{name}` and `uniform` exclude each other")
        known = (*SHORTHANDS, SOFT, *list_positions())
        if unknown := [name for name in self.position if name not in known]:
            near = nearest(unknown[0], known) or f"; there are {', '.join(known)}"
            raise ValueError(f"position {unknown[0]!r} is unknown{near}")
        own = [name for name in self.position if name not in (*SHORTHANDS, *CROSS_MODAL)]
        takes = set(self.position) - {*SHORTHANDS, "anchor", "uniform"}
        if unused := sorted(set(self.options) - takes):
            raise ValueError(f"options of {', '.join(unused)}, which position does not list")
        for name in self.position:
            in_attention = name == "rpe" or (name in own and not acts_on_tokens(name))
            if in_attention and self.layout != "ace":
                raise ValueError(
                    f"position `{name}` needs layout `ace`; in `{self.layout}` patches have no "
                    "self-attention that could carry it"
                )
        return self
