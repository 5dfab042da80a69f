"""Position encodings for models of timm and transformers that exist, with their weights kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from vlp.positions.base import PositionEncoding
from vlp.positions.options import checked_options
from vlp.positions.registry import CROSS_MODAL, create_position, place_roles, position_options

Factory = Callable[..., PositionEncoding]
Fused = bool | None
Model = TypeVar("Model", bound=nn.Module)

# Layers of attention that encodings have no place in, and why.
IMPOSSIBLE = {
    "XCA": "attends between channels, not between positions, so that there are no pairs of patches",
    "TalkingHeadAttn": "mixes the logits of its heads before and after the softmax, which belong "
    "to no head that an encoding could add to",
}


def attach(
    model: Model,
    name: str | Factory,
    on: str | None = None,
    absolute: str = "keep",
    fused: Fused = None,
    **options: Any,
) -> Model:
    """Add a position encoding to a model of timm or transformers, in place, and return the model.

    Several calls add several encodings, also the same one again. An encoding of attention gets one
    module, with its own tables, in every layer (`blocks.0.attn.positions.0`); one of tokens acts
    once, after the model's own absolute positions (`positions.0`, in Swin on the embedded patches
    as `patch_embed.positions.0`). Within windows (Swin) encodings act there. The model's own
    relative biases and rotations stay, and act before the encodings do. Encodings with tables that
    start at zero, as iRPE's do, leave the model's function as it was.

    Feature extraction by hooks and by timm's `create_feature_extractor` (layers with encodings are
    then leaves, and the image size is fixed), dynamic image sizes, `set_input_size`, activation
    checkpointing, copies, pickles, `torch.compile`, `torch.export` and `torch.jit.trace` work as
    before; `torch.jit.script` does not. Timm's `no_weight_decay` names the encodings' tables, too.
    Encodings that are bound to one grid raise on another. Under activation checkpointing a backward
    pass must not hold images of two grids with equally many patches, such as 2 x 8 and 4 x 4.

    Args:
        model: of timm a ViT, DeiT, Swin, Swin V2, Eva (EVA, EVA-02, DINOv3, Perception Encoder, ViT
            with RoPE), BEiT or ViT with relative positions; of transformers a ViT, DeiT, BEiT,
            DINOv2, DINOv3, CLIP vision model, SigLIP or SigLIP 2 vision model.
        name: one of `list_positions()`, or its class, or a callable that makes a PositionEncoding.
        on: letters of "qkv" (an encoding's roles, `sape`'s mode); None is the encoding's default.
        absolute: "keep" or "drop" the model's own positions: `pos_embed`, relative position biases
            and rotations.
        fused: see `vlp.layers.attention.attend`; None leaves layers as they are.
        options: of the encoding; `width`, `heads` and `grid` are filled in.

    Raises:
        TypeError: a wrong kind of model or `name`.
        ValueError: an unsupported model, layer, encoding or option; the model is left as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach takes a model, not {model!r}: timm.create_model makes one")
    if absolute not in ("keep", "drop"):
        raise ValueError(f"absolute is 'keep' or 'drop', not {absolute!r}")
    if fused not in (None, True, False):
        raise ValueError(f"fused is True, False or None, not {fused!r}")
    from vlp.layers.backbones.adapters import sizes_of

    adapter, encoding = _adapter(model), _Encoding(name, on, options)
    layers = adapter.layers()
    weight, _, heads = sizes_of(layers[0])
    first = encoding(weight, model.training, width=adapter.width, heads=heads, grid=adapter.grid)
    on_tokens = encoding.acts_on_tokens(first)
    if on_tokens:
        adapter.require_tokens(encoding.name)
    elif adapter.dropped:
        raise ValueError(
            f"{encoding.name} needs whole grids, but patch_drop_rate {adapter.dropped} drops "
            "patches; make the model without it"
        )
    is_positioned = any("positions" in layer._modules for layer in layers)
    if fused is not None and on_tokens and not is_positioned:
        raise ValueError(
            f"fused={fused!r} is about attention with encodings, of which there is none: "
            f"{encoding.name} acts on tokens"
        )
    per_layer = [] if on_tokens else [_for_layer(encoding, adapter, layer) for layer in layers]

    # The model is unchanged so far, and from here on nothing fails.
    adapter.prepare()
    if on_tokens:
        adapter.add_tokens(first)
    for layer, position in zip(layers, per_layer, strict=False):
        adapter.add(layer, position)
    if absolute == "drop":
        adapter.drop()
    if fused is not None:
        for layer in layers:
            layer.fused = fused
    return model


def drop_absolute(model: Model) -> Model:
    """Remove a model's absolute positions, relative position biases and rotations, in place."""
    adapter = _adapter(model)
    adapter.layers()
    adapter.prepare()
    adapter.drop()
    return model


def _adapter(model: nn.Module) -> Any:
    """Return the adapter of a model's class."""
    from vlp.layers.backbones.adapters import ADAPTERS

    if any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        from vlp.layers.backbones.transformers_vit import TransformersAdapter

        return TransformersAdapter(cast(Any, model))
    for adapter in ADAPTERS:
        if type(model) in {*adapter.positioned, *adapter.positioned.values()}:
            return adapter(model)
    raise ValueError(f"{type(model).__name__} {_refusal(model)}")


def _refusal(model: nn.Module) -> str:
    """Return the reason why encodings cannot be attached to a model."""
    parts = {type(part).__name__ for part in model.modules()}
    for name, reason in IMPOSSIBLE.items():
        if name in parts:
            return reason
    if not any("Att" in part for part in parts):
        return "has no layer of attention, which encodings act in"
    return (
        "is not among the models that encodings are attached to, before anything wraps them: "
        "timm's ViT, DeiT, Swin, Swin V2, Eva and BEiT, and transformers' vision transformers"
    )


class _Encoding:
    """A factory of the encoding's modules, one for each layer."""

    def __init__(self, name: str | Factory, on: str | None, options: Mapping[str, Any]) -> None:
        """Check the name and the roles."""
        invalid = isinstance(name, type) and not issubclass(name, PositionEncoding)
        if invalid or isinstance(name, nn.Module) or not (isinstance(name, str) or callable(name)):
            kind = name.__name__ if isinstance(name, type) else f"a {type(name).__name__}"
            raise TypeError(
                f"{kind} is no encoding to be made: give its name or class, a module is made for "
                "every layer"
            )
        self.name = name if isinstance(name, str) else getattr(name, "__name__", repr(name))
        self.make: Factory = partial(create_position, name) if isinstance(name, str) else name
        self.parameters = frozenset(_parameters(name))
        # `create_position` checks options itself; a constructor with ** may pass on any name.
        self.checks = isinstance(name, type) and not _accepts_any_option(name)
        self.options = place_roles(self.name, on, options, self.parameters)

    def __call__(self, weight: Tensor, training: bool, **sizes: Any) -> PositionEncoding:
        """Return one module with those sizes that it has, on a weight's device and in its type."""
        fitting = {size: value for size, value in sizes.items() if size in self.parameters}
        options = {**fitting, **self.options}
        if self.checks:
            options = checked_options(f"position encoding {self.name!r}", self.make, options)
        # Constructors check numbers, which the device `meta` lacks.
        with torch.device("cpu"):
            encoding = self.make(**options)
        if not isinstance(encoding, PositionEncoding):
            raise TypeError(f"{self.name} makes no PositionEncoding, but {type(encoding).__name__}")
        return encoding.to(device=weight.device, dtype=weight.dtype).train(training)

    def acts_on_tokens(self, encoding: PositionEncoding) -> bool:
        """Return whether it acts once on the tokens, or else in every layer of attention."""
        if "inputs" in encoding.hooks or ("tokens" in encoding.hooks and len(encoding.hooks) > 1):
            raise ValueError(
                f"{self.name} acts on {', '.join(sorted(encoding.hooks))}; timm models have places "
                "for encodings of tokens alone, or of rotate, bias and value"
            )
        return "tokens" in encoding.hooks


def _for_layer(encoding: _Encoding, adapter: Any, layer: Any) -> PositionEncoding:
    from vlp.layers.backbones.adapters import sizes_of

    weight, width, heads = sizes_of(layer)
    sizes = {"width": width, "heads": heads, "grid": adapter.layer_grid(layer)}
    return encoding(weight, layer.training, **sizes)


def _accepts_any_option(make: Factory) -> bool:
    """Return whether a constructor takes keyword arguments that it does not name."""
    parameters = inspect.signature(make).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _parameters(name: str | Factory) -> Iterable[str]:
    """Return the options of an encoding."""
    if not isinstance(name, str):
        return inspect.signature(name).parameters
    if name in CROSS_MODAL:
        raise ValueError(f"{name} lies between an image and a text; a vision model has no text")
    return position_options(name)
