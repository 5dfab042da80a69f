"""House rules: modules import each other in no cycle, and citations lead somewhere.

The layers are import-linter's (`make contracts`).
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vlp", "data_tools", "evaluation", "launch")
# A script's `main` runs `vlp COMMAND`; the command imports the script when it runs.
DOOR = "launch.cli.main"
CITATION = re.compile(r"papers\.md((?:[\s#\"]*#[a-z0-9-]+(?:,| and| to)?)+)")


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PRODUCT = {module_name(path): path for tree in PACKAGES for path in (ROOT / tree).rglob("*.py")}


def imported_by(name, path):
    """The modules of the product that a module imports, at its top or inside functions."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports = set()
    for node in run_time_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            parts = {f"{module}.{alias.name}" for alias in node.names}
            imports |= parts & PRODUCT.keys()
            if not parts <= PRODUCT.keys():
                imports.add(module)
    if name.startswith("launch.") and name.count(".") == 1:
        imports.discard(DOOR)
    return (imports & PRODUCT.keys()) - {name}


def run_time_nodes(node):
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from run_time_nodes(child)


def test_modules_import_each_other_in_no_cycle():
    graph = {name: imported_by(name, path) for name, path in PRODUCT.items()}
    assert sum(map(len, graph.values())) > len(graph)
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(graph | {"vlp.io": {"launch.cli.main"}}).prepare()


def test_every_cited_anchor_exists_once():
    papers = (ROOT / "docs" / "explanation" / "papers.md").read_text()
    anchors = re.findall(r'<a id="([a-z0-9-]+)"></a>', papers)
    assert len(anchors) == len(set(anchors)) > 90
    cited = {}
    for tree in (*PACKAGES, "tests", "configs", "docs"):
        for path in (ROOT / tree).rglob("*"):
            if path.suffix in (".py", ".yaml", ".md"):
                for citation in CITATION.findall(path.read_text()):
                    for anchor in re.findall(r"#([a-z]+(?:-[a-z0-9]+)*)", citation):
                        cited.setdefault(anchor, []).append(str(path.relative_to(ROOT)))
    assert len(cited) > 60
    assert {anchor: files for anchor, files in cited.items() if anchor not in anchors} == {}
