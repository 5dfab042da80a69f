"""One encoding for text and one for images in a layer whose weights serve both streams."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vlp.positions.base import PositionContext, PositionEncoding, hooks_of


class ByModality(PositionEncoding):
    """Sends every hook to the encoding of the stream at hand.

    The layers of the cross-modal encoder share their projections between both streams, but a place
    in a sentence and a place in an image have nothing to share. `context.text_queries` says whose
    turn it is; a stream without an encoding, or whose encoding lacks a hook, is left as it is.

    Args:
        text: encoding of the text stream, or None.
        image: encoding of the image stream, or None.
    """

    def __init__(self, text: PositionEncoding | None, image: PositionEncoding | None) -> None:
        super().__init__()
        self.text, self.image = text, image

    @property
    def hooks(self) -> frozenset[str]:
        """Those of either side."""
        sides = [side for side in (self.text, self.image) if side is not None]
        return frozenset[str]().union(*(hooks_of(side) for side in sides))

    def tokens(self, x: Tensor, context: PositionContext) -> Tensor:
        """Token embeddings of one stream; see the base."""
        return self._dispatch("tokens", context, x)

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, context: PositionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what enters the projections of one stream; see the base."""
        return self._dispatch("inputs", context, query, key, value)

    def rotate(self, query: Tensor, key: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        """Projected queries and keys of one stream; see the base."""
        return self._dispatch("rotate", context, query, key)

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        """Bias of one stream's logits; see the base."""
        return self._dispatch("bias", context, query, key)

    def value(self, attention: Tensor, context: PositionContext) -> Tensor | None:
        """Addition to one stream's output; see the base."""
        return self._dispatch("value", context, attention)

    def _dispatch(self, hook: str, context: PositionContext, *tensors: Tensor) -> Any:
        side = self.text if context.text_queries else self.image
        if side is None or hook not in hooks_of(side):
            return getattr(PositionEncoding, hook)(self, *tensors, context)
        return side(hook, *tensors, context)
