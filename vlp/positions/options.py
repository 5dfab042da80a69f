"""Options of encodings, checked against the types of their constructors."""

from __future__ import annotations

import difflib
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

from vlp.config import Config

# Options that a model fills in.
SIZES = ("width", "heads", "grid", "length", "causal")


class EncodingOption(NamedTuple):
    """One option: `kind` is its type as the code writes it, `default` `...` for a required one."""

    name: str
    kind: str
    default: Any


def require_choice(kind: str, name: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError for a name, of a kind such as "layout", that is not among the choices."""
    if name not in choices:
        raise ValueError(f"unknown {kind} {name!r}; one of {', '.join(choices)}")


def require_defaults(label: str, make: Callable[..., Any], reason: str, **options: Any) -> None:
    """Raise ValueError for an option that nothing reads and that is not the default."""
    parameters = parameters_of(make)
    for name, value in options.items():
        if value != parameters[name].default:
            raise ValueError(f"{label}: {name}={value!r} has no effect {reason}")


def options_of(make: Callable[..., Any]) -> list[EncodingOption]:
    """Return the options of what makes an encoding, in order."""
    return [
        EncodingOption(
            name,
            _kind(make, name),
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for name, parameter in parameters_of(make).items()
    ]


def parameters_of(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that have names of their own."""
    parameters = inspect.signature(make).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def checked_options(
    label: str, make: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Check that options are known, complete and of their types, and return them.

    A whole number becomes a float where the type is.
    """
    parameters = parameters_of(make)
    option_names, checked = ", ".join(parameters), dict(options)
    for name, value in options.items():
        if name not in parameters:
            hint = nearest(name, parameters)
            raise ValueError(f"{label}: no option {name!r}{hint}; options: {option_names}")
        try:
            checked[name] = _validate(make, name, value)
        except ValidationError:
            kind = _kind(make, name)
            raise ValueError(f"{label}: the option {name!r} takes {kind}, not {value!r}") from None
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise ValueError(f"{label}: the option {name!r} is missing; options: {option_names}")
    return checked


def missing_types(make: type) -> list[str]:
    """Return the parameters of a constructor that have no type."""
    hints = _type_hints(make)
    return [name for name, parameter in parameters_of(make).items() if name not in hints]


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a hint at the most similar name, or nothing."""
    names = list(choices)
    extensions = [other for other in names if other.startswith(name)]
    matches = extensions[:1] or difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _validate(make: Callable[..., Any], name: str, value: Any) -> Any:
    """Check a value against its option's type; a list may stand for a tuple, and 1 for 1.0."""
    constructor = make.func if isinstance(make, partial) else make
    adapter = _adapter(constructor, name)
    default = parameters_of(make)[name].default
    if adapter is None or (value is None and default is None):
        return value
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        adapter.validate_python(value)
        return value
    # As if read from a file: strict, except that JSON has lists for tuples.
    typed = adapter.validate_json(text, strict=True)
    return typed if isinstance(typed, float) else value


def _kind(make: Callable[..., Any], name: str) -> str:
    # A choice is described by its values, another type as the code writes it.
    annotation = _type_hints(make).get(name)
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(map(repr, typing.get_args(annotation)))
    source = parameters_of(make)[name].annotation
    return source if isinstance(source, str) else inspect.formatannotation(source)


def _type_hints(make: Callable[..., Any]) -> dict[str, Any]:
    factory: Any = make.func if isinstance(make, partial) else make
    try:
        function: Any = getattr(factory, "__init__") if isinstance(factory, type) else factory  # noqa: B009
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        # A type that is imported for type checkers alone.
        return {}


@cache
def _adapter(constructor: Callable[..., Any], name: str) -> TypeAdapter[Any] | None:
    kind = _type_hints(constructor).get(name)
    if kind is None:
        return None
    try:
        return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        # A pydantic model, which brings its own configuration.
        return TypeAdapter(kind)


class PositionConfig(Config):
    """One encoding of `vlp.positions.list_positions()`."""

    name: str = Field(description="of one encoding in vlp.positions.list_positions()")
    # Not `on`, as `attach` calls it: YAML 1.1 reads that as true.
    roles: str | None = Field(None, description="letters of q, k, v, where the encoding has them")
    options: Mapping[str, Any] = Field({}, description="of the encoding, as in {theta: 10}")
