"""Every encoding by name, and what each of them can be told."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from vlp.positions.alibi2d import DirectionalDistance
from vlp.positions.alignment import AlignmentBias
from vlp.positions.anchor_encoding import AnchorPosition
from vlp.positions.base import PositionEncoding
from vlp.positions.cope import ContextualPosition
from vlp.positions.fourier import FourierPosition, MLPPosition
from vlp.positions.huang import HuangPosition
from vlp.positions.irpe import RelativePosition
from vlp.positions.learned import LearnedBoxPosition, LearnedGridPosition, LearnedPosition
from vlp.positions.object import ObjectPosition
from vlp.positions.rotary_encoding import RotaryAxial, RotaryMixed, RotarySequence
from vlp.positions.sasa import SasaPosition
from vlp.positions.semantic import SemanticPosition
from vlp.positions.shaw import ShawPosition
from vlp.positions.sine import MDSinePosition, SinePosition
from vlp.positions.transformer_xl import TransformerXLPosition

ROLES = {"q": "query", "k": "key", "v": "value"}
CROSS_MODAL = ("alignment", "anchor", "uniform")
"""Encodings between an image and a text, of no use within either."""

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
    # Uniform is ACE-RPE fed with constant paths (papers.md#ace-a26): the same module, another
    # field.
    "uniform": AnchorPosition,
}


def list_positions() -> Sequence[str]:
    """Return the names that `create_position` knows."""
    return tuple(sorted(_ENCODINGS))


def create_position(name: str, **options: Any) -> PositionEncoding:
    """Make a position encoding by name.

    Raises:
        ValueError: unknown name, or options that this encoding lacks or misses; the message lists
            the known ones.
    """
    make = _named(name)
    signature = inspect.signature(make)
    try:
        signature.bind(**options)
    except TypeError as problem:
        known = ", ".join(signature.parameters)
        raise ValueError(f"position encoding {name!r}: {problem}; options: {known}") from None
    return make(**options)


def position_options(name: str) -> frozenset[str]:
    """Return the options of `create_position` for a name, such as width, heads, grid, roles.

    Raises:
        ValueError: unknown name.
    """
    return frozenset(inspect.signature(_named(name)).parameters)


def create_fitting_position(
    name: str, sizes: Mapping[str, Any], **options: Any
) -> PositionEncoding:
    """Make a position encoding with those of `sizes` that it takes; options win over them.

    Raises:
        ValueError: as `create_position`.
    """
    takes = position_options(name)
    fitting = {size: value for size, value in sizes.items() if size in takes}
    return create_position(name, **{**fitting, **options})


def place_roles(
    name: str, on: str | None, options: Mapping[str, Any], takes: Collection[str] | None = None
) -> dict[str, Any]:
    """Options with the letters of `on` as the encoding calls them.

    Args:
        name: of the encoding.
        on: letters of "qkv": what encodings call `roles`, and those without that, as `sape`, call
            `mode`; None leaves the encoding's default.
        options: the others.
        takes: what the encoding takes; None looks the name up.

    Raises:
        ValueError: other letters, an encoding without the choice, or options that say it, too.
    """
    if on is None:
        return dict(options)
    takes = position_options(name) if takes is None else takes
    if not on or set(on) - set(ROLES) or len(set(on)) < len(on):
        raise ValueError(f"{name}: on={on!r} is not made of letters of 'qkv', each once")
    roles = [role for letter, role in ROLES.items() if letter in on]
    option: str
    value: Any
    if "roles" in takes:
        option, value = "roles", tuple(roles)
    elif "mode" in takes:
        if "value" in roles:
            raise ValueError(f"{name} acts on queries and keys, not on={on!r}")
        option, value = "mode", roles[0] if len(roles) == 1 else "both"
    else:
        raise ValueError(f"{name} has no choice of queries, keys and values: on={on!r}")
    if option in options:
        raise ValueError(f"{name}: on={on!r} and {option}={options[option]!r} at once")
    return {**options, option: value}


def acts_on_tokens(name: str) -> bool:
    """Return whether an encoding acts once on the tokens; others act in every attention layer.

    Raises:
        ValueError: unknown name.
    """
    return _class(name).tokens is not PositionEncoding.tokens


def causal_positions() -> Sequence[str]:
    """Return names of encodings that can act in attention which sees no later tokens."""
    return tuple(name for name in list_positions() if _class(name).causal)


def _class(name: str) -> type[PositionEncoding]:
    make = _named(name)
    made: Any = make.func if isinstance(make, partial) else make
    return made


def _named(name: str) -> Callable[..., PositionEncoding]:
    if name not in _ENCODINGS:
        raise ValueError(
            f"unknown position encoding {name!r}; known: {', '.join(list_positions())}"
        )
    return _ENCODINGS[name]
