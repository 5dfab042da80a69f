"""Adapters that attach encodings to timm's models, by family of models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from timm.layers import PatchEmbed, register_notrace_module
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn

from vlp.layers.backbones import attention
from vlp.layers.backbones.attention import ContextStore, TokenEncodings
from vlp.layers.blocks import no_weight_decay
from vlp.positions.base import PositionContext, PositionEncoding, call_method


class PositionedModel(nn.Module):
    """Base of timm models with encodings: settings of the encodings' parameters for optimisers."""

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters exempt from weight decay: timm's own and the encodings'."""
        names = super().no_weight_decay()  # type: ignore[misc]
        return {*names, *no_weight_decay(self, include_self=False)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Group layers for layer-wise learning rates; the encodings belong to the stem."""
        groups = super().group_matcher(coarse)  # type: ignore[misc]
        return {**groups, "stem": groups["stem"] + r"|positions"}


class PositionedPatchModel(PositionedModel):
    """Base of timm models with a hook on the patch convolution that records the grid."""

    context_store: ContextStore

    def set_input_size(self, *sizes: Any, **options: Any) -> None:
        """Set the size as timm does."""
        # For another patch size timm creates another convolution, without the hook.
        model: Any = self
        convolution = model.patch_embed.proj
        super().set_input_size(*sizes, **options)  # type: ignore[misc]
        if model.patch_embed.proj is not convolution:
            model.patch_embed.proj.register_forward_hook(self.context_store.record_grid)


class PositionedVisionTransformer(PositionedModel, VisionTransformer):
    """A timm ViT with the token encodings `positions`, after its own `pos_embed`.

    They act before patches are dropped, and without `pos_embed` before the dropout `pos_drop`.
    """

    positions: nn.ModuleList
    context_store: ContextStore

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Add prefix and positions to patches (B, patches, width) or (B, rows, columns, width)."""
        rows, columns = x.shape[1:3] if self.dynamic_img_size else self.patch_embed.grid_size
        context = self.context_store.write(int(rows), int(columns))
        x = self._embed_absolute(x)
        for encoding in self.positions:
            x = call_method(encoding, PositionEncoding.tokens, x, context)
        return self.pos_drop(x) if self.pos_embed is None and len(self.positions) else x

    def _embed_absolute(self, x: Tensor) -> Tensor:
        """Add the prefix, and absolute positions if the model has them: (B, tokens, width)."""
        if self.pos_embed is not None:
            return super()._pos_embed(x)
        # Without `pos_embed` timm's distilled models fail, and its older versions omit the prefix.
        is_distilled = isinstance(self, VisionTransformerDistilled)
        second_token = self.dist_token if is_distilled else self.reg_token
        tokens: tuple[Any, Any] = self.cls_token, second_token
        prefix = [token for token in tokens if token is not None]
        # Not `len`, which `torch.jit.trace` makes a constant.
        batch = x.shape[0]
        patches = x.reshape(batch, -1, x.shape[-1])
        return torch.cat([*(token.expand(batch, -1, -1) for token in prefix), patches], 1)


class PositionedVisionTransformerDistilled(PositionedVisionTransformer, VisionTransformerDistilled):
    """A timm DeiT with a distillation token and the token encodings `positions`."""


class PositionedSwinTransformer(PositionedModel, SwinTransformer):
    """A timm Swin with encodings in layers or in the patch embedding."""


class PositionedSwinTransformerV2(PositionedModel, SwinTransformerV2):
    """A timm Swin V2 with encodings in layers or in the patch embedding."""


class PositionedEva(PositionedPatchModel, Eva):
    """A timm Eva: EVA, EVA-02, DINOv3, the Perception Encoder, ViTs with RoPE."""


class PositionedBeit(PositionedPatchModel, Beit):
    """A timm BEiT."""


class PositionedRelPos(PositionedPatchModel, VisionTransformerRelPos):
    """A timm ViT with relative positions of its own."""


@register_notrace_module
class PositionedPatchEmbed(PatchEmbed):
    """Swin's patch embedding with encodings of its output (batch, rows, columns, width)."""

    positions: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        """Embed pixels (batch, channels, height, width) as encoded patches."""
        x = super().forward(x)
        _, rows, columns, _ = x.shape
        context = PositionContext((int(rows), int(columns)))
        tokens = x.flatten(1, 2)
        for encoding in self.positions:
            tokens = call_method(encoding, PositionEncoding.tokens, tokens, context)
        return tokens.reshape(x.shape)


Grid = tuple[int, int]

# Class with encodings, by timm's class of attention.
ATTENTION: dict[type, type] = {
    attention.Attention: attention.PositionedAttention,
    attention.AttentionRope: attention.PositionedAttentionRope,
    attention.EvaAttention: attention.PositionedEvaAttention,
    attention.BeitAttention: attention.PositionedBeitAttention,
    attention.RelPosAttention: attention.PositionedRelPosAttention,
    attention.WindowAttention: attention.PositionedWindowAttention,
    attention.WindowAttentionV2: attention.PositionedWindowAttentionV2,
}

# Names of the parameters of a model's own positions, which `Adapter.drop` sets to 0.
MODEL_POSITIONS = re.compile(
    r"(^|\.)(pos_embed|position_embeddings?(\.weight)?|relative_position_bias_table"
    r"|(shared_)?rel_pos\.mlp\.fc2\.(weight|bias))$"
)


class Adapter:
    """Base adapter, for models with one module of embedded tokens and a list of blocks."""

    # Class with encodings, by timm's class.
    positioned: ClassVar[dict[type, type]]
    # Name of the module that outputs the embedded tokens.
    token_module: ClassVar[str] = "pos_drop"
    # Whether the output of `token_module` includes the prefix.
    has_prefix: ClassVar[bool] = True
    # Whether a hook of the patch convolution records the grid.
    hooks_grid: ClassVar[bool] = True

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def width(self) -> int:
        """Return the channels of the embedded tokens."""
        return int(self.model.embed_dim)

    @property
    def grid(self) -> Grid:
        """Return the grid (rows, columns) of patches of an image of the model's size."""
        rows, columns = self.model.patch_embed.grid_size
        return int(rows), int(columns)

    @property
    def patch_drop_rate(self) -> float:
        """Return the share of patches that timm's `patch_drop` drops in training."""
        return float(getattr(getattr(self.model, "patch_drop", None), "prob", 0.0))

    def layers(self) -> list[Any]:
        """Return the layers of attention in order, or raise ValueError for unsupported classes."""
        # No subclasses: changing their class would lose their overrides.
        supported = {*ATTENTION, *ATTENTION.values()}
        layers = []
        for block in self.blocks():
            parts = [part for part in block.modules() if not isinstance(part, PositionEncoding)]
            block_layers = [part for part in parts if type(part) in supported]
            # `parts[0]` is the block.
            names = [type(part).__name__ for part in parts[1:] if type(part) not in supported]
            unsupported = [name for name in names if "Attention" in name or name.endswith("Attn")]
            if unsupported or not block_layers:
                cause = f"with {unsupported[0]}" if unsupported else "without a layer of attention"
                raise ValueError(
                    f"encodings cannot be attached to a {type(block).__name__} {cause}; supported "
                    f"layers are {', '.join(sorted({layer.__name__ for layer in ATTENTION}))}"
                )
            layers += block_layers
        return layers

    def blocks(self) -> Iterable[nn.Module]:
        """Return the blocks in order."""
        blocks: Iterable[nn.Module] = self.model.blocks
        return blocks

    def layer_grid(self, layer: Any) -> Grid:
        """Return the grid (rows, columns) within which a layer attends."""
        return self.grid

    def require_token_encodings(self, name: str) -> None:
        """Raise ValueError if the model cannot have encodings of tokens."""

    def prepare(self) -> None:
        """Change the model's class to its class with encodings, which records the tokens' grid."""
        model = self.model
        if type(model) in self.positioned:
            model.__class__ = self.positioned[type(model)]
            model.context_store = ContextStore(int(getattr(model, "num_prefix_tokens", 0)))
            if self.hooks_grid:
                model.patch_embed.proj.register_forward_hook(model.context_store.record_grid)

    def add_token_encoding(self, encoding: PositionEncoding) -> None:
        """Add an encoding of tokens."""
        model = self.model
        if not hasattr(model, "positions"):
            positions = TokenEncodings(model.context_store, self.has_prefix).train(model.training)
            model.positions = positions
            model.get_submodule(self.token_module).register_forward_hook(positions.encode)
        model.positions.append(encoding)

    def add_attention_encoding(self, layer: Any, encoding: PositionEncoding) -> None:
        """Add an encoding to a layer of attention."""
        add_positions_to(layer)
        layer.context_store = getattr(self.model, "context_store", None)
        layer.positions.append(encoding)

    def drop(self) -> None:
        """Remove the model's own positions: set their parameters to 0 and freeze them."""
        for name, parameter in self.model.named_parameters():
            if MODEL_POSITIONS.search(name):
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

    # `_pos_embed` writes the grid.
    hooks_grid = False

    def prepare(self) -> None:
        """Change the model's class; its `_pos_embed` applies the list `positions`."""
        super().prepare()
        if not hasattr(self.model, "positions"):
            self.model.positions = nn.ModuleList().train(self.model.training)

    def drop(self) -> None:
        """Remove the table of absolute positions."""
        self.model.pos_embed = None


class SwinAdapter(Adapter):
    """A Swin: its encodings of attention act within windows."""

    positioned: ClassVar[dict[type, type]] = {SwinTransformer: PositionedSwinTransformer}
    # The grid of an encoding is a window, the same for images of any size.
    hooks_grid = False
    # Attribute of the relative position bias in layers of attention.
    bias_attribute: ClassVar[str] = "relative_position_bias_table"

    def blocks(self) -> Iterable[nn.Module]:
        """Return the blocks of all stages."""
        return [block for stage in self.model.layers for block in stage.blocks]

    def layer_grid(self, layer: Any) -> Grid:
        """Return the size of a window."""
        rows, columns = layer.window_size
        return int(rows), int(columns)

    def require_token_encodings(self, name: str) -> None:
        """Raise ValueError unless the patch embedding is timm's."""
        embed = self.model.patch_embed
        if type(embed) not in (PatchEmbed, PositionedPatchEmbed):
            raise ValueError(
                f"{name} acts on the patches of timm's PatchEmbed, not {type(embed).__name__}"
            )

    def add_token_encoding(self, encoding: PositionEncoding) -> None:
        """Add an encoding of the embedded patches."""
        embed = self.model.patch_embed
        if type(embed) is not PositionedPatchEmbed:
            embed.__class__ = PositionedPatchEmbed
            embed.positions = nn.ModuleList().train(embed.training)
        embed.positions.append(encoding)

    def drop(self) -> None:
        """Remove the relative position bias."""
        for layer in self.layers():
            add_positions_to(layer)
            setattr(layer, self.bias_attribute, None)


class SwinV2Adapter(SwinAdapter):
    """A Swin V2."""

    positioned: ClassVar[dict[type, type]] = {SwinTransformerV2: PositionedSwinTransformerV2}
    bias_attribute = "cpb_mlp"


class EvaAdapter(Adapter):
    """EVA, BEiT: `pos_drop` outputs all tokens."""

    positioned: ClassVar[dict[type, type]] = {Eva: PositionedEva, Beit: PositionedBeit}


class RelPosAdapter(Adapter):
    """ViTs with relative positions: `patch_embed.norm` outputs patches without the prefix."""

    positioned: ClassVar[dict[type, type]] = {VisionTransformerRelPos: PositionedRelPos}
    token_module, has_prefix = "patch_embed.norm", False


ADAPTERS: tuple[type[Adapter], ...] = (
    ViTAdapter,
    SwinAdapter,
    SwinV2Adapter,
    EvaAdapter,
    RelPosAdapter,
)


def add_positions_to(layer: Any) -> None:
    """Change a layer of attention to its class with encodings, and add an empty list of them."""
    if type(layer) in ATTENTION:
        layer.__class__ = ATTENTION[type(layer)]
        layer.positions = nn.ModuleList().train(layer.training)


def attention_sizes(layer: Any) -> tuple[Tensor, int, int]:
    """Return the weight of a layer's query or qkv projection, query width, and number of heads."""
    if getattr(layer, "qkv", None) is not None:
        weight = layer.qkv.weight
        width = weight.shape[0] // 3
    else:
        weight = (layer.query if hasattr(layer, "query") else layer.q_proj).weight
        width = weight.shape[0]
    names = ("num_heads", "heads", "num_attention_heads")
    heads = next(getattr(layer, name) for name in names if hasattr(layer, name))
    return weight, int(width), int(heads)
