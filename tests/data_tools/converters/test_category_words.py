import pytest
from benchmark_files import json_of

from data_tools.converters.category_words import CategoryWords
from vlp.config import ConfigError

NAMES = ["person", "bear", "teddy bear", "tennis racket", "dog", "aerosol_can", "", "y"]
BOX = [1.0, 2.0, 3.0, 4.0]


def made(folder, objects, faults=None):
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
        ("Two dogs", [(1, "dogs", "dog")]),
        ("an aerosol can", [(2, "can", "aerosol_can")]),
        ("people with teddy bears", [(0, "people", "person"), (3, "bears", "teddy bear")]),
        (
            "men, ladies, kids",
            [(0, "men", "person"), (2, "ladies", "person"), (4, "kids", "person")],
        ),
        ("mans babys", []),
        ("a teddy bear, a bear", [(2, "bear", "teddy bear"), (5, "bear", "bear")]),
        ("the man's Tennis Racket", [(1, "man", "person"), (5, "racket", "tennis racket")]),
        ("a tennis player with a racquet", [(5, "racquet", "tennis racket")]),
        ("person person", [(0, "person", "person"), (1, "person", "person")]),
        ("", []),
    ],
)
def test_names_of_categories(caption, said, tmp_path):
    assert made(tmp_path, []).mentions(caption) == said


def test_words_tell_an_object_that_is_alone_in_its_category_from_others(tmp_path):
    objects = [("dog", {}), ("person", {}), ("person", {}), ("bear", {}), ("bear", {"iscrowd": 1})]
    found = made(tmp_path, objects)
    captions = ["a man", "his bear and a small dog", "dogs"]
    words = found.words(7, captions)
    assert [(word.caption, word.index, word.word, word.kind) for word in words] == [
        (0, 1, "man", "objects"),  # one of two
        (1, 1, "bear", "objects"),  # or one of the crowd
        (1, 5, "dog", "object"),
        (2, 0, "dogs", "objects"),  # a plural
    ]
    boxes = [[word.box, *(word.others or ())] for word in words]
    assert boxes == [
        [[*BOX[:3], 4 + place] for place in places] for places in ((1, 2), (3, 4), (0,), (0,))
    ]
    assert found.boxes(7) == [[*BOX[:3], 4 + place] for place in range(4)]
    assert found.size(7) == (40, 30)
    assert (found.words(8, captions), found.boxes(8), found.size(8)) == ([], [], None)


def test_faulty_rows_are_counted_and_other_files_refused(tmp_path):
    faults = []
    found = made(tmp_path, [("bear", {}), ("dog", {"bbox": [1, 2]})], faults)
    assert len(faults) == 1
    assert len(found.boxes(7)) == 1
    with pytest.raises(ConfigError, match="categories"):
        CategoryWords([json_of(tmp_path / "captions.json", {"images": []})], [])
