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

# Options that models set by themselves.
SIZES = ("width", "heads", "grid", "length", "causal")


class EncodingOption(NamedTuple):
    """Option of an encoding: `kind` is its annotation, `default` is `...` if required."""

    name: str
    kind: str
    default: Any


def require_choice(label: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError for a value of the option `label` that is not among its choices."""
    if value not in choices:
        raise ValueError(f"unknown {label} {value!r}; one of {', '.join(choices)}")


def head_width(name: str, width: int, heads: int) -> int:
    """Return width / heads, or raise ValueError with the encoding's name if it is not whole."""
    if width % heads:
        raise ValueError(f"{name}: {heads} heads do not divide width {width}")
    return width // heads


def require_defaults(label: str, make: Callable[..., Any], reason: str, **options: Any) -> None:
    """Raise ValueError for an option that has no effect and is not the default.

    reason: completes "has no effect ..." in the message.
    """
    parameters = parameters_of(make)
    for name, value in options.items():
        if value != parameters[name].default:
            raise ValueError(f"{label}: {name}={value!r} has no effect {reason}")


def parameters_of(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a callable by name, without `*args` and `**kwargs`."""
    parameters = inspect.signature(make).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def check_options(
    label: str, make: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Check that options are known, complete and of their types, and return them.

    An int becomes a float where the option's type is float, and a list a tuple.
    """
    parameters = parameters_of(make)
    option_names, checked = ", ".join(parameters), dict(options)
    for name, value in options.items():
        if name not in parameters:
            hint = suggestion(name, parameters)
            raise ValueError(f"{label}: no option {name!r}{hint}; options: {option_names}")
        try:
            checked[name] = _validate(make, name, value)
        except ValidationError:
            kind = kind_of(make, name)
            raise ValueError(f"{label}: the option {name!r} takes {kind}, not {value!r}") from None
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise ValueError(f"{label}: the option {name!r} is missing; options: {option_names}")
    return checked


def untyped_parameters(make: type) -> list[str]:
    """Return the parameters of a constructor that have no type annotation."""
    hints = _type_hints(make)
    return [name for name in parameters_of(make) if name not in hints]


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return " (did you mean 'X'?)" for the most similar choice X, or "" without a similar X."""
    names = list(choices)
    completions = [choice for choice in names if choice.startswith(name)]
    matches = completions[:1] or difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _validate(make: Callable[..., Any], name: str, value: Any) -> Any:
    """Check a value against its option's type, and return it as `check_options` does."""
    adapter = _adapter(make, name)
    default = parameters_of(make)[name].default
    if adapter is None or (value is None and default is None):
        return value
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        adapter.validate_python(value)
        return value
    # Strict, but as JSON, as in a configuration file: a list is valid for a tuple.
    parsed = adapter.validate_json(text, strict=True)
    return parsed if isinstance(parsed, float | tuple) else value


def kind_of(make: Callable[..., Any], name: str) -> str:
    """Return an option's annotation; for a `Literal` its values, as in "'key' | 'query'"."""
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
        # An annotation may be imported under TYPE_CHECKING alone.
        return {}


@cache
def _adapter(make: Callable[..., Any], name: str) -> TypeAdapter[Any] | None:
    """Return the validator of an option's type; None without an annotation."""
    annotation = _type_hints(make).get(name)
    if annotation is None:
        return None
    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        # A pydantic model has its own configuration and refuses another.
        return TypeAdapter(annotation)


class PositionConfig(Config):
    """Name and options of a position encoding."""

    name: str = Field(description="of one encoding in vlp.positions.list_positions()")
    # `attach` calls this `on`, which YAML 1.1 reads as true.
    roles: str | None = Field(None, description="letters of q, k, v, where the encoding has them")
    options: Mapping[str, Any] = Field({}, description="of the encoding, as in {theta: 10}")
