"""MkDocs hook: write the reference pages from the code, and a page for each ablation's tables.

The reference has every public module (by mkdocstrings), every configuration key with type, default
and meaning, and every command with its help. None of these pages is in the repository.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vlp.models.config import AnchorOptions  # noqa: E402
from vlp.positions import describe_options, list_positions  # noqa: E402
from vlp.positions.options import SIZES  # noqa: E402
from vlp.positions.registry import position_class  # noqa: E402

HELP_COLUMNS = "100"
RUN_CONFIGS = {
    "Pretraining": "vlp.training.config:PretrainConfig",
    "Fine-tuning": "vlp.training.config:FinetuneConfig",
    "Vision-only training": "vlp.training.config:VisionConfig",
    "Ablations": "evaluation.ablations.config:AblationConfig",
    "Evaluation of several models": "evaluation.suite.suite:SuiteConfig",
    "Results that are run again": "evaluation.ablations.config:ResultsConfig",
}

ABLATIONS = ROOT / "configs" / "ablation" / "results"

_pages: dict[str, str] = {}


def on_config(config: Any) -> Any:
    """Write all pages and list them in the navigation."""
    api = _api_pages()
    _pages.clear()
    _pages.update(api)
    _pages["reference/configuration.md"] = _configuration_page()
    _pages["reference/commands.md"] = _commands_page()
    ablations = _ablation_pages()
    _pages.update(ablations)
    nav = [
        {"Commands": "reference/commands.md"},
        {"Configuration keys": "reference/configuration.md"},
        {"API": [{_package_of(path): path} for path in sorted(api)]},
    ]
    for entry in config["nav"]:
        if "Reference" in entry:
            entry["Reference"] = nav
        if "Results" in entry:
            entry["Results"].append({"Ablation tables": sorted(ablations)})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to those of the folder."""
    from mkdocs.structure.files import File

    for path, text in _pages.items():
        # In a search the pages that people wrote come first.
        content = f"---\nsearch:\n  boost: 0.3\n---\n\n{text}"
        files.append(File.generated(config, path, content=content))
    return files


# --- API -----------------------------------------------------------------------------------------


def _api_pages() -> dict[str, str]:
    """Return one page for each package below `vlp`, by its path."""
    pages = {}
    for init in sorted((ROOT / "vlp").rglob("__init__.py")):
        folder = init.parent
        package = ".".join(folder.relative_to(ROOT).parts)
        modules = [
            f"{package}.{file.stem}"
            for file in sorted(folder.glob("*.py"))
            if not file.stem.startswith("_")
        ]
        blocks = [f"::: {package}\n    options: {{show_submodules: false}}"]
        blocks += [f"::: {module}" for module in modules]
        pages[f"reference/api/{package}.md"] = f"# {package}\n\n" + "\n\n".join(blocks) + "\n"
    return pages


def _package_of(path: str) -> str:
    return path.removeprefix("reference/api/").removesuffix(".md")


def _ablation_pages() -> dict[str, str]:
    """Return a page with the tables of each ablation that has stored figures, by its path."""
    from evaluation.ablations.config import AblationConfig, ResultsConfig
    from evaluation.ablations.tables import read_figures, stored_tables
    from vlp.config import load_config

    pages = {}
    for name, result in load_config(ABLATIONS / "tables.yaml", ResultsConfig).tables.items():
        figures = ABLATIONS / f"{name}.csv"
        if result.ablation is not None and figures.is_file():
            source = ABLATIONS.parent / result.ablation
            config = load_config(source, AblationConfig, result.overrides)
            frame = read_figures(figures)
            tables = [table.markdown() for table in stored_tables(config, frame)]
            about = f"{result.about} Command: `vlp reproduce {name}`."
            pages[f"results/ablation/{name}.md"] = "\n\n".join([f"# {name}", about, *tables])
    return dict(sorted(pages.items()))


# --- Configuration -------------------------------------------------------------------------------


def _configuration_page() -> str:
    """Return a table of keys for every configuration class that a run can reach."""
    parts = [
        "# Configuration keys\n",
        "A run reads one YAML file. `inherit:` names a file to start from. `key.sub=value` on the",
        "command line overrides a key. An unknown key is an error that names the nearest one.\n",
    ]
    seen: set[type[BaseModel]] = set()
    for title, address in RUN_CONFIGS.items():
        module, _, name = address.partition(":")
        root = getattr(importlib.import_module(module), name)
        new = [kind for kind in _reachable(root) if kind not in seen]
        seen.update(new)
        parts.append(f"## {title}\n")
        parts.extend(_table(kind) for kind in new)
    parts += [
        "## Options of position encodings\n",
        "They stand in `model.cross.options` and `model.image.positions`, by the encoding's name.",
        f"{', '.join(f'`{size}`' for size in SIZES)} the model knows by itself.\n",
        _table(AnchorOptions),
        *map(_encoding, list_positions()),
    ]
    return "\n".join(parts)


def _encoding(name: str) -> str:
    """Return the table of an encoding's options."""
    lines = [f"### {name} {{ #encoding-{name} }}\n", f"{encoding_docs(name)[0]}\n"]
    lines += ["| option | type | default | meaning |", "|---|---|---|---|"]
    for option in describe_options(name):
        default = "required" if option.default is ... else f"`{option.default}`"
        kind = f"`{option.kind}`"
        cells = (f"`{option.name}`", kind, default, encoding_docs(name)[1][option.name])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def encoding_docs(name: str) -> tuple[str, dict[str, str]]:
    """Return the first line of an encoding's docstring, and the meaning of its arguments."""
    encoding = position_class(name)
    meanings: dict[str, str] = {}
    # A class inherits the arguments that its own docstring leaves out.
    for cls in reversed(encoding.__mro__):
        _, _, arguments = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:\n")
        for line in arguments.partition("\n\n")[0].splitlines():
            if start := re.match(r"    ([\w, ]+): (.*)", line):
                names, text = re.split(", ", start[1]), start[2]
                meanings |= dict.fromkeys(names, text)
            else:
                meanings |= {option: f"{meanings[option]} {line.strip()}" for option in names}
    return inspect.cleandoc(encoding.__doc__ or "").splitlines()[0], meanings


def _reachable(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a configuration class and those of its fields, outermost first."""
    queue, found = [kind], []
    while queue:
        each = queue.pop(0)
        if each in found:
            continue
        found.append(each)
        for field in each.model_fields.values():
            queue.extend(_classes_in(field.annotation))
            for mark in field.metadata:
                queue.extend(getattr(mark, "classes", tuple)())
    yield from found


def _classes_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        if not isinstance(part, (str, int, float)):
            yield from _classes_in(part)
        choose = getattr(part, "classes", None)
        if callable(choose) and not isinstance(part, type):
            yield from choose()


def _table(kind: type[BaseModel]) -> str:
    lines = [f"### {kind.__name__} {{ #{kind.__name__.lower()} }}\n"]
    lines.append(f"{_paragraphs(kind.__doc__)}\n")
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        cells = (f"`{name}`", _type(field), _default(field), _meaning(kind, name))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _paragraphs(docstring: str | None) -> str:
    text = (docstring or "").split("\n\n    Args:")[0]
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _type(field: FieldInfo) -> str:
    return _named(field.annotation, field.metadata)


def _bounds(marks: Iterable[Any]) -> list[str]:
    """Return the ranges that pydantic validates: those of `Field(ge=...)` and its like."""
    flat = [inner for mark in marks for inner in getattr(mark, "metadata", [mark])]
    return [
        f"{sign} {getattr(mark, name)}"
        for mark in flat
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if getattr(mark, name, None) is not None
    ]


def _named(annotation: Any, marks: Iterable[Any] = ()) -> str:
    """Return a type as a reader of YAML would say it, with links to configuration classes.

    Args:
        annotation: the type.
        marks: what is annotated: of a number its range, else it is said to be any.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if annotation is Any:
        return "as its own class says"
    if hasattr(annotation, "__metadata__"):
        return _named(arguments[0], annotation.__metadata__)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, type(int | str)):
        return " or ".join(_named(part, marks) for part in arguments)
    if origin in (tuple, list):
        parts = [_named(part) for part in arguments if part is not Ellipsis]
        if len(parts) > 1 and len(set(parts)) == 1:
            return f"list of {len(parts)}: each {parts[0]}"
        return f"list of {', '.join(parts)}"
    if isinstance(annotation, type) and origin is None:
        if issubclass(annotation, BaseModel) and annotation.model_fields:
            return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
        if annotation is ByteSize:
            return "bytes, as `200GB`"
        if annotation in (int, float):
            name = "number" if annotation is float else "integer"
            bounds = " and ".join(_bounds(marks))
            return f"{name} {bounds}" if bounds else f"any {name}"
        names = {"str": "text", "bool": "true or false"}
        return names.get(annotation.__name__, annotation.__name__)
    return _mapping(arguments) if arguments else str(annotation)


def _mapping(arguments: tuple[Any, ...]) -> str:
    key, value = arguments
    return "mapping" if value is Any else f"mapping of {_named(key)} to {_named(value)}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "its own defaults"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(str, value)) + "]"
    return f"`{value}`" if value != "" else '`""`'


def _meaning(kind: type[BaseModel], name: str) -> str:
    """Return the description of a key.

    Raises:
        ValueError: the key has none.
    """
    description = kind.model_fields[name].description
    if not description:
        raise ValueError(f"{kind.__module__}.{kind.__name__}.{name}: no Field(description=...)")
    return description.replace("\n", " ")


# --- Commands ------------------------------------------------------------------------------------


def _commands_page() -> str:
    """Return the help of every command."""
    from launch.cli.main import commands

    os.environ |= {"COLUMNS": HELP_COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}
    root = commands()
    parts = ["# Commands\n", "`vlp COMMAND --help` prints the same text.\n"]
    for names in _command_paths(root):
        title = " ".join(["vlp", *names])
        level = "##" if len(names) < 2 else "###"
        parts.append(f"{level} {title}\n\n```text\n{_help(root, names)}\n```\n")
    return "\n".join(parts)


def _command_paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the names that lead to a command and to each one below it."""
    yield path
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from _command_paths(child, (*path, name))


def _help(root: Any, names: tuple[str, ...]) -> str:
    """Return what `--help` prints, as plain text."""
    from vlp.command_line import run_app

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run_app(root, "vlp", [*names, "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).strip()
