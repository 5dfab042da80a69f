import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from broken_shards import change_index
from killed_steps import in_child, killed_at, steps_of
from made_shards import write_tar
from pair_shards import annotated_shards

from vlp.config import ConfigError
from vlp.data.pretrain import _shard_paths
from vlp.data.schema import Annotation, Question, captions_of
from vlp.data.shards.index import ShardTable, write_table
from vlp.data.shards.remote import OutageConfig
from vlp.data.shards.shard_reader import (
    BadSample,
    Items,
    ShardEntry,
    ShardIndex,
    ShardWriter,
    index_folder,
)
from vlp.lock import is_lock


def write(folder, numbers=range(10), before=lambda number: None):
    with ShardWriter(folder, 4) as writer:
        for number in numbers:
            before(number)
            if f"k{number}" not in writer.done:
                image = bytes([number]) * (700 + 5000 * (number % 3))
                writer.write(f"k{number}", image, "png", Annotation(caption=f"image {number}"))


def files(folder):
    paths = (path for path in sorted(folder.iterdir()) if not is_lock(path))
    return {path.name: path.read_bytes() for path in paths}


def test_written_samples_are_read_in_random_order(tmp_path):
    first = Annotation(captions=["a", "b"], boxes=[[0, 1, 2, 3]])
    with ShardWriter(tmp_path, 2) as writer:
        writer.write("x", b"X" * 513, "jpg", first)
        writer.write("y", b"", "png", Annotation(statement="s", label=True), second_image=b"second")
        writer.write("z", b"Z", "webp", Annotation(caption="c"))
    index = ShardIndex.open(tmp_path)
    assert len(index) == 3
    sizes = [(tmp_path / f"shard-00000{number}.tar").stat().st_size for number in range(2)]
    assert list(index.shards) == [
        ShardEntry("shard-000000.tar", 2, sizes[0], captions=2, uncaptioned=1),
        ShardEntry("shard-000001.tar", 1, sizes[1], captions=1, uncaptioned=0),
    ]
    assert [index.caption_ends(shard).tolist() for shard in range(2)] == [[2, 3], [1]]
    assert index.read(1, 0)[:3] == ("z", b"Z", "webp")
    second = index.read(0, 1)
    assert (second.image, second.second_image, second.annotation.label) == (b"", b"second", True)
    assert index.read(0, 0)[:5] == ("x", b"X" * 513, "jpg", first, None)
    assert index.read_annotation(0, 0) == first
    with pytest.raises(IndexError):
        index.read(1, 1)


def test_webdataset_reads_our_shards(make_shards):
    folder = make_shards(count=7, per_shard=7)
    stream = webdataset.WebDataset(str(folder / "shard-000000.tar"), shardshuffle=False)
    theirs = list(stream)
    index = ShardIndex.open(folder)
    ours = [index.read(0, number) for number in range(7)]
    assert [sample["__key__"] for sample in theirs] == [sample.key for sample in ours]
    assert [sample["png"] for sample in theirs] == [sample.image for sample in ours]
    captions = [json.loads(sample["json"])["captions"] for sample in theirs]
    assert captions == [captions_of(sample.annotation) for sample in ours]


def test_shards_of_webdataset_are_read(tmp_path):
    long = "a_very_long_key_" * 10
    with webdataset.TarWriter(str(tmp_path / "00000.tar")) as sink:
        sink.write({"__key__": "folder/one", "jpg": b"1", "txt": "first", "json": {"url": "u"}})
        sink.write({"__key__": long, "webp": b"2", "txt": "second"})
        sink.write({"__key__": "three", "png": b"3", "json": {"caption": "third", "width": 5}})
    assert index_folder(tmp_path) == []
    index = ShardIndex.open(tmp_path)
    read = [index.read(0, number) for number in range(3)]
    assert [(sample.key, sample.image, sample.extension) for sample in read] == [
        ("folder/one", b"1", "jpg"),
        (long, b"2", "webp"),
        ("three", b"3", "png"),
    ]
    assert [captions_of(s.annotation) for s in read] == [["first"], ["second"], ["third"]]
    assert read[0].annotation.model_extra == {"url": "u"}
    assert index.caption_ends(0).tolist() == [1, 2, 3]


def test_shards_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    synced = []
    fsync, rename = os.fsync, Path.rename

    def note(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def check(path, target):
        assert synced[-1] == str(path)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", check)
    write(tmp_path, range(9))
    [rows] = tmp_path.glob("samples-*.npy")
    names = [*(f"shard-00000{number}.tar" for number in range(3)), rows.name, "index.npz"]
    expected = [path for name in names for path in (f"{tmp_path}/{name}.tmp", str(tmp_path))]
    assert synced == expected


@pytest.mark.parametrize("stop", [0, 3, 4, 6, 8, 9])
def test_resumed_writing_gives_equal_files(tmp_path, stop):
    def interrupted():
        yield from range(stop)
        raise KeyboardInterrupt

    write(tmp_path / "whole", range(10))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "twice", interrupted())
    left = files(tmp_path / "twice")
    assert list(left) == [f"shard-{number:06d}.tar" for number in range(stop // 4)]
    # As after SIGKILL, when nobody could clean up.
    (tmp_path / "twice" / f"shard-{stop // 4:06d}.tar.tmp").write_bytes(b"half")
    write(tmp_path / "twice", range(10))
    assert files(tmp_path / "twice") == files(tmp_path / "whole")


def test_invalid_keys_and_extensions_are_refused(tmp_path):
    with ShardWriter(tmp_path) as writer:
        writer.write("a", b"", "png", Annotation())
        for key, extension, message in (
            *((key, "png", "cannot be a key") for key in ("", "a.b", "a/b")),
            *(("a", "png", "already"), ("b", "pdf", "pdf")),
        ):
            with pytest.raises(ValueError, match=message):
                writer.write(key, b"", extension, Annotation())


def test_samples_missing_in_the_index_are_reported(tmp_path, caplog):
    files = {f"{key}.{end}": b"1" * 9000 for key in "abc" for end in ("jpg", "txt")}
    write_tar(tmp_path / "0.tar", list(files.items())[:2])
    index_folder(tmp_path)
    write_tar(tmp_path / "0.tar", files.items())
    assert ShardIndex.open(tmp_path).read(0, 0).key == "a"
    assert "0.tar: holds 2 samples that its index lacks" in caplog.text


def test_missing_folder_no_shards_no_index(tmp_path):
    for read in (ShardIndex.open, index_folder):
        with pytest.raises(ConfigError, match="no such folder"):
            read(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match="holds no shards"):
            read(tmp_path)
    write_tar(tmp_path / "0.tar", {"a.jpg": b"1"}.items())
    with pytest.raises(ConfigError, match=f"vlp data index {tmp_path}"):
        ShardIndex.open(tmp_path)
    for name in ("\udcff.tar", "\n.tar"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=r"\\x(ff|0a)\.tar: rename this shard"):
            index_folder(tmp_path)


def test_shards_of_several_splits_are_refused(make_shards):
    folder = make_shards(count=10)
    for number, name in enumerate(("cc3m-train-0000.tar", "cc3m-validation-0000.tar")):
        (folder / f"shard-{number:06d}.tar").rename(folder / name)
    with pytest.raises(ConfigError, match=r"several splits \(cc3m-train-0000.tar, cc3m-valid"):
        index_folder(folder)
    with pytest.raises(ConfigError, match="several splits"):
        _shard_paths(str(folder))
    (folder / "cc3m-validation-0000.tar").rename(folder / "cc3m-train-0001.tar")
    assert index_folder(folder) == []


def test_without_its_rows_an_index_reads_headers(make_shards, tmp_path):
    folder = make_shards()
    places = [(shard, n) for shard, entry in enumerate(ShardIndex.open(folder).shards)
              for n in range(entry.samples)]  # fmt: skip
    expected = [ShardIndex.open(folder).read(*place) for place in places]
    [rows] = folder.glob("samples-*.npy")
    content = rows.read_bytes()
    rows.unlink()
    index = ShardIndex.open(folder)
    assert [index.read(*place) for place in places] == expected
    with pytest.raises(ConfigError, match=r"samples-\w+\.npy is missing.*captions: all.*index"):
        index.caption_ends(0)
    for damaged in (content[:-1], content[:40], b"", content + b"x", content[:-9] + bytes(9)):
        rows.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"samples-\w+\.npy.*index the folder again"):
            ShardIndex.open(folder).read(0, 0)
    index_folder(folder)
    assert ShardIndex.open(folder).read(*places[7]) == expected[7]


def test_rows_replace_header_scans(make_shards, monkeypatch):
    index = ShardIndex.open(make_shards(count=30, per_shard=30, kind="jpg"))
    read, reads = os.pread, []

    def note(file, size, offset):
        reads.append(size)
        return read(file, size, offset)

    monkeypatch.setattr(os, "pread", note)
    index.read(0, 29)
    [size] = reads
    assert size < index.shards[0].bytes / 20


def test_replaced_shards_are_scanned_or_reported(tmp_path):
    write_tar(tmp_path / "0.tar", {f"a{n}.jpg": bytes([n]) * 600 for n in range(4)}.items())
    index_folder(tmp_path)
    write_tar(tmp_path / "0.tar", {f"b{n}.png": bytes([n]) * 9000 for n in range(3)}.items())
    expected = ["b0", "b1", "b2", "corrupt shard"]
    assert read_all(ShardIndex.open(tmp_path)) == expected
    # Of the same length, what does not fit the index is seen, sample by sample.
    write_tar(tmp_path / "0.tar", {f"a{n}.jpg": bytes([n]) * 600 for n in range(4)}.items())
    data = (tmp_path / "0.tar").read_bytes()
    (tmp_path / "0.tar").write_bytes(data[512:] + data[:512])
    assert set(read_all(ShardIndex.open(tmp_path))) == {"corrupt shard"}


def read_all(index):
    keys = []
    for shard, entry in enumerate(index.shards):
        for sample in range(entry.samples):
            try:
                keys.append(index.read(shard, sample).key)
            except BadSample as bad:
                keys.append(bad.kind if entry.name in bad.where else f"not named: {bad.where}")
    return keys


def test_a_damaged_header_in_the_middle(tmp_path):
    write(tmp_path, range(8))
    path = tmp_path / "shard-000000.tar"
    with tarfile.open(path) as archive:
        offset = archive.getmember("k2.png").offset
    data = bytearray(path.read_bytes())
    data[offset : offset + 512] = b"\xff" * 512
    path.write_bytes(data)
    # The index knows where the next sample lies.
    expected = ["k0", "k1", "corrupt shard", "k3", "k4", "k5", "k6", "k7"]
    assert read_all(ShardIndex.open(tmp_path)) == expected
    [problem] = index_folder(tmp_path)
    assert "damaged header" in problem
    assert read_all(ShardIndex.open(tmp_path)) == ["k0", "k1", "k4", "k5", "k6", "k7"]


def test_invalid_and_missing_shards(tmp_path):
    write(tmp_path, range(8))
    (tmp_path / "shard-000000.tar").write_bytes(os.urandom(4096))
    (tmp_path / "shard-000001.tar").unlink()
    with pytest.raises(ConfigError, match=r"1 of 2 shards of its index are missing, shard-000001"):
        ShardIndex.open(tmp_path)
    expected = ["corrupt shard"] * 4 + ["missing shard"] * 4
    assert read_all(ShardIndex.open(tmp_path, outages=OutageConfig(policy="skip"))) == expected


@pytest.mark.parametrize("content", [b"", b"PK", b"{}", b"\x93NUMPY\x01\x00", b"[" * 100_000])
def test_files_that_are_not_an_index_are_refused(tmp_path, content):
    (tmp_path / "index.npz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"index\.npz: not an index.*vlp data index"):
        ShardIndex.open(tmp_path)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": None}, "not an index.*version"),
        ({"version": 2}, "an older version"),
        ({"version": 4, "samples": None}, "a newer version"),
        ({"version": [3]}, "version: int64 of shape"),
        ({"table": None}, "table"),
        ({"table": "samples-0.npy"}, "table: <U13"),
        ({"samples": None}, "samples"),
        ({"name": np.array([b"\xff.tar", b"b.tar"])}, "utf-8"),
        ({"name": np.array([b"b.tar", b"a.tar"])}, "do not ascend"),
        ({"bytes": [9, -9]}, "bytes: numbers from -9 to 9"),
        ({"bytes": [9]}, "bytes: 1 entries of 2 shards"),
        ({"bytes": np.array([9, 9], dtype=object)}, "allow_pickle"),
    ],
)
def test_invalid_indices_are_refused(make_shards, changed, reason):
    folder = make_shards(count=4, per_shard=2)
    change_index(folder, **changed)
    with pytest.raises(ConfigError, match=rf"index\.npz: .*{reason}.*vlp data index"):
        ShardIndex.open(folder)


def test_columns_hold_any_numbers_in_few_bytes():
    numbers = [0, 127, 128, 2**15, 2**31 - 1, 2**31, 2**42]
    for most in numbers:
        entries = [ShardEntry(f"{n}.tar", most, n, most, most) for n in range(2)]
        table = ShardTable.from_entries(entries, "samples-0.npy")
        assert list(table) == entries
        assert table.total == 2 * most
        assert table.pairs.tolist() == [2 * most] * 2
        assert table.bytes.dtype == np.int8
    assert list(ShardTable.from_entries([], "samples-0.npy")) == []


_OPENED = """
import sys, time
from vlp.data.features.store import shards_sha256
from vlp.data.shards.shard_reader import ShardIndex

def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

before, started = peak(), time.process_time()
index = ShardIndex.open(sys.argv[1])
seconds = time.process_time() - started
shards_sha256(index.shards)
print(len(index.shards), peak() - before, seconds)
"""


def test_large_indices_are_small_and_fast(tmp_path):
    """A tenth of the bounds of a million shards: 50 MB and 2 s."""
    shards = 100_000
    entries = (ShardEntry(f"{n:08d}.tar", 1000, 30_000_000 + n, 5000, n % 3) for n in range(shards))
    write_table(tmp_path, entries, "samples-0.npy")
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", _OPENED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    opened, added, seconds = done.stdout.split()
    assert int(opened) == shards
    assert int(added) < 12_000_000  # as Python objects they are 70 MB
    assert float(seconds) < 0.2


def questions(annotation):
    return len(annotation.questions or ())


@pytest.fixture
def folders(tmp_path):
    """Samples with 2, 0, 1, 3 and 1 questions."""
    letters = iter("abcdefg")
    annotations = [
        Annotation(questions=[Question(id=next(letters), question="what?") for _ in range(count)])
        for count in (2, 0, 1, 3, 1)
    ]
    first = annotated_shards(tmp_path / "first", annotations[:4], b"x")
    return [first, annotated_shards(tmp_path / "second", annotations[4:], b"x")]


def test_every_part_is_one_item_in_order(folders):
    items = Items(folders, questions)
    read = [items.read(number) for number in range(len(items))]
    assert "".join(item.raw.annotation.questions[item.part].id for item in read) == "abcdefg"
    assert read[2].raw.key == "0002"
    assert read[2].where.endswith("shard-000000.tar, 0002")


def test_without_parts_every_sample_is_an_item(folders):
    items = Items(folders)
    assert [items.read(number).raw.key for number in range(len(items))] == [
        *("0000", "0001", "0002", "0003", "0000")
    ]
    assert len(Items(folders, limit=2)) == 2
    with pytest.raises(IndexError, match="2 items, none at 2"):
        Items(folders, limit=2).read(2)


def test_a_sample_that_cannot_be_read_is_one_bad_item(folders):
    tar = folders[0] / "shard-000000.tar"
    data = tar.read_bytes()
    place = data.index(b'{"version"')
    tar.write_bytes(data[:place] + b"[" + data[place + 1 :])
    items = Items(folders, questions)
    assert len(items) == 6
    with pytest.raises(BadSample, match="bad annotation"):
        items.read(0)


def require_whole(folder, whole):
    """Whatever has its final name has its final content, and there is no index too early."""
    present = {name: data for name, data in files(folder).items() if not name.endswith(".tmp")}
    for name, data in present.items():
        assert data == whole[name], name
    tars = [name for name in whole if name.endswith(".tar")]
    there = [name for name in tars if name in present]
    assert there == tars[: len(there)]
    if "index.npz" in present:
        assert present == whole


@pytest.mark.nightly
def test_killed_before_any_step_of_writing(tmp_path):
    write(tmp_path / "whole")
    whole = files(tmp_path / "whole")
    steps = steps_of(write, tmp_path / "counted")
    assert steps > 80
    for step in range(0, steps, 3):
        folder = tmp_path / f"killed at {step}"
        folder.mkdir()
        assert in_child(killed_at, step, write, folder) == -signal.SIGKILL
        require_whole(folder, whole)
        write(folder)
        assert files(folder) == whole


@pytest.mark.nightly
def test_killed_indexing_leaves_the_old_or_the_new_index(tmp_path):
    write(tmp_path / "old", range(4))
    write(tmp_path / "new", range(8))
    shard = "shard-000001.tar"
    start = files(tmp_path / "old") | {shard: files(tmp_path / "new")[shard]}

    def folder_before(name):
        folder = tmp_path / name
        folder.mkdir()
        for file, data in start.items():
            (folder / file).write_bytes(data)
        return folder

    outcomes = set()
    for step in range(steps_of(index_folder, folder_before("counted"))):
        folder = folder_before(f"killed at {step}")
        assert in_child(killed_at, step, index_folder, folder) == -signal.SIGKILL
        try:
            index = ShardIndex.open(folder)
        except ConfigError as error:
            outcomes.add("old" if f"out of date, without {shard}" in str(error) else str(error))
            continue
        assert [index.read(1, number).key for number in range(4)] == ["k4", "k5", "k6", "k7"]
        outcomes.add("new")
        (folder / shard).unlink()
        index_folder(folder)  # of another content: nothing of the killed one stays
        assert len(list(folder.iterdir())) == 3
    assert outcomes == {"old", "new"}


@pytest.mark.parametrize("deleted", [[0], [1], [0, 1], [2]])
def test_deleted_shards_are_rewritten_and_others_stay(tmp_path, deleted):
    write(tmp_path)
    whole = files(tmp_path)
    for number in deleted:
        (tmp_path / f"shard-{number:06d}.tar").unlink()
    for _ in range(2):
        write(tmp_path)
        assert files(tmp_path) == whole
    assert [entry.name for entry in ShardIndex.open(tmp_path).shards] == sorted(
        name for name in whole if name.endswith(".tar")
    )


def test_shards_of_another_process_are_not_overwritten(tmp_path):
    other = tmp_path / "shard-000000.tar"
    with pytest.raises(ConfigError, match=r"shard-000000\.tar: was written by another process"):
        write(tmp_path, before=lambda number: other.write_bytes(b"theirs") if number == 3 else None)
    assert files(tmp_path) == {other.name: b"theirs"}


@pytest.mark.parametrize("limit", [0, 300, 4000, 20_000, 23_000])
def test_a_limit_of_file_size_leaves_no_partial_shard(tmp_path, limit):
    write(tmp_path / "whole")
    whole, folder = files(tmp_path / "whole"), tmp_path / "limited"
    assert max(len(data) for data in whole.values()) > 23_000

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            write(folder)
        except ConfigError as error:
            os._exit(7 if "File too large" in str(error) else 8)

    assert in_child(limited) == 7
    require_whole(folder, whole)
    assert not [name for name in files(folder) if name.endswith(".tar.tmp")]
    write(folder)
    assert files(folder) == whole
