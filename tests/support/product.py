"""The sources of the product, as the tests of the house rules read them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vlp", "data_tools", "evaluation", "launch")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PRODUCT = {
    module_name(path): path for tree in PACKAGES for path in sorted((ROOT / tree).rglob("*.py"))
}
"""Every module's file by its dotted name."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
