"""The interface of all position encodings: five hooks, faster forms that some offer, PEmixer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from vlp.positions.anchor_field import AnchorPaths

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def through_call(
    module: nn.Module,
    method: Callable[Concatenate[Any, Arguments], Result],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Result:
    """Run a method of a module through its call, as in `through_call(layer, Layer.step)`."""
    # ZeRO-3's hooks and wrappers (activation checkpointing, peft, `torch.compile`) act on that call
    # alone. `forward` gets the method's name, so a wrapper needs no such method.
    result: Result = module(method.__name__, *arguments, **options)
    return result


@dataclass(frozen=True)
class PositionContext:
    """Context of the tokens that a hook acts on.

    `grid` is (rows, columns) of the image patches, which follow `prefix_tokens` tokens without a
    position ([CLS]). Tokens that lie on no grid have `coordinates` (B or 1, tokens after prefix, C)
    instead, shares of the image's width and height: x, y where C = 2, boxes x0, y0, x1, y1 where
    C = 4. Where they are patches of images that differ in size, `grids` (B or 1, 2) are each
    image's rows and columns, followed by padding. `boxes` (B, K, 4) are objects on the grid: x, y,
    width, height in cells; a row of width or height 0 is padding. In cross-attention `anchors`
    holds the paths of the pairs, `text_queries` is True for text-to-image, False for image-to-text;
    `kernel_terms` are the layer's tables, projected once for both directions; `projections` its key
    and value weights, where keys and values are projected already.
    """

    grid: tuple[int, int] | None = None
    prefix_tokens: int = 0
    coordinates: Tensor | None = None
    grids: Tensor | None = None
    boxes: Tensor | None = None
    anchors: AnchorPaths | None = None
    text_queries: bool = True
    kernel_terms: Tensor | None = None
    projections: tuple[Tensor, Tensor] | None = None


class PositionEncoding(nn.Module):
    """Base of every encoding; attention calls the hooks that a subclass overrides.

    Most encodings override one of the five hooks. Faster forms, which attention takes where it can,
    are `inputs` for projected keys (`shares_keys`), and `attend` (`has_kernel`).
    """

    HOOKS: ClassVar[tuple[str, ...]] = ("tokens", "inputs", "rotate", "bias", "value")
    NO_WEIGHT_DECAY: ClassVar[tuple[str, ...]] = ()
    """Attributes with parameters exempt from weight decay, such as tables of positions."""
    causal: bool = False
    """True if the result for a pair of tokens depends on no later token."""
    shares_keys: ClassVar[bool] = False
    """True if hooks read the paths of a pair and nothing else of its keys, so that pairs of one
    image may share projected keys and values, which `inputs` then gets."""
    has_kernel: ClassVar[bool] = False
    """True if `attend` computes the whole attention in one GPU kernel."""

    def __init_subclass__(cls, **options: Any) -> None:
        # A faster form holds for the hooks it was written for, so a subclass that overrides one
        # declares it again.
        super().__init_subclass__(**options)
        if any(hook in vars(cls) for hook in cls.HOOKS):
            for form in ("shares_keys", "has_kernel"):
                if form not in vars(cls):
                    setattr(cls, form, False)

    @property
    def hooks(self) -> frozenset[str]:
        """Return the names of the hooks that this encoding uses."""
        return frozenset(
            hook
            for hook in self.HOOKS
            if getattr(type(self), hook) is not getattr(PositionEncoding, hook)
        )

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters exempt from weight decay, as timm's models do."""
        # Decay of tables pulls all positions together; iRPE's authors (supplement 2) exempt theirs.
        names = (name for name, _ in self.named_parameters())
        return {name for name in names if name.partition(".")[0] in self.NO_WEIGHT_DECAY}

    def forward(self, method: str, *arguments: Any) -> Any:
        """Run a method by name, for `through_call`."""
        return getattr(self, method)(*arguments)

    def tokens(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return token embeddings (batch, tokens, width) with positions, once at the input."""
        return x

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, context: PositionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of W^Q, W^K and W^V of one layer, each (batch, tokens, width).

        Where the context has `projections`, key and value are projected already (`shares_keys`).
        """
        return query, key, value

    def rotate(self, query: Tensor, key: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        """Return projected queries and keys, each (batch, heads, tokens, head width), turned."""
        return query, key

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        """Return a term of the logits (batch, heads, queries, keys) after 1/sqrt(head width)."""
        return None

    def value(self, attention: Tensor, context: PositionContext) -> Tensor | None:
        """Return a term of the output (batch, heads, queries, head width), from the weights."""
        return None

    def kernel_terms(self, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the tables projected for `attend`, the same in all its calls (`has_kernel`)."""
        raise NotImplementedError

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        context: PositionContext,
        scale: float | None = None,
    ) -> Tensor:
        """Return the whole attention, (B, Q, width), hooks included (`has_kernel`).

        Args:
            query: (B, Q, width), projected, without the terms of `inputs`.
            key: (B, K, width), the same.
            value: (B, K, width), the same.
            weights: of the three projections.
            mask: (B, K) bool, True = may be attended to.
            scale: of the products of queries and keys; None: 1 / sqrt(head width).
        """
        raise NotImplementedError


def offers(encoding: nn.Module, form: str) -> bool:
    """Return whether an encoding has a faster form, such as "has_kernel"; False for a wrapper."""
    return isinstance(encoding, PositionEncoding) and bool(getattr(encoding, form))


def hooks_of(encoding: nn.Module) -> frozenset[str]:
    """Return the hooks of an encoding, also inside a wrapper."""
    # Such as activation checkpointing, `torch.compile`, or peft's `modules_to_save`.
    if isinstance(encoding, PositionEncoding):
        return encoding.hooks
    for module in encoding.modules():
        if isinstance(module, PositionEncoding):
            return module.hooks
    raise TypeError(f"{type(encoding).__name__} is no PositionEncoding and wraps none")


class ByModality(PositionEncoding):
    """Router of every hook to the encoding of the current stream, `context.text_queries`.

    A stream without an encoding, or with one that lacks a hook, is left as it is.

    Args:
        text: encoding of the text stream, or None.
        image: encoding of the image stream, or None.
    """

    def __init__(self, text: PositionEncoding | None, image: PositionEncoding | None) -> None:
        super().__init__()
        self.text, self.image = text, image

    @property
    def hooks(self) -> frozenset[str]:
        """Return the hooks of either side."""
        sides = [side for side in (self.text, self.image) if side is not None]
        return frozenset[str]().union(*(hooks_of(side) for side in sides))

    def tokens(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return token embeddings of one stream; see the base."""
        return self._dispatch(PositionEncoding.tokens, context, x)

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, context: PositionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what enters the projections of one stream; see the base."""
        return self._dispatch(PositionEncoding.inputs, context, query, key, value)

    def rotate(self, query: Tensor, key: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        """Return projected queries and keys of one stream; see the base."""
        return self._dispatch(PositionEncoding.rotate, context, query, key)

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        """Return the bias of one stream's logits; see the base."""
        return self._dispatch(PositionEncoding.bias, context, query, key)

    def value(self, attention: Tensor, context: PositionContext) -> Tensor | None:
        """Return the addition to one stream's output; see the base."""
        return self._dispatch(PositionEncoding.value, context, attention)

    def _dispatch(
        self, hook: Callable[..., Any], context: PositionContext, *tensors: Tensor
    ) -> Any:
        # Both streams share the cross-modal projections but not positions.
        side = self.text if context.text_queries else self.image
        if side is None or hook.__name__ not in hooks_of(side):
            return hook(self, *tensors, context)
        return through_call(side, hook, *tensors, context)


Sizes = ParamSpec("Sizes")


def cached_constant(maxsize: int) -> Callable[[Callable[Sizes, Tensor]], Callable[Sizes, Tensor]]:
    """Cache the latest results of a function of sizes, names, dtypes, devices (all hashable)."""

    def decorate(function: Callable[Sizes, Tensor]) -> Callable[Sizes, Tensor]:
        def compute(*sizes: Sizes.args, **options: Sizes.kwargs) -> Tensor:
            # Modes whose tensors allow no autograd (inference) or are fake (`torch.export`).
            with torch.inference_mode(False), _disable_current_modes():
                return function(*sizes, **options)

        cached = cast("Callable[Sizes, Tensor]", functools.lru_cache(maxsize=maxsize)(compute))

        def constant(*sizes: Sizes.args, **options: Sizes.kwargs) -> Tensor:
            return cached(*sizes, **options)

        # Dynamo inlines the result as a constant, one per sizes.
        # `torch.compiler.assume_constant_result` does no more, but imports the compiler first.
        constant._dynamo_marked_constant = True  # type: ignore[attr-defined]

        @functools.wraps(function)
        def wrapper(*sizes: Sizes.args, **options: Sizes.kwargs) -> Tensor:
            if torch.compiler.is_dynamo_compiling():
                concrete = {name: _concrete(value) for name, value in options.items()}
                return constant(*(_concrete(size) for size in sizes), **concrete)
            return cached(*sizes, **options)

        return wrapper

    return decorate


def _concrete(size: Any) -> Any:
    # `torch.compile(dynamic=True)` has symbols for sizes. The import takes half a second.
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    if isinstance(size, tuple):
        return tuple(_concrete(part) for part in size)
    return guard_scalar(size) if isinstance(size, int | float) else size


def mix(tokens: Tensor, positions: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return alpha * token + beta * position by channel: PEmixer (ViTARC, papers.md#vitarc-v8).

    `tokens` and `positions` are (..., width) and broadcast, `alpha` and `beta` (width,). The result
    has the tokens' type.
    """
    # Three roundings to bfloat16 would add up.
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    mixed = alpha.to(dtype) * tokens.to(dtype) + beta.to(dtype) * positions.to(dtype)
    return mixed.to(tokens.dtype)


class TokenEncoding(PositionEncoding):
    """Base of the encodings that act once, at the token embeddings.

    A subclass's `embeddings` gives a vector for every token after the prefix, which gets zeros.
    Vectors are added or, with `mixer`, weighted by two learned vectors of the model's width, which
    scale prefix tokens, too.

    Args:
        name: for error messages.
        width: channels of the tokens.
        mixer: learn the weights `alpha` of the tokens and `beta` of the positions.
    """

    def __init__(self, name: str, width: int, mixer: bool = False) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"{name}: width {width} has no channels")
        self.name, self.width = name, width
        # PEmixer starts as a plain addition (papers.md#vitarc-v8).
        self.alpha = nn.Parameter(torch.ones(width)) if mixer else None
        self.beta = nn.Parameter(torch.ones(width)) if mixer else None

    def embeddings(self, x: Tensor, context: PositionContext) -> Tensor:
        """Return vectors of the tokens after the prefix: (B or 1, T - prefix, width).

        Only shape, number type and device of x (B, T, width) count.
        """
        raise NotImplementedError

    def tokens(self, x: Tensor, context: PositionContext) -> Tensor:
        """Add or mix in the positions: (B, T, width), same shape and number type."""
        if x.ndim != 3 or x.shape[-1] != self.width:
            raise ValueError(
                f"{self.name} is for tokens (batch, tokens, {self.width}), not {tuple(x.shape)}"
            )
        embeddings = self.embeddings(x, context)
        if embeddings.shape[0] not in (1, x.shape[0]):
            raise ValueError(
                f"{self.name}: positions of {embeddings.shape[0]} images do not fit a batch of "
                f"{x.shape[0]}"
            )
        embeddings = functional.pad(embeddings, (0, 0, context.prefix_tokens, 0))
        if self.alpha is None or self.beta is None:
            return x + embeddings.to(x.dtype)
        return mix(x, embeddings, self.alpha, self.beta)
