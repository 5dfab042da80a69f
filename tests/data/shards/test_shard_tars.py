import gzip
import io
import os

import pytest
from broken_shards import END, FINE, GOOD, JSON, PNG, checked, found, header, member, pax, tar
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.config import ConfigError
from vlp.data.limits import MAX_ANNOTATION_BYTES, MAX_IMAGE_BYTES
from vlp.data.shards.remote import OutageConfig
from vlp.data.shards.sample_files import BadSample, DataError
from vlp.data.shards.shard_reader import ShardIndex, index_folder
from vlp.data.shards.tar import append_member, members_in, plain_members, read_files, read_members


def problem_of(path, content):
    path.write_bytes(content)
    members, problem = read_members(path)
    return [member.name for member in members], problem


TRICKS = {
    "symlink": member("a.png", b"", b"2", b"/etc/passwd"),
    "hardlink": member("a.png", b"", b"1", b"good.png"),
    "outside": member("a.png", b"", b"1", b"../../outside.png"),
    "device": member("a.png", b"", b"3"),
    "folder": member("a.png", b"", b"5"),
    "pipe": member("a.png", b"", b"6"),
    "tar": member("a.tar", tar(GOOD)),
    "sparse": member("a.png", PNG, b"S"),
    "pax-sparse": pax(
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9999"}
    )
    + member("a.png", b"1\n0\n512\n".ljust(512, b"\0") + bytes(512)),
    "old-pax-sparse": pax({"GNU.sparse.map": "0,512", "GNU.sparse.size": "4096"})
    + member("a.png", bytes(512)),
    "slash": member("a.png/", b""),
    "tiff": member("a.tiff", PNG),
    "nothing": b"",
}


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
def test_links_and_special_files_are_missing_images(tmp_path, trick):
    content = tar(GOOD, trick, member("a.json", JSON), member("b.png", PNG))
    assert found(tmp_path, content) == ["good", "missing image", "b"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (b"../../outside.png", "../../outside"),
        (b"/etc/passwd.png", "/etc/passwd"),
        (b"./a.png", "./a"),
        (b"folder.with.dots/a.png", "folder.with.dots/a"),
        (b"A.PNG", "A"),
        (b"caf\xe9.png", r"caf\xe9"),
        ("größe 寸法.png".encode(), "größe 寸法"),
        (b"two\nlines\x1b[31m.png", r"two\x0alines\x1b[31m"),
        (b"%s{}.png", "%s{}"),
    ],
)
def test_names_are_labels_and_never_paths(tmp_path, name, key):
    assert found(tmp_path, tar(member(name, PNG), GOOD)) == [key, "good"]
    key.encode()


def test_samples_of_one_key(tmp_path):
    again = member("a.png", PNG) + member("a.json", JSON)
    assert found(tmp_path, tar(again, again)) == ["a", "duplicate key"]
    assert found(tmp_path, tar(again, GOOD, again)) == ["a", "good", "duplicate key"]
    assert found(tmp_path, tar(again, member("a.PNG", PNG))) == ["a", "duplicate key"]
    # All images first: no reader of WebDataset finds the samples together.
    names = [member(f"{key}.png", PNG) for key in "abc"] + [member("b.json", JSON)]
    assert found(tmp_path, tar(*names)) == ["a", "b", "c", "duplicate key"]
    with pytest.raises(BadSample, match=r"0\.tar, b \(came before; .*must follow each other"):
        ShardIndex.open(tmp_path).read(0, 3)


def test_long_names_of_both_kinds(tmp_path):
    long = "folder/" * 30 + "a" * 200
    gnu = member("././@LongLink", f"{long}.png\0".encode(), b"L") + member("cut.png", PNG)
    assert found(tmp_path, tar(gnu, GOOD)) == [long, "good"]
    long_name = pax({"path": f"{long}.png", "comment": "x" * 5000}) + member("cut.png", PNG)
    assert found(tmp_path, tar(long_name, GOOD)) == [long, "good"]
    everywhere = pax({"comment": "all"}, b"g")
    assert found(tmp_path, tar(everywhere, GOOD)) == ["good"]


def test_content_after_the_end_of_a_tar_is_reported(tmp_path):
    path = tmp_path / "0.tar"
    first, second = tar(GOOD) + bytes(8192), tar(FINE)
    names, problem = problem_of(path, first + second)
    assert names == ["good.png", "good.json"]
    assert problem == f"more content behind its end at byte {len(GOOD)}"
    assert problem_of(path, first) == (names, None)
    # A hole of a crash: blocks of zeros where a header should be.
    _, problem = problem_of(path, GOOD + bytes(4096) + second)
    assert problem == f"more content behind its end at byte {len(GOOD)}"


def test_compressed_and_invalid_tars_are_refused(tmp_path):
    for content in (gzip.compress(tar(GOOD)), b"<html>404</html>" * 99, b"x", bytes(511), PNG):
        names, problem = problem_of(tmp_path / "0.tar", content)
        assert names == []
        assert problem
    assert found(tmp_path, b"<html>") == []


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "loop", "nothing"])
def test_shards_replaced_by_other_file_types(tmp_path, kind):
    assert found(tmp_path, tar(GOOD)) == ["good"]
    path = tmp_path / "0.tar"
    index = ShardIndex.open(tmp_path)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to(path if kind == "loop" else tmp_path / "nowhere")
    with pytest.raises(DataError, match="missing shard"):
        index.read(0, 0)
    if kind != "nothing":
        with pytest.raises(BadSample, match="missing shard"):
            ShardIndex.open(tmp_path, outages=OutageConfig(policy="skip")).read(0, 0)
        with pytest.raises(ConfigError, match=r"0\.tar: cannot read this shard"):
            index_folder(tmp_path)


SIZES = {
    "beyond the end": header("b.png", 10**9),
    "beyond any file": header("b.png", 2**60),
    "beyond any number of the machine": header("b.png", 2**80),
    "negative": header("b.png", -1),
    "back to the first header": header("b.png", -len(GOOD + FINE) - 512),
    "back to an earlier header": header("b.png", -len(FINE) - 512),
    "back to its own header": header("b.png", -512),
    "no number": header("b.png", 0, size_field=b"12x45678901\0"),
    "pax, no number": pax({"size": "all"}) + header("b.png", 2**33),
    "pax, negative": pax({"size": "-5000"}) + member("b.png", PNG),
    "pax, beyond": pax({"size": "9" * 30}) + member("b.png", PNG),
    "pax header of a terabyte": header("b", 2**40, b"x"),
    "pax header of less than nothing": header("b", -512, b"x"),
    "pax header without an end": header("b", 600, b"x") + b"9" * 1024,
    "pax header of digits": member("b", b"9" * 8000, b"x"),
    "pax records longer than they are": member("b", b"999 path=b.png\n", b"x") + member("b", PNG),
    "long name of a terabyte": header("b", 2**40, b"L"),
    "long name of less than nothing": header("b", -4096, b"L"),
    "long names one behind another": member("b", b"b.png\0", b"L") * 3000,
    "extended headers one behind another": pax({"comment": "b"}) * 3000,
    "sparse with a map of many blocks": checked(header("b.png", 512, b"S")[:482] + b"\1" * 30)
    + b"\1" * 512 * 200,
    "sparse map of many": pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})
    + member("b.png", b"999999999999\n" + b"1\n" * 40000),
    "unknown kind beyond the end": header("b.png", 10**9, b"~"),
    "multi-volume": header("b.png", 10**9, b"M"),
}


@pytest.mark.parametrize("name", SIZES)
def test_hostile_sizes_take_no_time_or_memory(tmp_path, within, name):
    path = tmp_path / "0.tar"
    path.write_bytes(GOOD + FINE + SIZES[name] + END)
    with within(seconds=2, peak=2_000_000):
        members, problem = read_members(path)
    names = [entry.name for entry in members[:4]]
    assert names == ["good.png", "good.json", "fine.png", "fine.json"]
    assert len(members) < 10
    assert all(entry.offset + entry.size <= path.stat().st_size for entry in members)
    lines = [f"0.tar: {problem}, 2 samples before it"] if problem else []
    assert index_folder(tmp_path) == lines
    index = ShardIndex.open(tmp_path)
    assert [index.read(0, number).key for number in range(2)] == ["good", "fine"]


@pytest.mark.parametrize("length", [500_000, 3_000_000])
def test_large_pax_attributes_are_read_or_passed_over(tmp_path, within, length):
    icon = pax({"LIBARCHIVE.xattr.com.apple.ResourceFork": "x" * length})
    named = pax({"path": "b/" + "c" * 200 + ".png", "SCHILY.xattr.user.x": "y" * length})
    long_name = named + member("b/" + "c" * 98, PNG)
    content = tar(icon + GOOD + long_name + icon + FINE)
    with within(seconds=2, peak=3_500_000):
        names = found(tmp_path, content)
    assert names == (["good", "b/" + "c" * 200, "fine"] if length < 2**20 else ["good", "fine"])


def sparse_file(path, *parts):
    """Headers, each with so many bytes behind it that take no room on the disk."""
    with open(path, "wb") as file:
        for content, gap in parts:
            file.write(content)
            file.seek(gap + -gap % 512, os.SEEK_CUR)
        file.write(END)


IMAGE, TEXT = (member("a.png", PNG), 0), (member("a.json", JSON), 0)


def huge(name, size):
    return header(name, size), size


@pytest.mark.parametrize(
    ("parts", "result"),
    [
        ([huge("a.png", 3 * 2**30), TEXT], "image too large"),
        ([IMAGE, huge("a.1.png", MAX_IMAGE_BYTES + 1)], "image too large"),
        ([IMAGE, huge("a.json", 2**31)], "bad annotation"),
        ([IMAGE, huge("a.txt", MAX_ANNOTATION_BYTES + 1)], "bad annotation"),
        ([IMAGE, huge("a.mp4", 5 * 2**30), TEXT], "a"),
        ([IMAGE, huge("README", 5 * 2**30), TEXT], "a"),
    ],
    ids=["image", "second", "json", "txt", "film", "between"],
)
def test_files_of_gigabytes_are_refused(tmp_path, within, parts, result):
    sparse_file(tmp_path / "0.tar", *parts)
    with within(seconds=10, peak=16_000_000):
        assert found(tmp_path, None) == [result]


def test_stored_files_limits_members_and_sizes(tmp_path):
    path = tmp_path / "small.tar"
    link = member("a.png", b"", b"2", b"/etc/passwd")
    path.write_bytes(gzip.compress(tar(GOOD, link)))
    assert [name.name for name, _ in read_files(path, lambda name: True)] == [
        "good.png",
        "good.json",
    ]
    flood = io.BytesIO()
    with gzip.GzipFile(fileobj=flood, mode="wb", compresslevel=1) as file:
        file.write(header("a.png", 2**30))
        file.write(bytes(2**20))
    path.write_bytes(flood.getvalue())
    with pytest.raises(ConfigError, match=r"a\.png is said to hold 1073741824 bytes"):
        list(read_files(path, lambda name: True))


contents = st.lists(st.binary(max_size=1500), min_size=1, max_size=3)


def part(files):
    stream = io.BytesIO()
    for name, content in files.items():
        append_member(stream, name, content)
    return stream.getvalue()


def slow(data):
    members, problem = members_in(io.BytesIO(data + bytes(512)), len(data) + 512)
    return None if problem else members


@settings(deadline=None)
@given(contents)
def test_plain_members_list_usual_headers(files):
    data = part({f"key_{n}.json": content for n, content in enumerate(files)})
    members = plain_members(data)
    assert members == slow(data)
    assert [data[m.offset : m.offset + m.size] for m in members] == files


@settings(deadline=None, max_examples=300)
@given(contents, st.integers(0, 511), st.integers(0, 255), st.booleans(), st.booleans())
def test_plain_members_equal_tarfile_or_none(files, place, byte, mend, cut):
    """A byte of the first header changed, its checksum mended or not: no other answer."""
    data = bytearray(part({f"key_{n}.json": content for n, content in enumerate(files)}))
    data[place] = byte
    if mend:
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
    if cut:
        del data[-300:]
    plain = plain_members(bytes(data))
    assert plain is None or plain == slow(bytes(data))
