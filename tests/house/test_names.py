"""Names and sizes: the field's words, one class of a name, short files and folders."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from product import PRODUCT, ROOT, place, tree_of

# Words of former names -> the field's. None may be a part of an identifier, option or file name.
WORDS = {
    "picture": "image",
    "pictures": "images",
    "entailment": "snli_ve",
    "claim": "pair, statement or hypothesis",
    "claims": "pair classification",
    "statements": "nlvr2",
    "matcher": "itm_scorer",
    "mirror": "hflip",
    "mirrored": "flipped",
    "draws": "rng",
    "skips": "skipped",
    "likeness": "perceptual_hash",
    "repeats": "duplicates",
    "judge": "validate, evaluate",
    "judged": "validated, evaluated",
    "requests": "batch sampler",
    "whole_file": "atomic_write",
}
# Words of former configuration keys -> the present keys.
KEYS = {
    "start": "init_from",
    "order": "sampler",
    "keep": "keep_last",
    "scales": "lr_multipliers",
    "accumulation": "gradient_accumulation_steps",
}
# Names with such a word, and why it stays.
ALLOWED = {
    "group_matcher": "the method by which timm asks a model for its groups of layers",
    "draws_maps": "the verb: an evaluation that draws maps",
    "repeats": "timed repetitions of a benchmark; no duplicate of a sample",
    "requests": "what a loader asks of its data set: the samples of a batch",
    "_repeats": "whether an option may be given several times",
    "box_statements": "true or false statements of NLVR v1 about boxes of objects",
    "AnswerDecoderConfig.start": "what the decoder's layers start from; not a folder of weights",
}
LONG_TESTS = {  # one subject each, with many cases
    "tests/data/pretrain/test_loader.py",
    "tests/data/shards/test_cache.py",
    "tests/data/shards/test_shard_index.py",
    "tests/data/vision/test_widgets_data.py",
    "tests/data_tools/builder/test_build_shards.py",
    "tests/evaluation/html_report/test_html_report.py",
    "tests/layers/test_attach.py",
    "tests/models/decoder/test_answer_decoder.py",
    "tests/positions/test_anchor.py",
    "tests/positions/test_rotary.py",
    "tests/positions/test_semantic.py",
}
MOST_LINES, MOST_ENTRIES = 400, 15


def words(name: str) -> str:
    """Return a name in lower case, its words between underscores."""
    return f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower().strip('_')}_"


def identifiers(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a module names: classes, functions, arguments, variables, keys and options."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"--[a-z-]+", node.value)
        ):
            yield node.value.strip("-").replace("-", "_"), node


def configuration_keys(path: Path) -> Iterator[tuple[str, str, ast.AST]]:
    """Yield class, key and place of every field of a configuration."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield node.name, field.target.id, field


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [Path(name) for name in listed if (ROOT / name).exists()]


def test_names_use_the_fields_words():
    found = [
        f"{place(path, node)} {name}: say {instead}"
        for path in PRODUCT.values()
        for name, node in identifiers(path)
        for word, instead in WORDS.items()
        if f"_{word}_" in words(name) and name not in ALLOWED
    ]
    assert not found, "\n".join(found)


def test_files_use_the_fields_words():
    found = [
        f"{path}: say {instead}"
        for path in tracked()
        if path.parts[0] != "tests" and path.stem not in ALLOWED
        for word, instead in WORDS.items()
        if f"_{word}_" in words(path.stem)
    ]
    assert not found, "\n".join(found)


def test_configuration_keys_are_the_present_ones():
    found = [
        f"{place(path, node)} {kind}.{key}: say {KEYS[key]}"
        for path in PRODUCT.values()
        for kind, key, node in configuration_keys(path)
        if key in KEYS and f"{kind}.{key}" not in ALLOWED
    ]
    assert not found, "\n".join(found)


def test_no_class_name_is_defined_twice():
    places = defaultdict(list)
    for path in PRODUCT.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(place(path, node))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_two_test_files_have_one_name():
    """Pytest imports them as top-level modules."""
    names = Counter(path.name for path in tracked() if path.match("tests/**/*.py"))
    assert [name for name, times in names.items() if times > 1 and name != "conftest.py"] == []


def test_files_are_short():
    lines = {
        str(path): (ROOT / path).read_text(encoding="utf-8").count("\n")
        for path in tracked()
        if path.suffix == ".py"
    }
    long = {name for name, count in lines.items() if count > MOST_LINES}
    assert long <= LONG_TESTS


def test_folders_are_small():
    """`vlp/positions`, its tests, `configs` and `docs/results` list things side by side.

    The root holds what git, packaging and the site look for there.
    """
    entries = defaultdict(set)
    for path in tracked():
        for part in (path, *path.parents[:-1]):
            entries[str(part.parent)].add(part.name)
    flat = ("configs", "vlp/positions", "tests/positions", "docs/results")
    found = {
        folder: len(names)
        for folder, names in entries.items()
        if len(names) > MOST_ENTRIES and not folder.startswith(flat) and folder != "."
    }
    assert found == {}


def test_words_of_names_are_found():
    assert words("PictureHash") == "_picture_hash_"
    assert words("_MIRROR") == "_mirror_"
