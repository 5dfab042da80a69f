from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.data.shards.tar import Member, append_member, members_in, plain_members

contents = st.lists(st.binary(max_size=1500), min_size=1, max_size=3)


def part(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    for name, content in files.items():
        append_member(stream, name, content)
    return stream.getvalue()


def slow(data: bytes) -> list[Member] | None:
    members, problem = members_in(io.BytesIO(data + bytes(512)), len(data) + 512)
    return None if problem else members


@settings(deadline=None)
@given(contents)
def test_plain_parts_are_read(files: list[bytes]) -> None:
    data = part({f"key_{n}.json": content for n, content in enumerate(files)})
    members = plain_members(data)
    assert members is not None
    assert members == slow(data)
    assert [data[m.offset : m.offset + m.size] for m in members] == files


@settings(deadline=None, max_examples=300)
@given(contents, st.integers(0, 511), st.integers(0, 255), st.booleans(), st.booleans())
def test_of_anything_else_tarfile_is_asked(
    files: list[bytes], place: int, byte: int, mend: bool, cut: bool
) -> None:
    """A byte of the first header changed, its checksum mended or not: no other answer."""
    data = bytearray(part({f"key_{n}.json": content for n, content in enumerate(files)}))
    data[place] = byte
    if mend:
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
    if cut:
        del data[-300:]
    found = plain_members(bytes(data))
    assert found is None or found == slow(bytes(data))


@pytest.mark.parametrize("kind", ["long", "umlaut", "folder", "link", "deep"])
def test_unusual_files_are_left_to_tarfile(kind: str) -> None:
    info = tarfile.TarInfo({"long": "k" * 150, "umlaut": "ü"}.get(kind, "k") + ".json")
    if kind == "deep":
        info.name = f"{'f' * 90}/{'k' * 90}.json"
    if kind in ("folder", "link"):
        info.type = {"folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}[kind]
        info.linkname = "elsewhere"
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        if kind == "long" and form == tarfile.USTAR_FORMAT:
            continue  # which cannot hold it
        assert plain_members(info.tobuf(form, "utf-8")) is None
