"""Position encodings for timm models that exist: any ViT, DeiT or Swin, with its weights kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from vlp.positions.base import PositionEncoding
from vlp.positions.registry import (
    CROSS_MODAL,
    create_position,
    place_roles,
    position_options,
)

Factory = Callable[..., PositionEncoding]
Fused = bool | Literal["flex"] | None
Model = TypeVar("Model", bound=nn.Module)


def attach(
    model: Model,
    name: str | Factory,
    on: str | None = None,
    absolute: str = "keep",
    fused: Fused = None,
    **options: Any,
) -> Model:
    """Add a position encoding to a timm model.

    The model is changed in place, and left as it was where an error is raised. Several calls add
    several encodings, also the same one again. An encoding of attention gets one module, with its
    own tables, in every layer (`blocks.0.attn.positions.0`); one of tokens acts once, after the
    model's own absolute positions (`positions.0`, in Swin on the embedded patches as
    `patch_embed.positions.0`). In Swin, attention encodings act within a window, beside Swin's own
    bias or in its place. Encodings whose tables start at zero, as iRPE's do, leave the model's
    function as it was.

    Feature extraction by hooks and by timm's `create_feature_extractor` (layers with encodings are
    then leaves, and the image size is fixed), dynamic image sizes, `set_input_size`, activation
    checkpointing, copies, pickles, `torch.compile`, `torch.export` and `torch.jit.trace` work as
    before; `torch.jit.script` does not. Timm's `no_weight_decay` names the encodings' tables, too.
    Encodings that are bound to one grid raise on another.

    Args:
        model: a timm VisionTransformer, VisionTransformerDistilled or SwinTransformer.
        name: one of `list_positions()`, or a callable that makes a PositionEncoding.
        on: where the encoding acts, letters of "qkv": what other encodings call roles, and `sape`
            calls mode; None is the encoding's default.
        absolute: "keep" or "drop" the model's own positions: `pos_embed`, or Swin's relative
            position bias.
        fused: how the layers of attention compute, see `vlp.layers.attention.attend`; None leaves
            them as they are. "flex" trains on a GPU alone.
        options: of the encoding. `width`, `heads` and `grid` are known here and not needed.

    Returns:
        The model.

    Raises:
        ValueError: another model, layers of attention that are not timm's, encodings of
            cross-modal attention, options that the encoding lacks, dropped patches (which lie on
            no grid) under an encoding of attention, or `fused` where no layer of attention has an
            encoding.
    """
    from timm.models.swin_transformer import SwinTransformer

    if absolute not in ("keep", "drop"):
        raise ValueError(f"absolute is 'keep' or 'drop', not {absolute!r}")
    if fused not in (None, True, False, "flex"):
        raise ValueError(f"fused is True, False, 'flex' or None, not {fused!r}")
    if isinstance(model, SwinTransformer):
        _attach_to_swin(model, _Encoding(name, on, options), absolute == "drop", fused)
    else:
        _attach_to_vit(model, _Encoding(name, on, options), absolute == "drop", fused)
    return model


def drop_absolute(model: Model) -> Model:
    """Take the own positions of a timm model away, and put nothing in their place.

    They are the absolute positions of a ViT or DeiT and the relative position bias of a Swin.

    Raises:
        ValueError: another model.
    """
    from timm.models.swin_transformer import SwinTransformer

    if isinstance(model, SwinTransformer):
        _drop_biases(_window_layers(model))
    else:
        _place_tokens(model, _positioned_vit(model), drop=True)
    return model


class _Encoding:
    """An encoding to be made, as often as a model needs it."""

    def __init__(self, name: str | Factory, on: str | None, options: Mapping[str, Any]) -> None:
        self.name = name if isinstance(name, str) else getattr(name, "__name__", repr(name))
        self.make: Factory = partial(create_position, name) if isinstance(name, str) else name
        self.parameters = frozenset(_parameters(name))
        self.options = place_roles(self.name, on, options, self.parameters)

    def __call__(self, like: Tensor, training: bool, **sizes: Any) -> PositionEncoding:
        """Return one module with those sizes that it has, on a weight's device and in its type."""
        known = {size: value for size, value in sizes.items() if size in self.parameters}
        with torch.device("cpu"):  # constructors check numbers, which the device `meta` lacks
            encoding = self.make(**{**known, **self.options})
        return encoding.to(device=like.device, dtype=like.dtype).train(training)

    def acts_on_tokens(self, made: PositionEncoding) -> bool:
        """Return whether it acts once on the tokens, or else in every layer of attention.

        Raises:
            ValueError: it does both, or something that these models have no place for.
        """
        if "inputs" in made.hooks or ("tokens" in made.hooks and len(made.hooks) > 1):
            raise ValueError(
                f"{self.name} acts on {', '.join(sorted(made.hooks))}; timm models have places for "
                "encodings of tokens alone, or of rotate, bias and value"
            )
        return "tokens" in made.hooks


def _attach_to_vit(model: Any, encoding: _Encoding, drop: bool, fused: Fused) -> None:
    from timm.models.vision_transformer import Attention

    from vlp.layers.timm.attention import PositionedAttention

    positioned = _positioned_vit(model)
    layers = _attention_layers(model.blocks, Attention, PositionedAttention)
    grid = _pair(model.patch_embed.grid_size)
    heads, like = layers[0].num_heads, layers[0].qkv.weight
    made = encoding(like, model.training, width=model.embed_dim, heads=heads, grid=grid)
    on_tokens = encoding.acts_on_tokens(made)
    dropped = float(getattr(model.patch_drop, "prob", 0.0))
    if dropped and not on_tokens:
        raise ValueError(
            f"{encoding.name} needs whole grids, but patch_drop_rate {dropped} drops patches; make "
            "the model without it"
        )
    _require_use(fused, encoding, on_tokens, layers, PositionedAttention)
    per_layer = [] if on_tokens else [_for_layer(encoding, layer, grid) for layer in layers]

    # Nothing was changed so far; from here on nothing fails.
    _place_tokens(model, positioned, drop)
    if on_tokens:
        model.positions.append(made)
    for layer, one in zip(layers, per_layer, strict=False):
        if type(layer) is Attention:
            layer.places = model.places
        _append(layer, PositionedAttention, one)
    _set_fused(fused, layers)


def _positioned_vit(model: nn.Module) -> type:
    """Return the class with encodings that stands in for a ViT's.

    Raises:
        ValueError: another model.
    """
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    from vlp.layers.timm.tokens import (
        PositionedVisionTransformer,
        PositionedVisionTransformerDistilled,
    )

    classes: dict[type, type] = {
        VisionTransformer: PositionedVisionTransformer,
        VisionTransformerDistilled: PositionedVisionTransformerDistilled,
    }
    if type(model) not in {*classes, *classes.values()}:
        raise ValueError(
            f"{type(model).__name__} is no timm VisionTransformer, VisionTransformerDistilled or "
            "SwinTransformer; encodings are attached to those before anything wraps them"
        )
    return classes.get(type(model), type(model))


def _place_tokens(model: Any, positioned: type, drop: bool) -> None:
    """Make the model say where its tokens lie; drop its own absolute positions, or keep them."""
    from vlp.layers.timm.tokens import Places

    if type(model) is not positioned:
        model.__class__ = positioned
        model.positions = nn.ModuleList().train(model.training)
        model.places = Places(model.num_prefix_tokens)
    if drop:
        model.pos_embed = None


def _attach_to_swin(model: Any, encoding: _Encoding, drop: bool, fused: Fused) -> None:
    from timm.layers import PatchEmbed
    from timm.models.swin_transformer import SwinTransformer

    from vlp.layers.timm.attention import PositionedWindowAttention
    from vlp.layers.timm.tokens import PositionedPatchEmbed, PositionedSwinTransformer

    layers = _window_layers(model)
    grid = _pair(model.patch_embed.grid_size)
    width, heads, like = layers[0].dim, layers[0].num_heads, layers[0].qkv.weight
    made = encoding(like, model.training, width=width, heads=heads, grid=grid)
    on_tokens, embed = encoding.acts_on_tokens(made), model.patch_embed
    if on_tokens and type(embed) not in (PatchEmbed, PositionedPatchEmbed):
        raise ValueError(
            f"{encoding.name} acts on the patches of timm's PatchEmbed, not {type(embed).__name__}"
        )
    _require_use(fused, encoding, on_tokens, layers, PositionedWindowAttention)
    sizes = [] if on_tokens else [_pair(layer.window_size) for layer in layers]
    per_layer = [_for_layer(encoding, layer, size) for layer, size in zip(layers, sizes)]

    if type(model) is SwinTransformer:
        model.__class__ = PositionedSwinTransformer
    if on_tokens:
        _append(embed, PositionedPatchEmbed, made)
    for layer, one in zip(layers, per_layer, strict=False):
        _append(layer, PositionedWindowAttention, one)
    if drop:
        _drop_biases(layers)
    _set_fused(fused, layers)


def _window_layers(model: Any) -> list[Any]:
    """Return a Swin's layers of attention, in order."""
    from timm.models.swin_transformer import WindowAttention

    from vlp.layers.timm.attention import PositionedWindowAttention

    blocks = [block for stage in model.layers for block in stage.blocks]
    return _attention_layers(blocks, WindowAttention, PositionedWindowAttention)


def _drop_biases(layers: Iterable[Any]) -> None:
    from vlp.layers.timm.attention import PositionedWindowAttention

    for layer in layers:
        _place(layer, PositionedWindowAttention)
        layer.relative_position_bias_table = None


def _require_use(
    fused: Fused, encoding: _Encoding, on_tokens: bool, layers: Sequence[Any], positioned: type
) -> None:
    """ValueError where `fused` is given, and no layer of attention will heed it."""
    if fused is not None and on_tokens and not any(isinstance(one, positioned) for one in layers):
        raise ValueError(
            f"fused={fused!r} is about attention with encodings, of which there is none: "
            f"{encoding.name} acts on tokens"
        )


def _set_fused(fused: Fused, layers: Sequence[Any]) -> None:
    if fused is not None:
        for layer in layers:
            layer.fused = fused


def _attention_layers(blocks: Iterable[nn.Module], *classes: type) -> list[Any]:
    """Layers of exactly these classes: what a subclass does otherwise would be lost.

    Raises:
        ValueError: a block without them, or with other attention.
    """
    layers = []
    for block in blocks:
        parts = [part for part in block.modules() if not isinstance(part, PositionEncoding)]
        found = [part for part in parts if type(part) in classes]
        names = [type(part).__name__ for part in parts[1:] if type(part) not in classes]
        other = [name for name in names if "Attention" in name]
        if other or not found:
            what = f"has {other[0]}" if other else f"has no layer of {classes[0].__name__}"
            raise ValueError(
                f"{type(block).__name__} {what}; encodings are attached to timm's "
                f"{classes[0].__name__} alone"
            )
        layers += found
    return layers


def _for_layer(encoding: _Encoding, layer: Any, grid: tuple[int, int]) -> PositionEncoding:
    width = layer.qkv.out_features // 3
    sizes = {"width": width, "heads": layer.num_heads, "grid": grid}
    return encoding(layer.qkv.weight, layer.training, **sizes)


def _append(module: Any, positioned: type, encoding: PositionEncoding) -> None:
    _place(module, positioned)
    module.positions.append(encoding)


def _place(module: Any, positioned: type) -> None:
    """Give a module the class that has a place for encodings."""
    if type(module) is not positioned:
        module.__class__ = positioned
        module.positions = nn.ModuleList().train(module.training)


def _pair(size: Sequence[int]) -> tuple[int, int]:
    return int(size[0]), int(size[1])


def _parameters(name: str | Factory) -> Iterable[str]:
    """Options of an encoding.

    Raises:
        ValueError: it is not known, or has no place in a model without text.
    """
    if not isinstance(name, str):
        return inspect.signature(name).parameters
    if name in CROSS_MODAL:
        raise ValueError(f"{name} lies between an image and a text; a timm model has no text")
    return position_options(name)
