"""Public functions say what they raise and which shapes their tensors have, of what they take.

That there is a docstring at all is ruff's rule D1.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from product import PRODUCT, place, tree_of

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Raised for the interpreter or for the command line, not for a caller.
SILENT = {"AssertionError", "AttributeError", "NotImplementedError", "StopIteration", "SystemExit"}
SILENT |= {"argparse.ArgumentTypeError", "ArgumentTypeError", "BadParameter", "typer.BadParameter"}
SILENT |= {"Exit", "typer.Exit"}
ELSEWHERE = re.compile(r"errors (as of|as|are those of) ", re.IGNORECASE)
# (B, N), (rows, d), or a word for less than that; or where the shapes stand.
SHAPE = re.compile(
    r"\([^()]+,[^()]*\)|\((B|N|M|T|G)\b|\bshapes?\b|\bscalar\b|0-d|\bvector|see the base|as of `|"
    r"as `|[Ss]ee `"
)
ARGS = re.compile(r"^Args:\n((?:    .*\n|\n)+)", re.MULTILINE)
ARGUMENT = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", re.MULTILINE)
TENSOR = re.compile(r"(Tensor|nn\.Parameter)( \| None)?")


def public_functions(path: Path) -> Iterator[tuple[Function, str]]:
    """Yield functions and methods with the text that documents them, the class's included."""

    def inside(node: ast.AST, of_class: str) -> Iterator[tuple[Function, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                yield from inside(child, ast.get_docstring(child) or "")
            elif isinstance(child, Function) and (
                not child.name.startswith("_") or (child.name == "__init__" and of_class)
            ):
                yield child, f"{ast.get_docstring(child) or ''}\n{of_class}"

    return inside(tree_of(path), "")


def is_command(function: Function) -> bool:
    """Whether a command starts here: the command line prints what is raised."""
    decorators = map(ast.unparse, function.decorator_list)
    return function.name == "run" or any(".command(" in one for one in decorators)


def raised(function: Function) -> Iterator[str]:
    """Yield the exceptions that leave a function, but for those of what it calls."""

    def inside(node: ast.AST) -> Iterator[str]:
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            return
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(error)
            if re.fullmatch(r"(\w+\.)?[A-Z]\w+", name) and name not in SILENT:
                yield name.rpartition(".")[2]
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.Try):  # what its body raises is caught there
            children = iter([*node.handlers, *node.orelse, *node.finalbody])
        for child in children:
            yield from inside(child)

    for statement in function.body:
        yield from inside(statement)


def named(error: str, text: str) -> bool:
    """Whether a text names an exception, or a built-in one that it is a kind of."""
    kind = getattr(builtins, error, None)
    names = [one.__name__ for one in kind.__mro__] if isinstance(kind, type) else [error]
    general = {"Exception", "BaseException", "object"}
    return any(name in text for name in names if name not in general)


def undocumented_errors(path: Path) -> list[str]:
    return [
        f"{place(path, function)} {function.name}: {error}"
        for function, text in public_functions(path)
        if not is_command(function) and not ELSEWHERE.search(text)
        for error in raised(function)
        if not named(error, text)
    ]


def tensors_without_shape(path: Path) -> list[str]:
    return [
        f"{place(path, function)} {function.name}"
        for function, text in public_functions(path)
        if any(
            argument.annotation is not None and TENSOR.fullmatch(ast.unparse(argument.annotation))
            for argument in [*function.args.args, *function.args.kwonlyargs]
        )
        and not SHAPE.search(text)
    ]


def strange_arguments(path: Path) -> list[str]:
    """Names under `Args:` that are no parameter of the function, or of the class's `__init__`."""
    found = []
    for node in ast.walk(tree_of(path)):
        function = node
        if isinstance(node, ast.ClassDef):
            function = next(
                (one for one in node.body if getattr(one, "name", "") == "__init__"), None
            )
        if not isinstance(node, Function | ast.ClassDef) or not isinstance(function, Function):
            continue
        section = ARGS.search(f"{ast.get_docstring(node) or ''}\n")
        known = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        for names in ARGUMENT.findall(section[1]) if section else ():
            strange = set(names.replace("*", "").split(", ")) - known
            found += [f"{place(path, node)} {node.name}: {name}" for name in sorted(strange)]
    return found


def test_documented_arguments_are_there():
    found = [line for path in PRODUCT.values() for line in strange_arguments(path)]
    assert not found, "\n".join(found)


def test_raised_errors_are_documented():
    found = [line for path in PRODUCT.values() for line in undocumented_errors(path)]
    assert not found, "\n".join(found)


def test_tensors_have_documented_shapes():
    found = [line for path in PRODUCT.values() for line in tensors_without_shape(path)]
    assert not found, "\n".join(found)


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr("product.ROOT", tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "module.py"
        path.write_text(text)
        tree_of.cache_clear()
        return path

    return write


def test_a_missing_error_is_found(module):
    text = 'def f(x):\n    """Do.{}"""\n    raise FileExistsError(x)\n'
    assert len(undocumented_errors(module(text.format("")))) == 1
    assert undocumented_errors(module(text.format("\n\n    Raises:\n        OSError: x."))) == []


def test_a_missing_shape_is_found(module):
    text = 'def f(x: Tensor | None):\n    """Take x{}."""\n'
    assert len(tensors_without_shape(module(text.format("")))) == 1
    assert tensors_without_shape(module(text.format(" (B, N)"))) == []


def test_a_strange_argument_is_found(module):
    text = 'def f(x, *y):\n    """Do.\n\n    Args:\n        {}, y: of it.\n    """\n'
    assert len(strange_arguments(module(text.format("z")))) == 1
    assert strange_arguments(module(text.format("x"))) == []
