import gzip
import json

import pytest
from benchmark_files import lines_of
from hypothesis import given
from hypothesis import strategies as st

from data_tools import rows as source_rows
from data_tools.rows import (
    Faults,
    Row,
    json_lines,
    line_count,
    list_rows,
    parse_rows,
    read_json,
    streamed_list,
)
from vlp.config import ConfigError


class Point(Row):
    x: int
    name: str = ""


def test_lines_gzipped_or_not(tmp_path):
    # A line separator of Unicode inside a text ends no line of the file.
    rows = [{"x": 1}, {"x": 2, "name": "a\u2028b"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows)
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    faults = []
    for path in (plain, packed):
        found = list(json_lines(path, faults))
        assert found == [(f"{path}, line 1", rows[0]), (f"{path}, line 3", rows[1])]
    assert line_count([plain, packed]) == 8
    assert faults == []


def test_rows_that_do_not_fit_are_counted(tmp_path):
    path = lines_of(tmp_path / "rows", [{"x": 1}, {"y": 1}, {"x": "a"}, [3], {"x": 4, "name": 5}])
    path.write_text(path.read_text() + "{broken\n" + '{"x": 6}\n')
    faults = []
    points = list(parse_rows(json_lines(path, faults), Point, faults))
    assert [(point.x, point.name) for point in points] == [(1, ""), (4, "5"), (6, "")]
    assert [fault.kind for fault in faults] == [
        *["row of another layout"] * 3,
        "line that is not JSON",
    ]
    assert f"{path}, line 2: x: Field required" in faults[0].id
    assert f"{path}, line 3: x: Input should be a valid integer" in faults[1].id
    assert faults[3].id == f"{path}, line 6"


def test_a_file_of_another_layout_is_an_error(tmp_path):
    path = lines_of(tmp_path / "rows", [{"y": 1}, {"x": 1}])
    faults = []
    assert [row.x for row in parse_rows(json_lines(path, faults), Point, faults)] == [1]
    assert [fault.id for fault in faults] == [f"{path}, line 1: x: Field required"]
    lines_of(path, [{"y": 1}] * 100 + [{"x": 1}])
    with pytest.raises(ConfigError, match=r"rows, line 1: x: Field required; is it the right file"):
        list(parse_rows(json_lines(path, []), Point, []))
    path.write_text('[{"x": 1},\n{"x": 2}]')
    with pytest.raises(ConfigError, match="line 1: no JSON object on a line of its own"):
        list(json_lines(path, []))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"{", "not a JSON file"),
        (b'{"x": 1}\n{"x": 2}', "one object a line"),
        (b'"\xff"', "not UTF-8"),
        (gzip.compress(b"[1, 2, 3]" * 50, mtime=0)[:-12], "a damaged gzip file"),
        (gzip.compress(bytes(2**27)), "unpacks to more than 100 times"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as problem:
        read_json(path, [])
    assert str(path) in str(problem.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(content=st.lists(JSON), characters=st.integers(1, 40), indent=st.sampled_from([None, 1]))
def test_the_same_as_json_whatever_is_read_at_once(tmp_path_factory, content, characters, indent):
    path = tmp_path_factory.mktemp("json") / "list.json"
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_rows, "CHARACTERS", characters)
        rows = list(streamed_list(path, []))
    assert [row for _, row in rows] == content
    assert [where for where, _ in rows] == [f"{path}, row {n + 1}" for n in range(len(content))]


def test_rows_that_are_not_utf_8_are_none(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(
        '["caf\u00e9 \\uD83D\\uDE00", "caf?", {"a": 1}]'.encode().replace(b"?", b"\xe9")
    )
    expected = ["caf\u00e9 \U0001f600", None, {"a": 1}]
    assert [row for _, row in streamed_list(path, [])] == read_json(path, []) == expected
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert [row for _, row in streamed_list(tmp_path / "a.json.gz", [])] == expected
    path.write_bytes(b'{"rows": ' + path.read_bytes() + b', "name": "\xe9"}')
    assert read_json(path, []) == {"rows": expected, "name": None}


@pytest.mark.parametrize("read", [read_json, streamed_list, json_lines])
def test_halves_of_surrogate_pairs_are_replaced_and_counted(read, tmp_path):
    path, faults = tmp_path / "a.json", Faults()
    rows = [r'{"x": 1, "name": "a\ud83d"}', r'{"x": 2, "name": "\\ud83d \ud83d\ude00"}']
    path.write_text("\n".join(rows) if read is json_lines else f"[{', '.join(rows)}]")
    content = read(path, faults)
    located = list_rows(content, path) if read is read_json else content
    points = list(parse_rows(located, Point, faults))
    assert [point.name for point in points] == ["a\ufffd", "\\ud83d \U0001f600"]
    place = f"{path}, {'line' if read is json_lines else 'row'} 1"
    assert faults == [("half a character, replaced (kept)", place)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "should be a list"),
        (b"{}", "should be a list"),
        (b"[1, 2", "truncated after row 1"),
        (b"[1, 2, ", "truncated after row 2"),
        (b'[{"a": 1}, {"a" 2}]', "damaged or truncated after row 1"),
        (b"[" * 100_000, "damaged or truncated after row 0"),
    ],
)
def test_damaged_files(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(streamed_list(path, []))
