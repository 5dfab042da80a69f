"""Base classes of position encodings: five hooks, optional fast paths, PEmixer."""

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


def call_method(
    module: nn.Module,
    method: Callable[Concatenate[Any, Arguments], Result],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Result:
    """Call a module so that it runs a method, as in `call_method(layer, Layer.step, states)`.

    The module's `forward` gets the method's name and the arguments.
    """
    # ZeRO-3's hooks and wrappers (activation checkpointing, peft, `torch.compile`) act on calls of
    # a module, not on its other methods.
    result: Result = module(method.__name__, *arguments, **options)
    return result


@dataclass(frozen=True)
class PositionContext:
    """Context of the tokens that a hook acts on.

    Args:
        grid: (rows, columns) of the image patches, which follow the prefix tokens.
        prefix_tokens: number of leading tokens without a position, such as [CLS].
        coordinates: of tokens that are not on a grid, (B or 1, tokens after the prefix, C), in
            shares of the image's width and height: x, y (C = 2) or boxes x0, y0, x1, y1 (C = 4).
        grids: (B or 1, 2), rows and columns of each image, if the tokens with `coordinates` are
            patches of images of different sizes, padded to the same length.
        boxes: (B, K, 4), objects on the grid: x, y, width, height in cells; a row of width or
            height 0 is padding.
        anchors: for cross-attention, ACE-RPE's paths of the pairs.
        text_queries: True in the text stream and for text-to-image cross-attention.
        kernel_terms: for cross-attention, result of `PositionEncoding.kernel_terms`, the same for
            both directions.
        projections: key and value weights, if keys and values are already projected.
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
    """Base of every encoding; models and attention layers call the hooks that a subclass overrides.

    Most encodings override one of the five HOOKS. Some have fast paths, too: `inputs` on projected
    keys and values (`shares_keys`), and `attend` (`has_kernel`).
    """

    HOOKS: ClassVar[tuple[str, ...]] = ("tokens", "inputs", "rotate", "bias", "value")
    NO_WEIGHT_DECAY: ClassVar[tuple[str, ...]] = ()
    """Attributes with parameters exempt from weight decay, such as tables of positions."""
    causal: bool = False
    """True if the result for a pair of tokens depends on no later token."""
    shares_keys: ClassVar[bool] = False
    """True if hooks depend on the paths of a pair, not on the contents of its keys. Pairs of one
    image may then share projected keys and values, which `inputs` gets."""
    has_kernel: ClassVar[bool] = False
    """True if `attend` computes the whole attention in one GPU kernel."""

    def __init_subclass__(cls, **options: Any) -> None:
        # A fast path computes the hooks of its class: a subclass that overrides a hook must declare
        # the fast path again.
        super().__init_subclass__(**options)
        if any(hook in vars(cls) for hook in cls.HOOKS):
            for fast_path in ("shares_keys", "has_kernel"):
                if fast_path not in vars(cls):
                    setattr(cls, fast_path, False)

    @property
    def hooks(self) -> frozenset[str]:
        """Return the names of the overridden hooks, which are called."""
        return frozenset(
            hook
            for hook in self.HOOKS
            if getattr(type(self), hook) is not getattr(PositionEncoding, hook)
        )

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters exempt from weight decay, as timm's models do."""
        # Weight decay pulls the rows of a table together; iRPE's authors (supplement 2) exempt it.
        names = (name for name, _ in self.named_parameters())
        return {name for name in names if name.partition(".")[0] in self.NO_WEIGHT_DECAY}

    def forward(self, method: str, *arguments: Any) -> Any:
        """Run a method by name, for `call_method`."""
        return getattr(self, method)(*arguments)

    def tokens(self, x: Tensor, context: PositionContext) -> Tensor:
        """Add positions to token embeddings (batch, tokens, width), once at the model's input."""
        return x

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, context: PositionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of W^Q, W^K and W^V of one layer, each (batch, tokens, width).

        If the context has `projections`, key and value are already projected (`shares_keys`).
        """
        return query, key, value

    def rotate(self, query: Tensor, key: Tensor, context: PositionContext) -> tuple[Tensor, Tensor]:
        """Rotate projected queries and keys, each (batch, heads, tokens, head width)."""
        return query, key

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        """Return a term to add to the scaled logits, (batch, heads, queries, keys), or None."""
        return None

    def value(self, attention: Tensor, context: PositionContext) -> Tensor | None:
        """Return a term to add to the output (batch, heads, queries, head width), or None."""
        return None

    def kernel_terms(self, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Project the tables for `attend` by the query, key and value weights (`has_kernel`)."""
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
        """Compute the whole attention, (B, Q, width), hooks included (`has_kernel`).

        Args:
            query: (B, Q, width), projected, without the terms of `inputs`.
            key, value: (B, K, width), projected, without the terms of `inputs`.
            weights: of the query, key and value projections.
            mask: (B, K) bool, True = may be attended to.
            scale: of the products of queries and keys; None: 1 / sqrt(head width).
        """
        raise NotImplementedError


def has_fast_path(encoding: nn.Module, name: str) -> bool:
    """Return whether an encoding has "shares_keys" or "has_kernel"; False for a wrapper."""
    return isinstance(encoding, PositionEncoding) and bool(getattr(encoding, name))


def hooks_of(encoding: nn.Module) -> frozenset[str]:
    """Return the hooks of an encoding, also inside a wrapper."""
    # A wrapper may be activation checkpointing, `torch.compile`, or peft's `modules_to_save`.
    if isinstance(encoding, PositionEncoding):
        return encoding.hooks
    for module in encoding.modules():
        if isinstance(module, PositionEncoding):
            return module.hooks
    raise TypeError(f"{type(encoding).__name__} is no PositionEncoding and wraps none")


class ByModality(PositionEncoding):
    """An encoding for the text stream and one for the image stream (`context.text_queries`).

    A stream without an encoding is unchanged, also by hooks that its encoding lacks. Hooks act only
    through `call_method`.

    Args:
        text: encoding of the text stream, or None.
        image: encoding of the image stream, or None.
    """

    def __init__(self, text: PositionEncoding | None, image: PositionEncoding | None) -> None:
        super().__init__()
        self.text, self.image = text, image

    @property
    def hooks(self) -> frozenset[str]:
        """Return the hooks of both encodings."""
        encodings = [encoding for encoding in (self.text, self.image) if encoding is not None]
        return frozenset[str]().union(*map(hooks_of, encodings))

    def forward(self, method: str, *arguments: Any) -> Any:
        """Run a hook of the stream's encoding; every hook's last argument is the context."""
        if method not in self.HOOKS:
            return super().forward(method, *arguments)
        context: PositionContext = arguments[-1]
        encoding = self.text if context.text_queries else self.image
        if encoding is None or method not in hooks_of(encoding):
            return super().forward(method, *arguments)
        return encoding(method, *arguments)


def cached_constant(
    maxsize: int,
) -> Callable[[Callable[Arguments, Tensor]], Callable[Arguments, Tensor]]:
    """Cache the latest `maxsize` results of a function with hashable arguments, such as sizes."""

    def decorate(function: Callable[Arguments, Tensor]) -> Callable[Arguments, Tensor]:
        def compute(*arguments: Arguments.args, **options: Arguments.kwargs) -> Tensor:
            # A tensor of inference mode could not be used in autograd later, and one of
            # `torch.export` would be fake: compute outside of both.
            with torch.inference_mode(False), _disable_current_modes():
                return function(*arguments, **options)

        cached = cast("Callable[Arguments, Tensor]", functools.lru_cache(maxsize=maxsize)(compute))

        def constant(*arguments: Arguments.args, **options: Arguments.kwargs) -> Tensor:
            return cached(*arguments, **options)

        # Dynamo inlines the result of a marked function as a constant. The decorator
        # `torch.compiler.assume_constant_result` sets the same mark, but imports the compiler.
        constant._dynamo_marked_constant = True  # type: ignore[attr-defined]

        @functools.wraps(function)
        def wrapper(*arguments: Arguments.args, **options: Arguments.kwargs) -> Tensor:
            if torch.compiler.is_dynamo_compiling():
                concrete = {name: _concrete(option) for name, option in options.items()}
                return constant(*map(_concrete, arguments), **concrete)
            return cached(*arguments, **options)

        return wrapper

    return decorate


def _concrete(argument: Any) -> Any:
    # Under `torch.compile(dynamic=True)` sizes are symbols.
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # takes half a second

    if isinstance(argument, tuple):
        return tuple(map(_concrete, argument))
    return guard_scalar(argument) if isinstance(argument, int | float) else argument


def mix(tokens: Tensor, positions: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return alpha * token + beta * position by channel: PEmixer (ViTARC, papers.md#vitarc-v8).

    `tokens` and `positions` are (..., width) and broadcast, `alpha` and `beta` (width,). The result
    has the dtype of `tokens`.
    """
    # In float32, as three roundings to bfloat16 would add up.
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    mixed = alpha.to(dtype) * tokens.to(dtype) + beta.to(dtype) * positions.to(dtype)
    return mixed.to(tokens.dtype)


class TokenEncoding(PositionEncoding):
    """Base of the encodings that act once, on the token embeddings.

    A subclass's `embeddings` returns a vector for every token after the prefix, which is added to
    the token. With `mixer`, all tokens and the vectors are first weighted by channel.

    Args:
        name: of the encoding, for error messages.
        width: channels of the tokens.
        mixer: learn the weights (width,) `alpha` of the tokens and `beta` of the positions.
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

        Reads only the shape, dtype and device of x (B, T, width).
        """
        raise NotImplementedError

    def tokens(self, x: Tensor, context: PositionContext) -> Tensor:
        """Add or mix in the positions: (B, T, width) in the dtype of x."""
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
