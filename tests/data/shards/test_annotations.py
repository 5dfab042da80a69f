import json

import pytest
from pydantic import ValidationError

from vlp.data.limits import MAX_ANNOTATION_BYTES
from vlp.data.schema import MAX_CAPTION, Annotation, captions_of
from vlp.data.shards.sample_files import BadSample, SampleFiles, parse_annotation
from vlp.data.shards.tar import Member


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
def test_captions_of(fields, expected):
    assert captions_of(Annotation(**fields)) == expected


def test_numbers_as_identifiers_and_every_kind_of_label():
    assert Annotation(image_id=7).image_id == "7"
    assert Annotation.model_validate_json(b'{"label": true}').label is True
    assert Annotation.model_validate_json(b'{"label": "neutral"}').label == "neutral"
    for number in (0, 1, 2):
        annotation = Annotation.model_validate_json(b'{"label": %d}' % number)
        assert annotation.label == Annotation(label=number).label == str(number)
        assert Annotation.model_validate_json(annotation.to_json()) == annotation
    for truth in (False, True):
        assert Annotation.model_validate_json(Annotation(label=truth).to_json()).label is truth


def test_equal_annotations_give_equal_bytes_without_unset_fields():
    annotation = Annotation(captions=["à la carte"], image_id="1")
    assert annotation.to_json() == Annotation(image_id="1", captions=["à la carte"]).to_json()
    assert annotation.to_json() == '{"version":1,"captions":["à la carte"],"image_id":"1"}'.encode()


def reader(files):
    members = {name: Member(name, 0, len(content)) for name, content in files.items()}
    return SampleFiles("k", members), lambda member: files[member.name]


def read(**files):
    return parse_annotation(*reader(files), "0.tar, k")


def reason(**files):
    with pytest.raises(BadSample) as bad:
        read(**files)
    assert bad.value.kind == "bad annotation"
    return bad.value.where


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"caption": "\xff"}',
        b'{"caption": "\\ud800"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"version": 2}',
        b'{"x": ' + b"9" * 5000 + b"}",
        '{"caption": "a"}'.encode("utf-16"),
    ],
)
def test_invalid_json_is_a_bad_annotation(content):
    assert reason(json=content).startswith("0.tar, k.json: ")


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("caption", {"text": "a"}, "caption"),
        ("caption", True, "caption"),
        ("captions", "a", "captions"),
        ("captions", ["a", None], "captions.1"),
        ("boxes", [[1, 2, 3]], "boxes.0"),
        ("boxes", [[1, 2, 3, float("nan")]], "boxes.0.3"),
        ("boxes", [[0, 0, 1, 1], [1, 2, -3, 4]], "boxes.1"),
        ("proposals", [[1, 2, 3, -1e-9]], "proposals.0"),
        ("expressions", [{"id": "1", "text": "a", "box": [0, 0, -1, 1]}], "expressions.0.box"),
        ("questions", [{"question": "a"}], "questions.0.id"),
        ("scene", "kitchen", "scene"),
        ("words", [{"caption": 0}], "words.0.index"),
    ],
)
def test_invalid_fields_are_reported_by_name(field, value, place):
    assert reason(json=json.dumps({field: value}).encode()).startswith(f"0.tar, k.json: {place}")


def test_unknown_fields_are_kept():
    content = {"caption": 12, "exif": {"a": [1, {"b": None}]}, "width": float("nan")}
    content |= {"model_config": 1, "__class__": 2, "to_json": "x", "words": ["a"], "version": 2}
    annotation = read(json=json.dumps(content).encode())
    assert captions_of(annotation) == ["12"]
    assert annotation.model_extra["exif"] == {"a": [1, {"b": None}]}
    assert read(json=annotation.to_json()).model_extra is not None
    assert captions_of(read(json=b'{"caption": "first", "caption": "second"}')) == ["second"]


def test_text_beside_json():
    assert captions_of(read(txt="größer".encode())) == ["größer"]
    assert captions_of(read(txt=b"\xef\xbb\xbfa dog\r\n")) == ["a dog"]
    assert captions_of(read(json=b'\xef\xbb\xbf{"caption": "a dog"}')) == ["a dog"]
    assert captions_of(read(json=b"{}", txt=b"a dog")) == ["a dog"]
    assert captions_of(read(json=b'{"captions": ["", " "]}', txt=b"a dog")) == ["a dog"]
    assert captions_of(read(json=b'{"caption": "a cat"}', txt=b"\xff")) == ["a cat"]
    assert captions_of(read(txt=b"")) == []
    assert captions_of(read(txt=b"\0 \0")) == ["\0 \0"]
    assert "not UTF-8" in reason(txt="größer".encode("latin-1"))


@pytest.mark.parametrize(
    "content",
    [
        *({name: value} for name, value in (
            ("version", 2), ("words", ["a", "dog"]), ("scene", "kitchen"), ("source", {"id": 1}),
            ("boxes", [[1, 2, 3, 4, 0.9]]), ("captions", "one text"), ("label", [1, 2]),
        )),
        b"{",
        b'{"title": "half a pair \\ud83d"}',
        b"[1]",
    ],
    ids=str,
)  # fmt: skip
def test_invalid_fields_of_other_tools_are_dropped(content):
    about = content if isinstance(content, bytes) else json.dumps({**content, "url": "u"}).encode()
    annotation = read(json=about, txt=b"a dog")
    assert captions_of(annotation) == ["a dog"]
    if isinstance(content, dict):
        assert annotation.model_extra == {"url": "u"}
    assert reason(json=about, txt=b" ")


def test_label_is_read_from_the_cls_file():
    assert read(cls=b"\xef\xbb\xbf3\n").label == "3"
    assert read(cls=b"3", json=b'{"label": "dog"}').label == "dog"


def test_annotations_of_megabytes_are_refused():
    large = b'{"caption": "' + b"a" * MAX_ANNOTATION_BYTES + b'"}'
    assert f"{len(large)} bytes" in reason(json=large)
    assert "bytes" in reason(txt=large)
    assert captions_of(read(txt=large[:MAX_ANNOTATION_BYTES]))


def test_long_captions_are_cut():
    long = "a red dog " * 300_000
    [text] = captions_of(read(txt=long.encode()))
    assert text == long[:MAX_CAPTION]


WORD = {"caption": 0, "index": 0, "word": "red", "kind": "colour", "box": [0, 0, 5, 5]}


@pytest.mark.parametrize(
    "change",
    [
        {"caption": -1},
        {"caption": "0"},
        {"index": 1.5},
        {"word": 5},
        {"box": ["0", 0, 5, 5]},
        {"box": [0, 0, 5, -5]},
    ],
    ids=str,
)
def test_invalid_word_positions_are_refused(change):
    for words in ([WORD | change], [WORD, WORD | change], WORD | change):
        with pytest.raises(ValidationError, match="words"):
            Annotation(words=words)
