"""YAML as configurations are written: numbers of YAML 1.2, no key twice."""

from __future__ import annotations

import re
from typing import Any

import yaml

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_NUMBERS = {
    _INT: re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    _FLOAT: re.compile(
        r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
}
"""Plain scalars by tag, as YAML 1.2's core schema has them."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 safe loader with the numbers of 1.2, which refuses a key given twice.

    A merge (`<<: *name`) brings defaults, which keys of the mapping's own replace.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` would read as a number."""


_Loader.add_constructor(_INT, _Loader.construct_yaml_int)
for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        start: [(tag, pattern) for tag, pattern in pairs if tag not in _NUMBERS]
        for start, pairs in _kind.yaml_implicit_resolvers.items()
    }
    for _tag, _pattern in _NUMBERS.items():
        _kind.add_implicit_resolver(_tag, _pattern, [*"-+.0123456789"])


def parse_yaml(text: str) -> Any:
    """Read YAML as configurations are read: a number may be written `1e-4`.

    Raises:
        yaml.YAMLError: it is not YAML, or names a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # lists as keys, dates that are none, nests too deep
        raise yaml.YAMLError(str(error) or type(error).__name__) from error


def where_and_what(error: yaml.YAMLError) -> str:
    """Say in a line what is wrong, and where."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def dump_yaml(values: Any) -> str:
    """Write values as YAML that `parse_yaml` reads back unchanged."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)
