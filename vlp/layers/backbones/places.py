"""Places of a model's tokens, from where patches are made to where encodings act."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from vlp.layers.thread_local import ThreadLocal
from vlp.positions.base import PositionContext, PositionEncoding

register_notrace_module(PositionEncoding)  # what they check of shapes has no graph


class _Written(ThreadLocal):
    """What this thread wrote."""

    def __init__(self) -> None:
        self.contexts: dict[int, PositionContext] = {}


class Places:
    """Places of a model's tokens; the model writes them, its attention layers read them.

    A plain object that they share, so that copies and pickles of the model share their own. Grids
    are kept by their number of tokens: activation checkpointing runs layers again in the backward
    pass, when images of another size may have passed since. Two grids of equally many patches
    (2 x 8 and 4 x 4) must not be in flight together under activation checkpointing.

    A thread reads what it wrote itself, so that several may send images of different grids. One
    that wrote nothing, as those of a GPU's backward pass, reads what was written last; one of those
    that has made patches again, as where a whole model is checkpointed, goes on reading their grid.

    Args:
        prefix_tokens: tokens without a place in front of the patches.
    """

    def __init__(self, prefix_tokens: int) -> None:
        self.prefix_tokens = prefix_tokens
        self._contexts: dict[int, PositionContext] = {}
        self._written = _Written()

    def write(self, rows: int, columns: int) -> PositionContext:
        """The patches of the images at hand are a grid of this size."""
        context = PositionContext((rows, columns), self.prefix_tokens)
        self._keep(rows * columns, context)
        return context

    def write_sizes(self, sizes: Tensor, patches: int) -> None:
        """Patches are images of different grids in raster order, each padded to as many patches.

        Images of one grid without padding are that grid; of others tokens have coordinates, shares
        of their image's width and height, and each image its own grid as their unit.

        Args:
            sizes: (B, 2), rows and columns of each image.
            patches: tokens of an image, with padding.
        """
        rows, columns = (int(size) for size in sizes[0])
        if rows * columns == patches and bool((sizes == sizes[0]).all()):
            self.write(rows, columns)
            return
        place = torch.arange(patches, device=sizes.device)
        height, width = sizes[:, :1], sizes[:, 1:]
        shares = [(place % width + 0.5) / width, (place // width + 0.5) / height]
        # Padding would lie below the image.
        coordinates = torch.stack(shares, -1).clamp(0, 1)
        self._keep(
            patches,
            PositionContext(prefix_tokens=self.prefix_tokens, coordinates=coordinates, grids=sizes),
        )

    def _keep(self, patches: int, context: PositionContext) -> None:
        for contexts in (self._contexts, self._written.contexts):
            contexts[self.prefix_tokens + patches] = context

    def read(self, tokens: int) -> PositionContext:
        """Return the context of so many tokens, prefix included.

        Raises:
            ValueError: no image had so many.
        """
        if tokens not in self._contexts:
            known = ", ".join(map(str, self._contexts)) or "none so far"
            raise ValueError(
                f"no image of this model has {tokens} tokens ({known}), so that nothing says "
                "where they lie: patches were dropped, or attention was called without its model"
            )
        return self._written.contexts.get(tokens, self._contexts[tokens])

    def see_convolution(self, convolution: nn.Module, arguments: Any, patches: Tensor) -> None:
        """Forward hook of a model's patch embedding, whose output is (B, width, rows, columns)."""
        self.write(int(patches.shape[2]), int(patches.shape[3]))

    def see_naflex(
        self, embeds: Any, arguments: tuple[Tensor, ...], options: Mapping[str, Any]
    ) -> None:
        """Forward pre-hook of timm's NaFlexEmbeds: images, or patches with coordinates (y, x)."""
        coordinates, pixels = options.get("patch_coord"), arguments[0]
        if coordinates is None:
            height, width = pixels.shape[-2:]
            rows, columns = embeds.dynamic_feat_size((int(height), int(width)))
            self.write(rows, columns)
        else:
            self.write_sizes(coordinates.amax(1) + 1, coordinates.shape[1])

    def see_sizes(self, embeds: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of transformers' Siglip2VisionEmbeddings: patches and grids."""
        pixels, sizes = arguments
        self.write_sizes(sizes, int(pixels.shape[1]))


class TokenEncodings(nn.ModuleList):
    """Encodings of tokens, applied to the output of a model's module by its forward hook.

    Args:
        places: of the model.
        with_prefix: whether the module's output has the prefix tokens, too.
    """

    def __init__(self, places: Places, with_prefix: bool) -> None:
        super().__init__()
        self._places, self._with_prefix = places, with_prefix

    def see_tokens(self, module: nn.Module, arguments: Any, tokens: Tensor) -> Tensor:
        """Encode (B, tokens, width), or patches (B, rows, columns, width)."""
        if tokens.ndim == 4:
            context = PositionContext((int(tokens.shape[1]), int(tokens.shape[2])))
        elif self._with_prefix:
            context = self._places.read(int(tokens.shape[1]))
        else:
            whole = self._places.read(self._places.prefix_tokens + int(tokens.shape[1]))
            context = replace(whole, prefix_tokens=0)
        x = tokens.flatten(1, -2)
        for encoding in self:
            x = encoding("tokens", x, context)
        return x.reshape(tokens.shape)
