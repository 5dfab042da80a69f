import pytest
from broken_shards import change_index, index_columns
from made_shards import jpeg, run, write, write_manifest, write_tar

from data_tools.__main__ import main
from vlp.data.shards.shard_reader import ShardIndex


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "shards", {f"k{number}": jpeg(number) for number in range(10)})


def report(folder, *options):
    path = folder.parent / "report.txt"
    code = run("verify", folder, "--report", path, *options)
    lines = path.read_text(encoding="utf-8").splitlines()
    return code, [(kind, place) for kind, place in (line.split("\t") for line in lines)]


def flip(path, place, bits=255):
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


def test_whole_shards_pass(folder):
    write_manifest(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert report(folder) == (0, [])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert report(folder, "--quick") == (0, [])


def test_a_truncated_shard(folder):
    path = folder / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:4000])
    for options in ((), ("--quick",)):
        code, damage = report(folder, *options)
        assert code == 1
        assert [kind for kind, _ in damage] == ["corrupt shard", "index differs"]
        assert str(path) in damage[0][1]
        assert "samples before it" in damage[0][1]
    assert run("index", folder) == 1  # an index does not mend a tar
    assert [kind for kind, _ in report(folder)[1]] == ["corrupt shard"]
    assert len(ShardIndex.open(folder)) < 10


def test_a_flipped_byte_that_decodes_shows_against_the_manifest(folder):
    path = folder / "shard-000002.tar"
    write_manifest(folder)
    flip(path, path.read_bytes().index(b"number 8"), 1)
    code, [(kind, place)] = report(folder)
    assert (code, kind) == (1, "manifest differs")
    assert place.startswith(f"{path}: sha256: ")
    assert report(folder, "--quick") == (0, [])
    (folder / "manifest.json").unlink()
    assert report(folder) == (0, [])


def test_kinds_of_broken_samples(tmp_path):
    whole = jpeg(1)
    files = [
        ("cut.jpg", whole[:-200]),
        ("cut.txt", b"cut"),
        ("empty.jpg", b""),
        ("empty.txt", b"empty"),
        ("alone.json", b"{}"),
        ("bad.jpg", whole),
        ("bad.json", b"{nothing"),
        ("pair.jpg", whole),
        ("pair.1.jpg", b"no image"),
        ("pair.json", b"{}"),
        ("text.jpg", b"a text"),
        ("good.jpg", whole),
        ("good.npy", b"extra"),
    ]
    shards = tmp_path / "shards"
    write_tar(shards / "0.tar", files)
    write_tar(shards / "1.tar", [("good.jpg", whole)])
    write_tar(shards / "2.tar", [])
    (shards / "3.tar").write_bytes(b"")
    main(["index", str(shards)])
    code, damage = report(shards)
    assert code == 1
    found = sorted((kind, place.removeprefix(str(shards)).split(" (")[0]) for kind, place in damage)
    assert [(kind, place.split(":")[0]) for kind, place in found] == [
        ("bad annotation", "/0.tar, bad.json"),
        ("duplicate key", "/1.tar, good"),
        ("empty shard", "/2.tar"),
        ("empty shard", "/3.tar"),
        ("missing image", "/0.tar, alone"),
        ("unreadable image", "/0.tar, cut"),
        ("unreadable image", "/0.tar, empty"),
        ("unreadable image", "/0.tar, pair"),
        ("unreadable image", "/0.tar, text"),
    ]
    quick = [kind for kind, _ in report(shards, "--quick")[1]]
    assert sorted(quick) == [
        "duplicate key",
        "empty shard",
        "empty shard",
        "missing image",
        "unreadable image",  # of no bytes: its header says so
    ]


def test_index_and_manifest_against_the_shards(folder):
    write_manifest(folder)
    (folder / "shard-000001.tar").unlink()
    write_tar(folder / "other.tar", [("new.jpg", jpeg(77)), ("new.txt", b"new")])
    damage = report(folder)[1]
    assert ("manifest differs", f"{folder / 'shard-000001.tar'}: is not there") in damage
    assert any("other.tar: is not in manifest.json" in place for _, place in damage)
    assert ("index differs", f"{folder / 'other.tar'}: is not in index.npz") in damage
    assert run("index", folder) == 0
    assert {entry.name for entry in ShardIndex.open(folder).shards} == {
        "other.tar",
        "shard-000000.tar",
        "shard-000002.tar",
    }
    (folder / "manifest.json").unlink()
    assert report(folder) == (0, [])

    (folder / "index.npz").unlink()
    assert [kind for kind, _ in report(folder)[1]] == ["missing index"]
    assert run("index", folder) == 0
    assert report(folder) == (0, [])


def test_wrong_numbers_in_the_index(folder):
    index = index_columns(folder)
    for name, value in {"samples": 2, "captions": 9}.items():
        change_index(folder, **(index | {name: [value, *index[name][1:]]}))
        damage = report(folder)[1]
        assert len(damage) == 1
        assert damage[0][0] in ("index differs", "unusable index")
    change_index(folder, **index)
    table = folder / str(index["table"], "ascii")
    flip(table, table.stat().st_size - 8)  # where the last sample lies
    assert [kind for kind, _ in report(folder, "--quick")[1]] == ["index differs"]
    table.unlink()
    assert [kind for kind, _ in report(folder, "--quick")[1]] == ["unusable index"]
    assert run("index", folder) == 0
    (folder / "manifest.json").write_text("[]")
    assert [kind for kind, _ in report(folder)[1]] == ["unusable manifest"]
