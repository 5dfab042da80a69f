"""Count what makes code slow to read: `make prose [PATHS]`. A report, never a gate.

Per 1,000 bound names those with a narrative word (open_clip has 1.2, torchtitan 2.4, timm 0.8), per
10,000 words of docstrings phrases that a reader must take apart (0 to 0.5 each there), and comment
lines in percent (3 to 7 there). `make prose PATHS=vlp/data` names the places.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

NARRATIVE = {
    *("said", "told", "asked", "wanted", "found", "own", "each", "one", "whose", "begun", "named"),
    *("given", "taken", "kept", "known", "meant", "seen", "held", "gone", "made", "stated"),
    *("apart", "taught"),
}
PHRASES = {
    "what is/are/the/they": r"\bwhat (is|are|the|they)\b",
    "none": r"\bnone\b(?! means| is (the|all|no|this))",
    "whose": r"\bwhose\b",
    "those of": r"\bthose of\b",
    "beside": r"\bbeside\b",
    "so many": r"\bso many\b",
    "is none": r"\bis none\b",
}


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield names that code binds: definitions, parameters, targets and assigned attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def is_narrative(name: str) -> bool:
    """Tell whether a part of a snake_case or CamelCase name is a narrative word."""
    parts = re.findall(r"[A-Z]?[a-z]+", name)
    return any(part.lower() in NARRATIVE for part in parts)


def main(paths: list[str]) -> None:
    """Print the counts of all Python files below some paths."""
    names, narrative, words, lines, comments = 0, Counter[str](), 0, 0, 0
    phrases, locations = Counter[str](), []
    for path in sorted(file for root in paths for file in Path(root).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines += text.count("\n")
        comments += sum(line.lstrip().startswith("#") for line in text.splitlines())
        for name, line in bound_names(tree):
            names += 1
            if is_narrative(name):
                narrative[name] += 1
                locations.append(f"{path}:{line}: {name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                prose = ast.get_docstring(node) or ""
                words += len(prose.split())
                for phrase, pattern in PHRASES.items():
                    # `None` is a value, `none` at a sentence's start is prose.
                    hits = len(re.findall(pattern, prose.replace("None", "")))
                    phrases[phrase] += hits
                    if hits:
                        line = getattr(node, "lineno", 1)
                        locations.append(f"{path}:{line}: {phrase!r} in its docstring")
    if paths != DEFAULT:
        print(*locations, sep="\n")
    total = sum(narrative.values())
    print(f"narrative words: {1000 * total / max(1, names):.1f} of 1,000 bound names ({names:,})")
    print("  " + ", ".join(f"{name} {count}" for name, count in narrative.most_common(24)))
    print(f"phrases of 10,000 words of docstrings ({words:,}):")
    for phrase in PHRASES:
        print(f"  {phrase}: {10_000 * phrases[phrase] / max(1, words):.1f}")
    print(f"comments: {100 * comments / max(1, lines):.1f} % of {lines:,} lines")


DEFAULT = ["vlp", "evaluation", "data_tools", "launch"]

if __name__ == "__main__":
    main(sys.argv[1:] or DEFAULT)
