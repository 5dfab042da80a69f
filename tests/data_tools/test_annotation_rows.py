from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from benchmark_files import json_of, lines_of

from data_tools.rows import (
    Faults,
    Row,
    json_lines,
    json_list,
    line_count,
    parsed,
    read_json,
)
from vlp.config import ConfigError


class Point(Row):
    x: int
    name: str = ""


def test_lines_gzipped_or_not(tmp_path: Path) -> None:
    # A line separator of Unicode inside a text ends no line of the file.
    rows = [{"x": 1}, {"x": 2, "name": "a\u2028b"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows)
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    faults: Faults = []
    for path in (plain, packed):
        found = list(json_lines(path, faults))
        assert found == [(f"{path}, line 1", rows[0]), (f"{path}, line 3", rows[1])]
    assert line_count([plain, packed]) == 8
    assert faults == []


def test_rows_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    path = lines_of(tmp_path / "rows", [{"x": 1}, {"y": 1}, {"x": "a"}, [3], {"x": 4, "name": 5}])
    path.write_text(path.read_text() + "{broken\n" + '{"x": 6}\n')
    faults: Faults = []
    points = list(parsed(json_lines(path, faults), Point, faults))
    assert [(point.x, point.name) for point in points] == [(1, ""), (4, "5"), (6, "")]
    assert [fault.kind for fault in faults] == [
        *["row of another layout"] * 3,
        "line that is not JSON",
    ]
    assert f"{path}, line 2: x: Field required" in faults[0].id
    assert f"{path}, line 3: x: Input should be a valid integer" in faults[1].id
    assert faults[3].id == f"{path}, line 6"


def test_a_file_of_another_layout_is_an_error(tmp_path: Path) -> None:
    path = lines_of(tmp_path / "rows", [{"y": 1}, {"x": 1}])
    with pytest.raises(ConfigError, match=r"rows, line 1: x: Field required; is it the right file"):
        list(parsed(json_lines(path, []), Point, []))
    path.write_text('[{"x": 1},\n{"x": 2}]')
    with pytest.raises(ConfigError, match="line 1: no JSON object on a line of its own"):
        list(json_lines(path, []))


def test_lists(tmp_path: Path) -> None:
    path = json_of(tmp_path / "list.json", [1, 2])
    assert list(json_list(path)) == [(f"{path}, row 1", 1), (f"{path}, row 2", 2)]
    path = json_of(tmp_path / "under.json", {"rows": [3]})
    assert list(json_list(path, "rows")) == [(f"{path}, rows, row 1", 3)]
    for content, key in (([1], "rows"), ({"rows": [1]}, None), ({"rows": 1}, "rows"), (1, None)):
        with pytest.raises(ConfigError, match=r"wrong\.json: this should be"):
            json_list(json_of(tmp_path / "wrong.json", content), key)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"{", "not a JSON file"),
        (b'{"x": 1}\n{"x": 2}', "one object a line"),
        (b'"\xff"', "not UTF-8"),
        (gzip.compress(b"[1, 2, 3]" * 50, mtime=0)[:-12], "a damaged gzip file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as problem:
        read_json(path)
    assert str(path) in str(problem.value)
