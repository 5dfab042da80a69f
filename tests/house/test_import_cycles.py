"""Modules import each other in no cycle; the layers are import-linter's (`make contracts`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from product import PRODUCT, tree_of

# A script's `main` runs `vlp COMMAND`; the command imports the script when it runs.
DOOR = "launch.cli.main"


def imported_by(name: str, path: Path) -> set[str]:
    """Return the modules of the product that a module imports, at its top or inside functions."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in run_time_nodes(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            parts = {f"{module}.{alias.name}" for alias in node.names}
            found |= parts & PRODUCT.keys()
            if not parts <= PRODUCT.keys():
                found.add(module)
    return (found & PRODUCT.keys()) - {name}


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those under `if TYPE_CHECKING:`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from run_time_nodes(child)


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        open_nodes.append(node)
        for target in graph[node]:
            if target not in order:
                visit(target)
            if target in open_nodes:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == order[node]:
            component = open_nodes[open_nodes.index(node) :]
            del open_nodes[open_nodes.index(node) :]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in order:
            visit(node)
    return found


def test_modules_import_each_other_in_no_cycle():
    graph = {name: imported_by(name, path) for name, path in PRODUCT.items()}
    for name, imported in graph.items():
        if name.startswith("launch.") and name.count(".") == 1:
            imported.discard(DOOR)
    assert [sorted(cycle) for cycle in cycles(graph)] == []


def test_a_cycle_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
