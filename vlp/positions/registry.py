"""Registry of encodings by name, with their options.

Another package's encoding gets a name by the decorator `register_position`, in a plugin
(`vlp.config.load_plugins`) or in the module of an entry point of the group `vlp.positions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from vlp.config import load_plugins, plugin_of
from vlp.positions.alibi2d import DirectionalDistance
from vlp.positions.anchor_encoding import AlignmentBias, AnchorPosition
from vlp.positions.base import PositionEncoding
from vlp.positions.cope import ContextualPosition
from vlp.positions.fourier import FourierPosition, MLPPosition
from vlp.positions.huang import HuangPosition
from vlp.positions.irpe import RelativePosition
from vlp.positions.learned import LearnedBoxPosition, LearnedGridPosition, LearnedPosition
from vlp.positions.object import ObjectPosition
from vlp.positions.options import (
    EncodingOption,
    check_options,
    kind_of,
    parameters_of,
    suggestion,
    untyped_parameters,
)
from vlp.positions.rotary import RotaryAxial, RotaryMixed, RotarySequence
from vlp.positions.sasa import SasaPosition
from vlp.positions.semantic import SemanticPosition
from vlp.positions.shaw import ShawPosition
from vlp.positions.sine import MDSinePosition, SinePosition
from vlp.positions.transformer_xl import TransformerXLPosition

ROLES = {"q": "query", "k": "key", "v": "value"}
# This package's encodings of cross-attention between an image and a text.
BUILT_IN = ("alignment", "anchor", "uniform")
# All encodings that act in cross-attention alone; `register_position` adds others.
CROSS_MODAL = [*BUILT_IN]
ENTRY_POINTS = "vlp.positions"

Encoding = TypeVar("Encoding", bound=type[PositionEncoding])

_ENCODINGS: dict[str, Callable[..., PositionEncoding]] = {
    "alibi-2d": DirectionalDistance,
    "alignment": AlignmentBias,
    "anchor": AnchorPosition,
    "cope": ContextualPosition,
    "fourier": FourierPosition,
    "huang": HuangPosition,
    "irpe-cross": partial(RelativePosition, "cross"),
    "irpe-euclidean": partial(RelativePosition, "euclidean"),
    "irpe-product": partial(RelativePosition, "product"),
    "irpe-quantization": partial(RelativePosition, "quantization"),
    "learned-1d": LearnedPosition,
    "learned-2d": LearnedGridPosition,
    "learned-4d": LearnedBoxPosition,
    "md-sine": MDSinePosition,
    "mlp": MLPPosition,
    "object": ObjectPosition,
    "rope-1d": RotarySequence,
    "rope-axial": RotaryAxial,
    "rope-mixed": RotaryMixed,
    "sape": SemanticPosition,
    "sasa": SasaPosition,
    "shaw": ShawPosition,
    "sine-1d": partial(SinePosition, 1),
    "sine-2d": partial(SinePosition, 2),
    "sine-4d": partial(SinePosition, 4),
    "transformer-xl": TransformerXLPosition,
    # `uniform` is `anchor` on constant paths, which the model computes (papers.md#ace-a26).
    "uniform": AnchorPosition,
}


def register_position(name: str, cross_modal: bool = False) -> Callable[[Encoding], Encoding]:
    """Register an encoding's class by name, as a decorator that returns the class unchanged.

    The constructor's parameters are the encoding's options; each needs a type annotation, by which
    values are checked. The model sets those called `width`, `heads` and `grid`.

    Args:
        name: lower-case words with hyphens, such as "my-bias".
        cross_modal: the encoding acts in the cross-attention between image and text, where its
            context has `anchors`.

    Raises:
        ValueError: a malformed or registered name, a class without hooks, or an untyped option.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9.]+)*", name):
        raise ValueError(
            f"{name!r} is no name of an encoding: use lower-case words with hyphens, as in "
            "'my-bias'"
        )

    def register(encoding: Encoding) -> Encoding:
        if not issubclass(encoding, PositionEncoding):
            raise ValueError(f"{name}: {encoding.__name__} is no PositionEncoding")
        if not any(
            getattr(encoding, hook) is not getattr(PositionEncoding, hook)
            for hook in PositionEncoding.HOOKS
        ):
            hooks = ", ".join(PositionEncoding.HOOKS)
            raise ValueError(f"{name}: {encoding.__name__} has none of the hooks {hooks}")
        if untyped := untyped_parameters(encoding):
            raise ValueError(
                f"{name}: {encoding.__name__}'s option {untyped[0]!r} has no type; write it as in "
                f"`def __init__(self, {untyped[0]}: int = 1)`"
            )
        # The same class may be registered again, as when a cell of a notebook runs twice.
        if name in _ENCODINGS and _source(position_class(name)) != _source(encoding):
            raise ValueError(f"a position encoding {name!r} is registered already")
        _ENCODINGS[name] = encoding
        if cross_modal and name not in CROSS_MODAL:
            CROSS_MODAL.append(name)
        return encoding

    return register


def list_positions() -> Sequence[str]:
    """Return the names of all registered encodings, sorted."""
    _load_external()
    return tuple(sorted(_ENCODINGS))


def plugins_of(names: Iterable[str]) -> dict[str, str]:
    """Return the plugin module of each encoding that a plugin registered, by encoding name."""
    modules = {name: plugin_of(position_class(name)) for name in names}
    return {name: module for name, module in modules.items() if module is not None}


def create_position(name: str, **options: Any) -> PositionEncoding:
    """Create a position encoding by name.

    Raises:
        ValueError: unknown name, unknown or missing options, or values of another type.
    """
    make = _factory(name)
    return make(**check_options(f"position encoding {name!r}", make, options))


def describe_options(name: str) -> list[EncodingOption]:
    """Return an encoding's options with types and defaults."""
    make = _factory(name)
    options = []
    for option, parameter in parameters_of(make).items():
        is_required = parameter.default is parameter.empty
        default = ... if is_required else parameter.default
        options.append(EncodingOption(option, kind_of(make, option), default))
    return options


def position_options(name: str) -> frozenset[str]:
    """Return the names of an encoding's options, such as width, heads, grid, roles."""
    return frozenset(parameters_of(_factory(name)))


def create_fitting_position(
    name: str, sizes: Mapping[str, Any], **options: Any
) -> PositionEncoding:
    """Create a position encoding with `options`, and with those `sizes` that are its options.

    `options` take precedence.
    """
    option_names = position_options(name)
    fitting_sizes = {size: value for size, value in sizes.items() if size in option_names}
    return create_position(name, **{**fitting_sizes, **options})


def with_roles(
    name: str,
    on: str | None,
    options: Mapping[str, Any],
    option_names: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return `options` with the letters `on` of "qkv" as the encoding's option `roles` or `mode`.

    on: None adds no option. option_names: of the encoding; None looks them up.
    """
    if on is None:
        return dict(options)
    option_names = position_options(name) if option_names is None else option_names
    if not on or set(on) - set(ROLES) or len(set(on)) < len(on):
        raise ValueError(f"{name}: on={on!r} must be different letters of 'qkv'")
    roles = [role for letter, role in ROLES.items() if letter in on]
    option: str
    value: Any
    if "roles" in option_names:
        option, value = "roles", tuple(roles)
    elif "mode" in option_names:
        if "value" in roles:
            raise ValueError(f"{name} acts on queries and keys, not on={on!r}")
        option, value = "mode", roles[0] if len(roles) == 1 else "both"
    else:
        raise ValueError(f"{name} has no choice of queries, keys and values: on={on!r}")
    if option in options:
        raise ValueError(
            f"{name}: on={on!r} and {option}={options[option]!r} exclude each other: set one"
        )
    return {**options, option: value}


def acts_on_tokens(name: str) -> bool:
    """Return whether an encoding acts once, on the token embeddings, not in attention layers."""
    return position_class(name).tokens is not PositionEncoding.tokens


def causal_positions() -> Sequence[str]:
    """Return the names of encodings that causal attention can use."""
    return tuple(name for name in list_positions() if position_class(name).causal)


def position_class(name: str) -> type[PositionEncoding]:
    """Return the class of an encoding."""
    make = _factory(name)
    encoding: Any = make.func if isinstance(make, partial) else make
    return encoding


def _source(encoding: type) -> tuple[str, str]:
    return encoding.__module__, encoding.__qualname__


def _factory(name: str) -> Callable[..., PositionEncoding]:
    """Return the function or class that creates an encoding; raise ValueError for other names."""
    if name not in _ENCODINGS:
        _load_external()
    if name not in _ENCODINGS:
        raise ValueError(
            f"unknown position encoding {name!r}{suggestion(name, _ENCODINGS)}; known: "
            f"{', '.join(sorted(_ENCODINGS))}; name the module of your own encoding with --plugin, "
            "the key `plugins` or the variable VLP_PLUGINS"
        )
    return _ENCODINGS[name]


def _load_external() -> None:
    # Plugins and installed packages register encodings when they are imported.
    load_plugins()
    _load_installed()


@cache
def _load_installed() -> None:
    for point in entry_points(group=ENTRY_POINTS):
        import_module(point.module)
