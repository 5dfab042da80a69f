"""The configuration reference says of every key what it means, its type, its range, its default."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Annotated, Any

import pytest
from product import ROOT
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

import evaluation
import vlp
from vlp.config import Config

ANY_NUMBER = {
    # The paper's own constants, of either sign.
    ("ContrastiveConfig", "margin"),
    ("ContrastiveConfig", "bias"),
    ("TokenTermConfig", "alpha"),
    ("TokenTermConfig", "beta"),
    # Figures of papers, and a layer counted from either end.
    ("RowConfig", "paper"),
    ("GroundingJob", "layer"),
}
"""Keys that take every number: none has a range to say."""

SIGNS = {">": 0.0, "≥": -1.0, "<": 0.0, "≤": 1.0}
"""How far beyond a bound the nearest whole number lies that it refuses."""


def read_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_reference", ROOT / "docs/gen_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = read_reference()


def reached() -> list[type[Config]]:
    found = {}
    for address in reference.RUN_CONFIGS.values():
        module, _, name = address.partition(":")
        for kind in reference._reachable(getattr(importlib.import_module(module), name)):
            found[kind] = None
    return list(found)


REACHED = reached()
KEYS = [(kind, name, field) for kind in REACHED for name, field in kind.model_fields.items()]


def below(kind: type[Config]) -> Iterator[type[Config]]:
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def test_every_configuration_of_the_packages_is_in_the_reference() -> None:
    for package in (vlp, evaluation):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    own = {
        kind for kind in below(Config) if kind.__module__.partition(".")[0] in ("vlp", "evaluation")
    }
    bases = {base for kind in REACHED for base in kind.__mro__}
    assert [kind.__name__ for kind in own if kind not in bases] == []
    assert len(KEYS) > 600


def test_every_key_has_a_meaning_a_type_and_a_default() -> None:
    page = reference._configuration_page()
    for kind, name, field in KEYS:
        where = f"{kind.__name__}.{name}"
        meaning = re.sub(r"\W+", " ", reference._meaning(kind, name)).split()
        assert len(meaning) > 1, f"{where}: {' '.join(meaning)!r} says no more than the key"
        assert set(meaning) != set(name.split("_")), where
        assert not re.search(r"typing|<class|Annotated|ForwardRef", reference._type(field)), where
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]), row
        assert reference._default(field) not in ("", "PydanticUndefined"), where


def test_every_number_has_a_range() -> None:
    without = {
        (kind.__name__, name)
        for kind, name, field in KEYS
        if re.search(r"\bany (number|integer)\b", reference._type(field))
    }
    assert without == ANY_NUMBER


def ranges() -> Iterator[Any]:
    """Keys of one number, with the bounds that the reference prints."""
    for kind, name, field in KEYS:
        said = reference._type(field)
        if found := re.match(r"(number|integer) ((?:[>≥<≤] [-\w.+]+(?: and )?)+)", said):
            yield pytest.param(field, found[2], id=f"{kind.__name__}.{name}")


@pytest.mark.parametrize(("field", "bounds"), ranges())
def test_what_is_said_is_what_is_refused(field: FieldInfo, bounds: str) -> None:
    check = TypeAdapter(Annotated[field.annotation, None, *field.metadata])  # type: ignore[valid-type]
    for sign, bound in re.findall(r"([>≥<≤]) (\S+)", bounds):
        with pytest.raises(ValidationError):
            check.validate_python(float(bound) + SIGNS[sign])


@pytest.mark.parametrize("name", reference.list_positions())
def test_every_option_of_an_encoding_has_a_meaning_and_a_type(name: str) -> None:
    summary, meanings = reference.encoding_docs(name)
    assert len(summary) > 20
    for option in reference.describe_options(name):
        assert len(meanings[option.name].split()) > 1, option
        assert "_empty" not in option.kind
