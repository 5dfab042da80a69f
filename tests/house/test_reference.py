"""The configuration reference has every configuration and key of the packages."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from product import ROOT

import evaluation
import vlp
from vlp.config import Config
from vlp.models.config import AnchorOptions


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
    own -= {AnchorOptions}  # values of the mapping `options.anchor`, with a table of its own
    bases = {base for kind in REACHED for base in kind.__mro__}
    assert [kind.__name__ for kind in own if kind not in bases] == []
    page = reference._configuration_page()
    keys = [name for kind in REACHED for name in kind.model_fields]
    assert [name for name in keys if f"\n| `{name}` |" not in page] == []
