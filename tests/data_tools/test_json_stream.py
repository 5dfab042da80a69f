from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools import rows as source_rows
from data_tools.rows import streamed_list
from vlp.config import ConfigError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(content=st.lists(JSON), characters=st.integers(1, 40), indent=st.sampled_from([None, 1]))
def test_the_same_as_json_whatever_is_read_at_once(
    tmp_path_factory: pytest.TempPathFactory, content: list, characters: int, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("json") / "list.json"
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_rows, "CHARACTERS", characters)
        rows = list(streamed_list(path))
    assert [row for _, row in rows] == content
    assert [where for where, _ in rows] == [f"{path}, row {n + 1}" for n in range(len(content))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "should be a list"),
        (b"{}", "should be a list"),
        (b"[1, 2", "cut off behind row 1"),
        (b"[1, 2, ", "cut off behind row 2"),
        (b'[{"a": 1}, {"a" 2}]', "damaged or cut off behind row 1"),
        (b'["\xff"]', "not UTF-8"),
        (b"[" * 100_000, "damaged or cut off behind row 0"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(streamed_list(path))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(streamed_list(tmp_path / "no.json"))
