from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmark_files import json_of

from data_tools.converters.benchmarks.category_words import COMMON, CategoryWords
from data_tools.sources.annotation_rows import Faults
from vlp.config import ConfigError

NAMES = ["person", "bear", "teddy bear", "tennis racket", "dog"]
BOX = [1.0, 2.0, 3.0, 4.0]


def made(folder: Path, objects: list[Any], faults: Faults | None = None) -> CategoryWords:
    content = {
        "images": [{"id": 7, "width": 40, "height": 30}],
        "categories": [{"id": number, "name": name} for number, name in enumerate(NAMES)],
        "annotations": [
            {"image_id": 7, "category_id": NAMES.index(name), "bbox": [*BOX[:3], 4 + place], **more}
            for place, (name, more) in enumerate(objects)
        ],
    }
    return CategoryWords([json_of(folder / "i.json", content)], [] if faults is None else faults)


@pytest.mark.parametrize(
    ("caption", "said"),
    [
        ("A dog.", [(1, "dog", "dog")]),
        ("Two dogs", []),
        ("a teddy bear, a bear", [(2, "bear", "teddy bear"), (5, "bear", "bear")]),
        ("the man's Tennis Racket", [(1, "man", "person"), (5, "racket", "tennis racket")]),
        ("a tennis player with a racquet", [(5, "racquet", "tennis racket")]),
        ("person person", [(0, "person", "person"), (1, "person", "person")]),
        ("", []),
    ],
)
def test_names_of_categories(caption: str, said: list[Any], tmp_path: Path) -> None:
    assert made(tmp_path, []).said(caption) == said


def test_only_an_object_that_is_alone_in_its_category_is_named(tmp_path: Path) -> None:
    objects = [("dog", {}), ("person", {}), ("person", {}), ("bear", {}), ("bear", {"iscrowd": 1})]
    found = made(tmp_path, objects)
    captions = ["a man", "his bear and a small dog", "dog"]
    words = found.words(7, captions)
    assert [(word.caption, word.index, word.word, word.box) for word in words] == [
        (1, 5, "dog", BOX),
        (2, 0, "dog", BOX),
    ]
    assert {word.kind for word in words} == {"object"}
    assert found.boxes(7) == [[*BOX[:3], 4 + place] for place in range(4)]
    assert found.size(7) == (40, 30)
    assert (found.words(8, captions), found.boxes(8), found.size(8)) == ([], [], None)


def test_faulty_rows_are_counted_and_other_files_refused(tmp_path: Path) -> None:
    faults: Faults = []
    found = made(tmp_path, [("bear", {}), ("dog", {"bbox": [1, 2]})], faults)
    assert len(faults) == 1
    assert len(found.boxes(7)) == 1
    with pytest.raises(ConfigError, match="categories"):
        CategoryWords([json_of(tmp_path / "captions.json", {"images": []})], [])


def test_common_words_are_those_of_one_category() -> None:
    words = [word for several in COMMON.values() for word in several]
    assert len(words) == len(set(words))
