"""The house rules that no linter knows: words, sizes, names, import cycles, citations."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ROOT / "docs" / "explanation" / "papers.md"
TREES = ("vlp", "data_tools", "evaluation", "launch", "tests", "configs", "docs")
CITATION = re.compile(r"papers\.md((?:[\s#\"]*#[a-z0-9-]+(?:,| and| to)?)+)")


PACKAGES = ("vlp", "data_tools", "evaluation", "launch")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PRODUCT = {
    module_name(path): path for tree in PACKAGES for path in sorted((ROOT / tree).rglob("*.py"))
}


def imported_by(name: str, path: Path) -> set[str]:
    """Return the modules of the product that a module imports, at its top or inside functions."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in run_time_nodes(ast.parse(path.read_text())):
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
        checking = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not checking:
            yield from run_time_nodes(child)


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module."""
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


def sources(*suffixes: str) -> list[Path]:
    files = (path for tree in TREES for path in (ROOT / tree).rglob("*"))
    return sorted(path for path in files if path.suffix in suffixes)


def test_every_citation_of_a_paper_has_its_anchor():
    anchors = set(re.findall(r'<a id="([a-z0-9-]+)"></a>', PAPERS.read_text()))
    cited: dict[str, list[str]] = {}
    for path in sources(".py", ".yaml", ".md"):
        for citation in CITATION.findall(path.read_text()):
            for anchor in re.findall(r"#([a-z]+(?:-[a-z0-9]+)*)", citation):
                cited.setdefault(anchor, []).append(str(path.relative_to(ROOT)))
    assert len(cited) > 60
    assert {anchor: files for anchor, files in cited.items() if anchor not in anchors} == {}


def test_no_choice_is_cited_without_its_paper():
    number = re.compile(r"\b[Rr]eadings? [AFISV]\d")
    found = [
        str(path.relative_to(ROOT))
        for path in sources(".py", ".yaml", ".md")
        if number.search(path.read_text())
    ]
    assert found == []


def test_anchors_are_unique():
    anchors = re.findall(r'<a id="([a-z0-9-]+)"></a>', PAPERS.read_text())
    assert len(anchors) == len(set(anchors)) > 90


def test_modules_import_each_other_in_no_cycle():
    """Not even inside functions; only imports for type checkers are left out."""
    graph = {name: imported_by(name, path) for name, path in PRODUCT.items()}
    assert [sorted(cycle) for cycle in cycles(graph)] == []


def test_cycles_are_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
