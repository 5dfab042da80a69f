"""The cross-modal encoder: both streams through the same layers, with ACE-RPE between them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from vlp.layers.post_norm import CrossLayer
from vlp.models.config import CrossConfig
from vlp.positions import PositionContext, PositionEncoding, create_position
from vlp.positions.anchor_field import AnchorField


class Pairs(NamedTuple):
    """Which rows are paired: indices of texts and pictures, (B,) int64 each."""

    texts: Tensor
    pictures: Tensor


class CrossEncoder(nn.Module):
    """53,277,696 parameters at the paper's sizes in layout `ace` with tables for q, k and v.

    Layouts: `ace` runs both streams with one set of weights, text attends to image and image to
    text; `text` runs the text stream alone over the image encoder's states; `albef` does so with
    an output projection in the cross-attention, as ALBEF's fusion layers have.
    """

    def __init__(self, config: CrossConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            CrossLayer(
                width,
                config.heads,
                config.intermediate,
                cross_output=config.layout == "albef",
                positions=_positions(config, width),
            )
            for _ in range(config.layers)
        )

    def forward(
        self,
        text: Tensor,
        image: Tensor,
        text_mask: Tensor,
        anchors: AnchorField | None,
        pairs: Pairs | None = None,
        need_image: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Cross-modal states of pairs.

        The first self-attention of each stream knows nothing of the other side, so it runs once
        per text and once per picture, before they are paired.

        Args:
            text: (T, N, width).
            image: (I, 1 + M, width).
            text_mask: (T, N) bool, True = not padding.
            anchors: paths of the B pairs, where the configuration has ACE-RPE.
            pairs: which text and which picture each pair joins; None pairs them row by row.
            need_image: False skips what only the image output of the last layer needs.

        Returns:
            Text states (B, N, width) and image states (B, 1 + M, width) or None.
        """
        both = self.config.layout == "ace"
        text_asks = PositionContext(anchors=anchors, prefix_tokens=1, text_queries=True)
        image_asks = PositionContext(anchors=anchors, prefix_tokens=1, text_queries=False)
        for number, layer in enumerate(self.layers):
            last = number == len(self.layers) - 1
            text = layer("attend_self", text, text_mask)
            if both:
                image = layer("attend_self", image, None)
            if number == 0 and pairs is not None:
                text, text_mask = text[pairs.texts], text_mask[pairs.texts]
                image = image[pairs.pictures]
            new_text = layer("attend_other", text, image, None, text_asks)
            if both and (need_image or not last):
                image = layer("attend_other", image, text, text_mask, image_asks)
            text = new_text
        return text, image if both and need_image else None


def _positions(config: CrossConfig, width: int) -> list[PositionEncoding]:
    if config.position == "none":
        return []
    return [
        create_position(
            config.position,
            width=width,
            heads=config.heads,
            groups=config.anchor.groups,
            roles=config.anchor.roles,
            mode=config.anchor.mode,
        )
    ]
