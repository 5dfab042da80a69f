"""How encodings reach into timm's models: a class of models each, told by few attributes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from timm.layers import PatchEmbed, register_notrace_module
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.hiera import Hiera, MaskUnitAttention
from timm.models.hieradet_sam2 import HieraDet
from timm.models.naflexvit import NaFlexVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn

from vlp.layers.backbones import attention
from vlp.layers.backbones.attention import Places, Positioned, TokenEncodings
from vlp.layers.blocks import no_weight_decay
from vlp.positions.base import PositionContext, PositionEncoding, through_call


@register_notrace_module
class PositionedMaskUnitAttention(Positioned, MaskUnitAttention):
    """Hiera's self-attention, within mask units or over the image, in raster order for encodings.

    `order` has the place in Hiera's order of each token of the grid, `reverse` the other way.
    """

    grid: tuple[int, int]
    order: Tensor
    reverse: Tensor

    def context(self, x: Tensor) -> PositionContext:
        """Return the grid of a mask unit, or of the image; x: (B, T, width)."""
        return PositionContext(self.grid)

    def attend(
        self,
        context: PositionContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *more: Any,
        **named: Any,
    ) -> Tensor:
        """Attention of (B, heads, T, head width) or (B, heads, mask units, T, head width)."""
        if query.shape[-2] != len(self.order):
            raise ValueError(
                f"attention over the image has {query.shape[-2]} tokens, not {len(self.order)}: "
                "without all mask units nothing says where they lie"
            )
        query, key, value = (each[..., self.order, :] for each in (query, key, value))
        units = query.shape[2] if query.ndim == 5 else 0
        if units:
            query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        out = super().attend(context, query, key, value, *more, **named)
        out = out.unflatten(0, (-1, units)).transpose(1, 2) if units else out
        return out[..., self.reverse, :]


def hiera_layout(model: Hiera, block: int) -> tuple[tuple[int, int], Tensor]:
    """Return the grid that a block attends within, and the order of its tokens.

    Args:
        model: the Hiera.
        block: number of a block that pools no queries.

    Returns:
        (rows, columns) of a mask unit or of the image, and the place (rows * columns) in Hiera's
        order of each token in raster order.
    """
    attention: Any = model.blocks[block].attn
    _, size = model.reroll.schedule[block]
    tokens = int(size[0] * size[1])
    place = torch.arange(tokens, device="cpu")
    raster = model.reroll(place.view(1, tokens, 1), block)[0, ..., 0]  # (rows, columns)
    if attention.use_mask_unit_attn:
        units = tokens // attention.window_size
        own = raster % units == 0  # a mask unit is a rectangle
        raster = raster[own.any(1)][:, own.any(0)] // units
    return (int(raster.shape[0]), int(raster.shape[1])), raster.flatten()


class WithEncodings(nn.Module):
    """A timm model some of whose modules have encodings: names of parameters for optimisers."""

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters exempt from weight decay: timm's own and the encodings'."""
        own = super().no_weight_decay()  # type: ignore[misc]
        return {*own, *no_weight_decay(self, with_own=False)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise learning rates; the encodings belong to the stem."""
        groups = super().group_matcher(coarse)  # type: ignore[misc]
        return {**groups, "stem": groups["stem"] + r"|positions"}


class WithWatchedPatches(WithEncodings):
    """One whose convolution of patches writes the places of its tokens."""

    places: Places

    def set_input_size(self, *sizes: Any, **named: Any) -> None:
        """As in timm, which makes another convolution for another patch size."""
        own: Any = self
        before = own.patch_embed.proj
        super().set_input_size(*sizes, **named)  # type: ignore[misc]
        if own.patch_embed.proj is not before:
            own.patch_embed.proj.register_forward_hook(self.places.see_convolution)


class PositionedVisionTransformer(WithEncodings, VisionTransformer):
    """A timm ViT whose tokens also get the encodings in `positions`, after its own `pos_embed`.

    They act once, before patches are dropped. timm's `pos_drop` acts on what it acted on before;
    where there is no `pos_embed`, which timm skips it for, it acts on the encoded tokens.
    """

    positions: nn.ModuleList
    places: Places

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Patches (batch, patches, width) or (batch, rows, columns, width) -> all tokens."""
        rows, columns = x.shape[1:3] if self.dynamic_img_size else self.patch_embed.grid_size
        context = self.places.write(int(rows), int(columns))
        x = self._own_positions(x)
        for encoding in self.positions:
            x = through_call(encoding, PositionEncoding.tokens, x, context)
        return self.pos_drop(x) if self.pos_embed is None and len(self.positions) else x

    def _own_positions(self, x: Tensor) -> Tensor:
        if self.pos_embed is not None:
            return super()._pos_embed(x)
        # Without pos_embed distilled models fail in timm, and older versions lose the prefix.
        second = self.dist_token if isinstance(self, VisionTransformerDistilled) else self.reg_token
        prefix = [token for token in (self.cls_token, second) if token is not None]
        batch = x.shape[0]  # not `len`, which has no graph
        patches = x.reshape(batch, -1, x.shape[-1])
        return torch.cat([*(token.expand(batch, -1, -1) for token in prefix), patches], 1)


class PositionedVisionTransformerDistilled(PositionedVisionTransformer, VisionTransformerDistilled):
    """The same for DeiT with a distillation token."""


class PositionedSwinTransformer(WithEncodings, SwinTransformer):
    """A timm Swin, of whose layers or patch embedding some have encodings."""


class PositionedSwinTransformerV2(WithEncodings, SwinTransformerV2):
    """The same for the second version of Swin."""


class PositionedEva(WithWatchedPatches, Eva):
    """A timm Eva: EVA, EVA-02, DINOv3, the Perception Encoder, ViTs with RoPE."""


class PositionedBeit(WithWatchedPatches, Beit):
    """A timm BEiT."""


class PositionedRelPos(WithWatchedPatches, VisionTransformerRelPos):
    """A timm ViT with relative positions of its own."""


class PositionedNaFlexVit(WithEncodings, NaFlexVit):
    """A timm NaFlexViT."""


class PositionedSAM(WithEncodings, VisionTransformerSAM):
    """The image encoder of SAM in timm."""


class PositionedHiera(WithEncodings, Hiera):
    """A timm Hiera."""


class PositionedHieraDet(WithEncodings, HieraDet):
    """The image encoder of SAM 2 in timm."""


@register_notrace_module
class PositionedPatchEmbed(PatchEmbed):
    """Swin's patch embedding whose output (batch, rows, columns, width) gets the encodings."""

    positions: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        """Pixels (batch, channels, height, width) -> encoded patches."""
        x = super().forward(x)
        _, rows, columns, _ = x.shape
        context = PositionContext((int(rows), int(columns)))
        tokens = x.flatten(1, 2)
        for encoding in self.positions:
            tokens = through_call(encoding, PositionEncoding.tokens, tokens, context)
        return tokens.reshape(x.shape)


Grid = tuple[int, int]

ATTENTION: dict[type, type] = {
    attention.Attention: attention.PositionedAttention,
    attention.AttentionRope: attention.PositionedAttentionRope,
    attention.EvaAttention: attention.PositionedEvaAttention,
    attention.BeitAttention: attention.PositionedBeitAttention,
    attention.RelPosAttention: attention.PositionedRelPosAttention,
    attention.SAMAttention: attention.PositionedSAMAttention,
    attention.MultiScaleAttention: attention.PositionedMultiScaleAttention,
    attention.WindowAttention: attention.PositionedWindowAttention,
    attention.WindowAttentionV2: attention.PositionedWindowAttentionV2,
    MaskUnitAttention: PositionedMaskUnitAttention,
}
"""timm's layers of attention, and what stands in for each."""

OWN_POSITIONS = re.compile(
    r"(^|\.)(pos_embed(_\w+)?|position_embeddings?(\.weight)?|rel_pos_[hw]"
    r"|relative_position_bias_table|(shared_)?rel_pos\.mlp\.fc2\.(weight|bias))$"
)
"""Names of parameters that are 0 where a model's own positions are dropped."""


class Adapter:
    """Base, and how it is for most models: tokens come out of one module, blocks attend."""

    positioned: ClassVar[dict[type, type]]
    """Classes of models, and what stands in for each."""
    embedded: ClassVar[str] = "pos_drop"
    """Module whose output are the embedded tokens."""
    with_prefix: ClassVar[bool] = True
    """Whether these tokens have the prefix already."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def width(self) -> int:
        """Channels of the embedded tokens."""
        return int(self.model.embed_dim)

    @property
    def grid(self) -> Grid:
        """Patches (rows, columns) of an image of the model's size."""
        rows, columns = self.model.patch_embed.grid_size
        return int(rows), int(columns)

    @property
    def dropped(self) -> float:
        """Share of the patches that are left out in training."""
        return float(getattr(getattr(self.model, "patch_drop", None), "prob", 0.0))

    def layers(self) -> list[Any]:
        """Return the layers of attention that may have encodings, in order."""
        return attention_layers(self.blocks())

    def blocks(self) -> Iterable[nn.Module]:
        """Return the blocks in order."""
        blocks: Iterable[nn.Module] = self.model.blocks
        return blocks

    def layer_grid(self, layer: Any) -> Grid:
        """Return the grid that a layer attends within."""
        return self.grid

    def require_tokens(self, name: str) -> None:
        """Check that there is a place for encodings of tokens."""

    def prepare(self) -> None:
        """Make the model say where its tokens lie."""
        model = self.model
        if type(model) in self.positioned:
            model.__class__ = self.positioned[type(model)]
            model.places = Places(int(getattr(model, "num_prefix_tokens", 0)))
            self.watch(model.places)

    def watch(self, places: Places) -> None:
        """Have the model write its places when it embeds an image."""
        self.model.patch_embed.proj.register_forward_hook(places.see_convolution)

    def add_tokens(self, encoding: PositionEncoding) -> None:
        """Add an encoding of tokens."""
        model = self.model
        if not hasattr(model, "positions"):
            model.positions = TokenEncodings(model.places, self.with_prefix).train(model.training)
            embedded = model.get_submodule(self.embedded)
            embedded.register_forward_hook(model.positions.see_tokens)
        model.positions.append(encoding)

    def add(self, layer: Any, encoding: PositionEncoding) -> None:
        """Add an encoding of attention to a layer."""
        give_place(layer)
        layer.places = getattr(self.model, "places", None)
        layer.positions.append(encoding)

    def drop(self) -> None:
        """Take the model's own positions away: their parameters are 0 and no longer trained."""
        for name, parameter in self.model.named_parameters():
            if OWN_POSITIONS.search(name):
                nn.init.zeros_(parameter).requires_grad_(False)
        for module in self.model.modules():
            if getattr(module, "rope", None) is not None:
                module.rope = None


class ViTAdapter(Adapter):
    """A ViT or DeiT."""

    positioned: ClassVar[dict[type, type]] = {
        VisionTransformer: PositionedVisionTransformer,
        VisionTransformerDistilled: PositionedVisionTransformerDistilled,
    }

    def prepare(self) -> None:
        """The model writes its places, and encodes its tokens, by itself."""
        super().prepare()
        if not hasattr(self.model, "positions"):
            self.model.positions = nn.ModuleList().train(self.model.training)

    def watch(self, places: Places) -> None:
        """Leave it to `_pos_embed`."""

    def drop(self) -> None:
        """Take the table of absolute positions away."""
        self.model.pos_embed = None


class SwinAdapter(Adapter):
    """A Swin: its encodings of attention act within windows."""

    positioned: ClassVar[dict[type, type]] = {SwinTransformer: PositionedSwinTransformer}

    def blocks(self) -> Iterable[nn.Module]:
        """Return the blocks of all stages."""
        return [block for stage in self.model.layers for block in stage.blocks]

    def layer_grid(self, layer: Any) -> Grid:
        """Return the size of a window."""
        rows, columns = layer.window_size
        return int(rows), int(columns)

    def require_tokens(self, name: str) -> None:
        """Check that the patch embedding is timm's."""
        embed = self.model.patch_embed
        if type(embed) not in (PatchEmbed, PositionedPatchEmbed):
            raise ValueError(
                f"{name} acts on the patches of timm's PatchEmbed, not {type(embed).__name__}"
            )

    def watch(self, places: Places) -> None:
        """Windows are the same for every image."""

    def add_tokens(self, encoding: PositionEncoding) -> None:
        """Add an encoding of the embedded patches."""
        embed = self.model.patch_embed
        if type(embed) is not PositionedPatchEmbed:
            embed.__class__ = PositionedPatchEmbed
            embed.positions = nn.ModuleList().train(embed.training)
        embed.positions.append(encoding)

    def drop(self) -> None:
        """Take the relative position bias away."""
        for layer in self.layers():
            give_place(layer)
            layer.relative_position_bias_table = None


class SwinV2Adapter(SwinAdapter):
    """A Swin V2."""

    positioned: ClassVar[dict[type, type]] = {SwinTransformerV2: PositionedSwinTransformerV2}

    def drop(self) -> None:
        """Take the MLP of the relative position bias away."""
        for layer in self.layers():
            give_place(layer)
            layer.cpb_mlp = None


class EvaAdapter(Adapter):
    """EVA, BEiT: tokens with their prefix come out of the dropout of positions."""

    positioned: ClassVar[dict[type, type]] = {
        Eva: PositionedEva,
        Beit: PositionedBeit,
    }


class RelPosAdapter(Adapter):
    """ViTs with relative positions: no position is added to the patches."""

    positioned: ClassVar[dict[type, type]] = {VisionTransformerRelPos: PositionedRelPos}
    embedded, with_prefix = "patch_embed.norm", False


class NaFlexAdapter(Adapter):
    """NaFlexViT: images, or patches of images of any size with their coordinates."""

    positioned: ClassVar[dict[type, type]] = {NaFlexVit: PositionedNaFlexVit}
    embedded = "embeds.pos_drop"

    @property
    def grid(self) -> Grid:
        """Grid of the position table, or that of the papers where there is none."""
        rows, columns = self.model.embeds.pos_embed_grid_size or (16, 16)
        return int(rows), int(columns)

    def watch(self, places: Places) -> None:
        """Read the grid, or the coordinates, as the embedding is called."""
        self.model.embeds.register_forward_pre_hook(places.see_naflex, with_kwargs=True)


class SAMAdapter(Adapter):
    """SAM's image encoders, whose states keep rows and columns; grids are windows or the image."""

    positioned: ClassVar[dict[type, type]] = {
        VisionTransformerSAM: PositionedSAM,
        HieraDet: PositionedHieraDet,
    }

    @property
    def embedded(self) -> str:  # type: ignore[override]
        """Module whose output are the embedded tokens."""
        return "pos_drop" if hasattr(self.model, "pos_drop") else "patch_embed"

    @property
    def width(self) -> int:
        """Channels of the embedded tokens."""
        return int(self.model.patch_embed.proj.out_channels)

    @property
    def grid(self) -> Grid:
        """Patches of an image of the model's size; of SAM 2, that of its global positions."""
        if hasattr(self.model, "global_pos_size"):
            rows, columns = self.model.global_pos_size
            return int(rows), int(columns)
        return super().grid

    def layers(self) -> list[Any]:
        """Leave out layers that pool queries, whose grids are two."""
        return [one for one in super().layers() if getattr(one, "q_pool", None) is None]

    def blocks(self) -> Iterable[nn.Module]:
        """Note the window of each layer, which only its block knows."""
        self._windows = {
            id(block.attn): block.window_size
            if isinstance(block.window_size, tuple)
            else (block.window_size, block.window_size)
            for block in self.model.blocks
        }
        return super().blocks()

    def layer_grid(self, layer: Any) -> Grid:
        """Return the window of a layer, or the image's grid."""
        rows, columns = self._windows[id(layer)]
        return (int(rows), int(columns)) if rows else self.grid

    def watch(self, places: Places) -> None:
        """States tell their grid by themselves."""


class HieraAdapter(Adapter):
    """Hiera: grids are mask units or the image."""

    positioned: ClassVar[dict[type, type]] = {Hiera: PositionedHiera}
    embedded, with_prefix = "patch_embed", False

    @property
    def width(self) -> int:
        """Channels of the embedded tokens."""
        return int(self.model.patch_embed.proj.out_channels)

    @property
    def grid(self) -> Grid:
        """Patches of an image of the model's size."""
        rows, columns = self.model.tokens_spatial_shape
        return int(rows), int(columns)

    @property
    def dropped(self) -> float:
        """Share of the mask units that are left out in training."""
        return float(self.model.patch_drop_rate)

    def layers(self) -> list[Any]:
        """Leave out layers that pool queries, whose grids are two."""
        self._blocks = {id(block.attn): number for number, block in enumerate(self.model.blocks)}
        return [one for one in super().layers() if one.q_stride == 1]

    def layer_grid(self, layer: Any) -> Grid:
        """Return the grid of a mask unit, or of the image."""
        return hiera_layout(self.model, self._blocks[id(layer)])[0]

    def add(self, layer: Any, encoding: PositionEncoding) -> None:
        """Give the layer the order of its tokens, too."""
        if type(layer) is MaskUnitAttention:
            grid, order = hiera_layout(self.model, self._blocks[id(layer)])
            order = order.to(layer.qkv.weight.device)
            layer.register_buffer("order", order, persistent=False)
            layer.__dict__["grid"] = grid
            layer.register_buffer("reverse", order.argsort(), persistent=False)
        super().add(layer, encoding)


ADAPTERS: tuple[type[Adapter], ...] = (
    ViTAdapter,
    SwinAdapter,
    SwinV2Adapter,
    EvaAdapter,
    RelPosAdapter,
    NaFlexAdapter,
    SAMAdapter,
    HieraAdapter,
)


def give_place(layer: Any) -> None:
    """Give a layer of attention the class that has a place for encodings."""
    if type(layer) in ATTENTION:
        layer.__class__ = ATTENTION[type(layer)]
        layer.positions = nn.ModuleList().train(layer.training)


def attention_layers(blocks: Iterable[nn.Module]) -> list[Any]:
    """Return layers of exactly known classes: what a subclass does otherwise would be lost."""
    known = {*ATTENTION, *ATTENTION.values()}
    layers = []
    for block in blocks:
        parts = [part for part in block.modules() if not isinstance(part, PositionEncoding)]
        found = [part for part in parts if type(part) in known]
        names = [type(part).__name__ for part in parts[1:] if type(part) not in known]
        other = [name for name in names if "Attention" in name or name.endswith("Attn")]
        if other or not found:
            what = f"has {other[0]}" if other else "has no layer of attention"
            raise ValueError(
                f"{type(block).__name__} {what} that an encoding is attached to; known are "
                f"{', '.join(sorted({one.__name__ for one in ATTENTION}))}"
            )
        layers += found
    return layers


def sizes_of(layer: Any) -> tuple[Tensor, int, int]:
    """Return a layer's weight, width and heads: queries are `heads` vectors of one width."""
    joint = getattr(layer, "qkv", None)
    alone = layer.query if hasattr(layer, "query") else getattr(layer, "q_proj", None)
    weight: Tensor = (joint if joint is not None else alone).weight  # type: ignore[union-attr]
    width = weight.shape[0] // (3 if joint is not None else 1)
    heads = next(
        getattr(layer, name)
        for name in ("num_heads", "heads", "num_attention_heads")
        if hasattr(layer, name)
    )
    return weight, int(width), int(heads)
