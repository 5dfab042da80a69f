"""Position encodings attached to existing models of timm and transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from vlp.layers.attention import Fused
from vlp.positions.base import PositionEncoding
from vlp.positions.options import check_options
from vlp.positions.registry import CROSS_MODAL, create_position, position_options, with_roles

Factory = Callable[..., PositionEncoding]
Model = TypeVar("Model", bound=nn.Module)

# Layers of attention that encodings cannot act in, and the reason.
IMPOSSIBLE = {
    "XCA": "attends between channels, not between positions, and has no pairs of patches",
    "TalkingHeadAttn": "mixes the logits of its heads before and after the softmax, so that no "
    "logit belongs to a head",
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

    Several calls add several encodings. An encoding of attention gets a module with separate
    tables in every layer (`blocks.0.attn.positions.0`), in Swin within windows. An encoding of
    tokens acts once, after the model's own absolute positions (`positions.0`), in Swin on the
    embedded patches (`patch_embed.positions.0`). The model's own relative biases and rotations stay
    and act first. Encodings with tables that start at zero, such as iRPE, leave the model's
    function unchanged.

    Feature extraction by hooks and by timm's `create_feature_extractor` (layers with encodings are
    then leaves, and the image size is fixed), dynamic image sizes, `set_input_size`, activation
    checkpointing, copies, pickles, `torch.compile`, `torch.export` and `torch.jit.trace` work as
    before; `torch.jit.script` does not. Timm's `no_weight_decay` includes the encodings' tables.
    Encodings that are bound to one grid raise on another. Under activation checkpointing a backward
    pass must not mix grids with equally many patches, such as 2 x 8 and 4 x 4.

    Args:
        model: of timm a ViT, DeiT, Swin, Swin V2, Eva (EVA, EVA-02, DINOv3, Perception Encoder, ViT
            with RoPE), BEiT or ViT with relative positions; of transformers a ViT, DeiT, BEiT,
            DINOv2, DINOv3, CLIP vision model, SigLIP or SigLIP 2 vision model.
        name: one of `list_positions()`, or its class, or a callable that makes a PositionEncoding.
        on: letters of "qkv" (an encoding's roles, `sape`'s mode); None is the encoding's default.
        absolute: "keep" or "drop" the model's own positions: `pos_embed`, relative position biases
            and rotations.
        fused: see `vlp.layers.attention.attend`; None leaves the layers' setting unchanged.
        options: of the encoding; `attach` sets `width`, `heads` and `grid`.

    Raises:
        TypeError: a wrong kind of model or `name`.
        ValueError: an unsupported model, layer, encoding or option; the model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach takes a model, not {model!r}: create it with timm.create_model")
    if absolute not in ("keep", "drop"):
        raise ValueError(f"absolute is 'keep' or 'drop', not {absolute!r}")
    if fused not in (None, True, False):
        raise ValueError(f"fused is True, False or None, not {fused!r}")
    from vlp.layers.backbones.adapters import attention_sizes

    adapter, factory = _adapter(model), _EncodingFactory(name, on, options)
    layers = adapter.layers()
    weight, _, heads = attention_sizes(layers[0])
    token_encoding = factory.create(
        weight, model.training, width=adapter.width, heads=heads, grid=adapter.grid
    )
    on_tokens = factory.acts_on_tokens(token_encoding)
    if on_tokens:
        adapter.require_token_encodings(factory.name)
    elif adapter.patch_drop_rate:
        raise ValueError(
            f"{factory.name} needs whole grids, but patch_drop_rate {adapter.patch_drop_rate} "
            "drops patches: create the model without it"
        )
    is_positioned = any("positions" in layer._modules for layer in layers)
    if fused is not None and on_tokens and not is_positioned:
        raise ValueError(
            f"fused={fused!r} is about attention with encodings, and this model has none: "
            f"{factory.name} acts on tokens"
        )
    layer_encodings = []
    for layer in () if on_tokens else layers:
        weight, width, heads = attention_sizes(layer)
        grid = adapter.layer_grid(layer)
        layer_encodings.append(
            factory.create(weight, layer.training, width=width, heads=heads, grid=grid)
        )

    # The model is unchanged so far, and from here on nothing fails.
    adapter.prepare()
    if on_tokens:
        adapter.add_token_encoding(token_encoding)
    # Without encodings for layers this loop does nothing.
    for layer, encoding in zip(layers, layer_encodings, strict=False):
        adapter.add_attention_encoding(layer, encoding)
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
    """Return the adapter of a model; raise ValueError for an unsupported class."""
    from vlp.layers.backbones.adapters import ADAPTERS

    if any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        from vlp.layers.backbones.transformers_vit import TransformersAdapter

        return TransformersAdapter(cast(Any, model))
    # `positioned` maps each class of timm to its subclass with encodings; both may be attached to.
    for adapter in ADAPTERS:
        if type(model) in {*adapter.positioned, *adapter.positioned.values()}:
            return adapter(model)
    raise ValueError(f"{type(model).__name__} {_refusal(model)}")


def _refusal(model: nn.Module) -> str:
    """Return why encodings cannot be attached, as the predicate of the model's class name."""
    class_names = {type(module).__name__ for module in model.modules()}
    for name, reason in IMPOSSIBLE.items():
        if name in class_names:
            return reason
    if not any("Att" in name for name in class_names):
        return "has no layer of attention, in which encodings act"
    return (
        "is not among the models that encodings can be attached to, before anything wraps them: "
        "timm's ViT, DeiT, Swin, Swin V2, Eva and BEiT, and transformers' vision transformers"
    )


class _EncodingFactory:
    """Factory of an encoding's modules, from a registered name, a class or a function."""

    def __init__(self, name: str | Factory, on: str | None, options: Mapping[str, Any]) -> None:
        """Check the name and the roles."""
        is_other_class = isinstance(name, type) and not issubclass(name, PositionEncoding)
        is_factory = isinstance(name, str) or (callable(name) and not isinstance(name, nn.Module))
        if is_other_class or not is_factory:
            label = name.__name__ if isinstance(name, type) else f"a {type(name).__name__}"
            raise TypeError(
                f"{label} cannot be attached: give the name or the class of an encoding, of which "
                "each layer gets a module"
            )
        self.checks_options = False
        if isinstance(name, str):
            if name in CROSS_MODAL:
                raise ValueError(
                    f"{name} acts between an image and a text, and a vision model has no text"
                )
            # `create_position` checks the options.
            self.make: Factory = partial(create_position, name)
            self.name, self.option_names = name, position_options(name)
        else:
            parameters = inspect.signature(name).parameters
            self.make, self.name = name, getattr(name, "__name__", repr(name))
            self.option_names = frozenset(parameters)
            # A constructor with ** may pass on options of any name.
            has_kwargs = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
            self.checks_options = isinstance(name, type) and not has_kwargs
        self.options = with_roles(self.name, on, options, self.option_names)

    def create(self, weight: Tensor, training: bool, **sizes: Any) -> PositionEncoding:
        """Create a module with those `sizes` that it takes, in a weight's device and dtype."""
        fitting_sizes = {size: value for size, value in sizes.items() if size in self.option_names}
        options = {**fitting_sizes, **self.options}
        if self.checks_options:
            options = check_options(f"position encoding {self.name!r}", self.make, options)
        # Constructors check numbers, which the device `meta` lacks.
        with torch.device("cpu"):
            encoding = self.make(**options)
        if not isinstance(encoding, PositionEncoding):
            raise TypeError(f"{self.name} makes no PositionEncoding, but {type(encoding).__name__}")
        return encoding.to(device=weight.device, dtype=weight.dtype).train(training)

    def acts_on_tokens(self, encoding: PositionEncoding) -> bool:
        """Return whether an encoding acts on the tokens, not in layers of attention."""
        if "inputs" in encoding.hooks or ("tokens" in encoding.hooks and len(encoding.hooks) > 1):
            raise ValueError(
                f"{self.name} has the hooks {', '.join(sorted(encoding.hooks))}; an attached "
                "encoding may have tokens alone, or rotate, bias and value"
            )
        return "tokens" in encoding.hooks
