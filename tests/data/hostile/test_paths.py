import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from broken_images import photo
from broken_shards import END, change_index, index_columns, member, plain_tar
from guard import guarded

from data_tools.builder.write_shard import Journal
from data_tools.originals import Originals, unpack_archives
from vlp.config import ConfigError
from vlp.data.shards.remote import CachedFile, RemoteFolder, ShardCache
from vlp.data.shards.sample_files import BadSample
from vlp.data.shards.shard_reader import ShardIndex, index_folder
from vlp.io import atomic_write, may_be_on_hub, parse_json, require_local, sha256_of, write_text
from vlp.models.pretrained.local_copy import local_folder
from vlp.models.pretrained.published import read_vit
from vlp.tasks.detection.data import CocoImages, CocoSource
from vlp.training.checkpoints import SUMS, verify

PNG = photo("png")
OUTSIDE = ("../../x", "/tmp/x", "a/../../../x", "..", "x\\0y")


@pytest.mark.parametrize("digest", [*OUTSIDE, "", "AB" * 32, "ab" * 33, 7, None, ["ab" * 32]])
def test_invalid_sha256_of_a_manifest_is_refused(tmp_path, digest):
    remote, names = tmp_path / "remote", np.array([b"0.tar"])
    remote.mkdir()
    shards = [{"name": "0.tar", "sha256": digest}]
    (remote / "manifest.json").write_text(json.dumps({"shards": shards}))
    folder = RemoteFolder(f"file://{remote}")
    if not digest:
        assert folder.digests(names) == {}
        return
    with pytest.raises(ConfigError, match=r"manifest\.json: not a manifest"):
        folder.digests(names)


def test_the_cache_writes_into_its_folder_and_not_through_links(tmp_path):
    remote, kept, precious = tmp_path / "remote", tmp_path / "kept", tmp_path / "precious"
    remote.mkdir()
    (remote / "0.tar").write_bytes(b"x" * 700)
    precious.write_text("mine")
    cache = ShardCache(kept, 10**6)
    file = CachedFile(RemoteFolder(f"file://{remote}"), "0.tar", 700)
    (kept / "lock").symlink_to(precious)
    place = kept / file.path
    place.parent.mkdir(parents=True)
    place.with_name(place.name + ".part").symlink_to(precious)
    with pytest.raises(Exception, match="symbolic links"):
        cache.open(file)
    assert precious.read_text() == "mine"


@pytest.fixture
def indexed(tmp_path):
    (tmp_path / "0.tar").write_bytes(plain_tar([("k", {"png": PNG, "txt": b"a dog"})]))
    index_folder(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [*OUTSIDE, "a/0.tar", "", "0.zip", "0.tar\n", "0\0.tar"])
def test_shards_of_an_index_lie_in_its_folder(indexed, name):
    good = index_columns(indexed)["table"]
    for changed in ({"name": np.array([name.encode()])}, {"table": np.bytes_(name)}):
        change_index(indexed, **({"table": good} | changed))
        with pytest.raises(ConfigError, match=r"index\.npz: not an index of shards \("):
            ShardIndex.open(indexed)
        change_index(indexed, name=np.array([b"0.tar"]))


@pytest.mark.parametrize("field", ["samples", "bytes", "captions", "uncaptioned", "version"])
@pytest.mark.parametrize(
    "number",
    [2**43, 2**63 - 1, 2**63, 2**64 - 1, 10**30, -1, 1.0, True, "1"],
    ids=lambda number: f"{number!r}"[:30],
)
def test_numbers_of_an_index_fit_64_bits(indexed, field, number):
    change_index(indexed, **{field: np.array(number if field == "version" else [number])})
    with pytest.raises(ConfigError, match=r"index\.npz: (not an index|an index of)") as error:
        ShardIndex.open(indexed)
    assert "\n" not in str(error.value)


def test_compressed_index_members_are_refused(indexed):
    columns = index_columns(indexed) | {"name": np.full(10**7, b"0.tar")}
    np.savez_compressed(indexed / "index.npz", **columns)
    with pytest.raises(ConfigError, match=r"not an index of shards \(\w+: is compressed\)"):
        ShardIndex.open(indexed)


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5 + "1" + "}" * 10**5, "9" * 10**5])
def test_deep_json_and_long_numbers_are_invalid(text):
    for content in (text, text.encode()):
        with pytest.raises(json.JSONDecodeError):
            parse_json(content)


def test_integers_up_to_64_bits_are_kept():
    numbers = [0, -(2**63), 2**64 - 1, 12345678901234567890]
    assert parse_json(json.dumps(numbers)) == numbers
    assert parse_json(b'{"id": "99999999999999999999999", "x": 0.1234567890123456789}') == {
        "id": "99999999999999999999999",
        "x": 0.1234567890123456789,
    }
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"
    with pytest.raises(json.JSONDecodeError, match="surrogates"):
        parse_json('{"a": ["\\uD800"]}')
    halves = rb'"\\ud83d\ude00\ud83d \ude00 \\\ud83d \uD83D\uDE00 \uDC80 ' + b'\xff"'
    assert (
        parse_json(halves, "replace")
        == "\\ud83d\ufffd\ufffd \ufffd \\\ufffd \U0001f600 \ufffd \ufffd"
    )
    assert parse_json(halves, "surrogateescape").endswith(" \ufffd \udcff")
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(json.JSONDecodeError, match="digits"):
            parse_json(str(number))


@pytest.mark.parametrize("name", OUTSIDE)
def test_images_of_an_annotation_file_lie_in_their_folder(tmp_path, name):
    images = tmp_path / "a" / "b"
    images.mkdir(parents=True)
    (tmp_path / "x").write_bytes(PNG)
    content = {
        "images": [{"id": 1, "file_name": name, "width": 20, "height": 16}],
        "annotations": [],
        "categories": [{"id": 1, "name": "dog"}],
    }
    (tmp_path / "instances.json").write_text(json.dumps(content))
    source = CocoSource(
        format="coco", annotations=str(tmp_path / "instances.json"), images=str(images)
    )
    with pytest.raises(BadSample, match="missing image"):
        CocoImages(source).read(0)


def test_archives_write_nothing_by_the_names_in_them(tmp_path):
    import gzip

    names = ("../../up.png", "/tmp/absolute.png", "plain.png")
    link = member("linked.png", b"", b"2", b"/etc/passwd")
    packed = link + b"".join(member(name, PNG) for name in names) + END
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(packed))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        for name in names:
            archive.writestr(name, PNG)
    room = tmp_path / "room"
    room.mkdir()
    for archive_name in ("a.tar.gz", "b.zip"):
        with guarded(room) as seen, unpack_archives([tmp_path / archive_name], room) as places:
            originals = Originals(places)
            assert [originals.find(name).read() for name in names] == [PNG] * 3
            assert originals.find("linked.png") is None
        assert not seen


def test_checksums_outside_of_a_checkpoint_are_refused(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    sums = f"{sha256_of(tmp_path / 'state.json')}  state.json\n{'ab' * 32}  "
    for name in ("/dev/zero", "../x", "absent", "", "a\0b"):
        (tmp_path / SUMS).write_text(f"{sums}{name}\n")
        assert f"names {name!r}, which is not there" in verify(tmp_path)


def test_links_in_the_place_of_a_file_are_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    (out / "file.tmp").symlink_to(precious)
    with (
        pytest.raises(ConfigError, match=r"file: cannot be written \(.*symbolic links\)"),
        atomic_write(out / "file", error=ConfigError) as file,
    ):
        file.write(b"theirs")
    (out / "other").symlink_to(precious)
    write_text(out / "other", "theirs")  # the link itself is replaced
    assert not (out / "other").is_symlink()
    (out / "build.jsonl").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        Journal(out, {})
    assert precious.read_text() == "mine"


def test_a_folder_of_the_name_tilde_is_not_made(monkeypatch):
    monkeypatch.setenv("HOME", "~")  # nothing to replace it with
    with pytest.raises(OSError, match=r"write \$HOME"):
        require_local(Path("~/new"))


def test_a_mistyped_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "one").mkdir(parents=True)
    for name in ("runs/bsae", "models/noe", "./a/b", "/a/b", "~/a", "runs/a/model", "a/b/c"):
        assert not may_be_on_hub(name), name
    assert all(map(may_be_on_hub, ("google/vit", "bert-base-uncased", "runsx/a")))
    with guarded(tmp_path) as seen:
        for name in ("runs/bsae", "models/noe"):
            with pytest.raises(FileNotFoundError, match=name):
                local_folder(name)
            with pytest.raises(FileNotFoundError, match=name):
                read_vit(name)
    assert not seen
