from __future__ import annotations

import pytest
from pydantic import ValidationError

from vlp.data.schema import Annotation, captions_of


def test_img2dataset_json_is_read_and_its_own_keys_stay() -> None:
    text = (
        b'{"caption": "a dog", "url": "http://x", "key": "000000001", "width": 320, "sha256": ""}'
    )
    annotation = Annotation.model_validate_json(text)
    assert captions_of(annotation) == ["a dog"]
    again = Annotation.model_validate_json(annotation.to_json())
    assert again == annotation
    assert again.model_extra == {"url": "http://x", "key": "000000001", "width": 320, "sha256": ""}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"caption": "one"}, ["one"]),
        ({"captions": ["a", "b"], "caption": "c"}, ["a", "b"]),
        ({"captions": [], "caption": "c"}, ["c"]),
        ({"captions": ["  ", " x "]}, ["x"]),
        ({"caption": " \n"}, []),
    ],
)
def test_captions_of(fields: dict, expected: list[str]) -> None:
    assert captions_of(Annotation(**fields)) == expected


def test_numbers_as_identifiers_and_every_kind_of_label() -> None:
    assert Annotation(image_id=7).image_id == "7"  # type: ignore[arg-type]
    assert Annotation.model_validate_json(b'{"label": true}').label is True
    assert Annotation.model_validate_json(b'{"label": "neutral"}').label == "neutral"
    for number in (0, 1, 2):
        annotation = Annotation.model_validate_json(b'{"label": %d}' % number)
        assert annotation.label == Annotation(label=number).label == str(number)  # type: ignore[arg-type]
        assert Annotation.model_validate_json(annotation.to_json()) == annotation
    for truth in (False, True):
        assert Annotation.model_validate_json(Annotation(label=truth).to_json()).label is truth


@pytest.mark.parametrize(
    "text",
    [
        b'{"boxes": [[1, 2, 3]]}',
        b'{"captions": "not a list"}',
        b'{"version": 99}',
        b'{"questions": [{"question": "no id"}]}',
    ],
)
def test_what_does_not_fit_is_refused(text: bytes) -> None:
    with pytest.raises(ValidationError):
        Annotation.model_validate_json(text)


def test_equal_annotations_give_equal_bytes_without_unset_fields() -> None:
    annotation = Annotation(captions=["à la carte"], image_id="1")
    assert annotation.to_json() == Annotation(image_id="1", captions=["à la carte"]).to_json()
    assert annotation.to_json() == '{"version":1,"captions":["à la carte"],"image_id":"1"}'.encode()
