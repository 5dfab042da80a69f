"""Base of configurations, an open choice between them, and the error of those that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import CoreSchema, core_schema

from vlp.io import Redacted, as_url, redacted_values

Precision = Literal["float32", "bf16", "fp16"]
"""Number format of forward passes; parameters are float32 in any case."""


class ConfigError(Redacted, ValueError):
    """A configuration that cannot be used; the message is meant for the person at the terminal."""


def _local(path: str) -> str:
    if as_url(path) is not None:
        raise ValueError(f"{path} is a URL; name a folder on a disk here")
    return path


LocalPath = Annotated[str, AfterValidator(_local)]
"""A path that is written to, where a URL will not do."""


class Config(BaseModel):
    """Base of every configuration part: unknown keys are errors and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def model_dump(self, *, mode: str = "python", **options: Any) -> dict[str, Any]:
        """Return the values by key; mode "json", which is for files, leaves secrets out."""
        values = super().model_dump(mode=mode, **options)
        return redacted_values(values) if mode == "json" else values


AnyConfig = TypeVar("AnyConfig", bound=Config)


class Choice:
    """Mark of an annotated field: a key of its value names the configuration class.

    `Annotated[Base, Choice("kind", names, select)]` is a discriminated union that is open: names
    may be registered after the class that has the field.

    Args:
        key: of the value, such as "kind".
        names: all values of the key.
        select: the class of a name; a ValueError for an unknown one.
    """

    def __init__(
        self, key: str, names: Callable[[], Iterable[str]], select: Callable[[str], type[Config]]
    ) -> None:
        self._key, self._names, self._select = key, names, select

    def classes(self) -> Iterator[type[Config]]:
        """Yield every class that may be chosen."""
        return map(self._select, self._names())

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def _validate(self, value: Any) -> Config:
        if isinstance(value, Config):
            return value
        name = value.get(self._key) if isinstance(value, Mapping) else None
        if not isinstance(name, str):
            raise ValueError(f"`{self._key}` is missing; it is one of {', '.join(self._names())}")
        return self._select(name).model_validate(value)
