import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from made_shards import cut, jpeg, run, write, write_tar
from raw_images import files_of

from data_tools import reshard
from data_tools.__main__ import main
from vlp.data.shards.shard_reader import ShardIndex


def members(folder):
    found = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member)
                assert content is not None
                found.append((member.name, content.read()))
    return found


def keys(folder):
    return list(dict.fromkeys(name.split(".")[0] for name, _ in members(folder)))


def sizes(folder):
    return [entry.samples for entry in ShardIndex.open(folder).shards]


def deal(*arguments, per_shard=4):
    return run("reshard", *arguments, "--samples-per-shard", per_shard)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "shards", {f"k{n}": jpeg(n) for n in range(11)}, 3)


@pytest.fixture
def foreign(tmp_path):
    long = "a_very_long_key_" * 10
    folder = tmp_path / "foreign"
    write_tar(
        folder / "00000.tar",
        [
            ("README", b"no sample"),
            ("folder/one.jpg", jpeg(1)),
            ("folder/one.txt", b"first"),
            ("folder/one.cls", b"7"),
            ("folder/one.seg.npy", bytes(range(256)) * 5),
            ("alone.json", b"{}"),
            (f"{long}.JPG", jpeg(2)),
            (f"{long}.1.jpg", jpeg(3)),
            ("ünï.png", b""),
        ],
    )
    write_tar(folder / "00001.tar", [("last.jpg", b"damaged"), ("last.json", b"{")])
    return folder


@pytest.mark.parametrize("per_shard", [1, 4, 100])
def test_order_and_bytes_are_kept(folder, tmp_path, per_shard):
    out = tmp_path / "out"
    assert deal(folder, "--out", out, per_shard=per_shard) == 0
    assert members(out) == members(folder)
    assert sizes(out) == [per_shard] * (11 // per_shard) + ([11 % per_shard] * (per_shard > 1))
    assert run("verify", out) == 0
    assert not list(out.glob("*.tmp"))
    assert not (out / "reshard.places").exists()


def test_folders_are_merged_in_order(folder, foreign, tmp_path):
    out = tmp_path / "out"
    assert deal(foreign, folder, "--out", out) == 0
    assert members(out) == members(foreign)[1:] + members(folder)
    sources = {ShardIndex.open(out).read_annotation(3, n).source for n in range(4)}
    assert sources == {"shards"}


def test_shuffled(folder, foreign, tmp_path):
    orders = {}
    for name, seed in {"a": 0, "b": 0, "c": 1}.items():
        out = tmp_path / name
        assert deal(folder, foreign, "--out", out, "--shuffle", seed) == 0
        orders[name] = keys(out)
        assert sorted(members(out)) == sorted(members(folder) + members(foreign)[1:])
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert orders["a"] != orders["c"]
    assert orders["a"] != keys(folder) + keys(foreign)[1:]
    shards = reshard.shards_of([folder])[:2]
    new = [*reshard.new_shards(range(100), 100, 7, shards, np.array([5000, 5000]))]
    assert sorted(np.concatenate([shard.samples for shard in new]).tolist()) == [*range(10_000)]
    # Of each new shard about half comes from either old one: 50 +- 5 of 100, at most 5 sigma.
    assert all(25 < (shard.shard_of_sample == 0).sum() < 75 for shard in new)


def test_repeated_keys_are_refused_by_name(folder, tmp_path, capsys):
    other = write(tmp_path / "deep.er" / "shards", {"k3": jpeg(77), "x": jpeg(78)})
    out = tmp_path / "out"
    assert deal(folder, other, "--out", out) == 2
    message = capsys.readouterr().err
    assert "1 keys are not unique: k3 (" in message
    assert str(folder / "shard-000001.tar") in message
    assert not list(out.glob("*.tar"))


def test_damaged_shards_are_told_and_missing_ones_refused(folder, tmp_path, capsys):
    whole = members(folder)
    cut(folder / "shard-000001.tar")
    (folder / "shard-000003.tar").write_bytes(b"")
    out = tmp_path / "out"
    assert deal(folder, "--out", out) == 1
    assert members(out) == whole[:11] + whole[12:18]
    assert "shard-000003.tar: empty, 0 samples before it" in capsys.readouterr().out
    assert run("verify", out) == 0
    (folder / "shard-000003.tar").unlink()
    for command in (("reshard", "--samples-per-shard", 9), ("stats",)):
        assert run(*command, folder, "--out", tmp_path / command[0]) == 2
        assert "1 of 4 shards of its index are missing, shard-000003.tar" in capsys.readouterr().err


def test_interrupted_and_run_again(folder, tmp_path, monkeypatch):
    options = ("--shuffle", 3)
    assert deal(folder, "--out", tmp_path / "whole", *options) == 0
    out = tmp_path / "out"
    calls, append = 0, reshard.append_member

    def stop(*arguments):
        nonlocal calls
        calls += 1
        if calls == 11:
            raise KeyboardInterrupt
        append(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(reshard, "append_member", stop)
    assert deal(folder, "--out", out, *options) == 130
    assert [path.name for path in out.glob("shard*")] == ["shard-000000.tar"]
    first = (out / "shard-000000.tar").stat()
    assert deal(folder, "--out", out, *options) == 0
    assert files_of(out) == files_of(tmp_path / "whole")
    assert (out / "shard-000000.tar").stat().st_mtime_ns == first.st_mtime_ns
    assert deal(folder, "--out", out, *options) == 0  # nothing is left to do
    assert (out / "shard-000000.tar").stat().st_mtime_ns == first.st_mtime_ns


def test_sources_of_the_same_size_that_were_written_anew_are_others(folder, tmp_path, capsys):
    out, source = tmp_path / "out", folder / "shard-000001.tar"
    assert deal(folder, "--out", out) == 0
    before = source.stat()
    source.write_bytes(source.read_bytes().replace(b"number 4", b"changed "))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert source.stat().st_size == before.st_size
    assert deal(folder, "--out", out) == 2
    assert "was begun with shards (places, sizes and times)" in capsys.readouterr().err


def test_killed_at_any_moment(tmp_path):
    folder = write(tmp_path / "shards", {f"k{n}": os.urandom(20_000) for n in range(24)}, 20)
    command = ["reshard", str(folder), "--samples-per-shard", "3", "--shuffle", "1"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main([*command, "--out", str(whole), "--processes", "1"]) == 0
    expected = files_of(whole)
    # Slowed down, to be killed amid a shard.
    program = (
        "import sys, time\nfrom data_tools import reshard\n"
        "from data_tools.__main__ import main\n"
        "append = reshard.append_member\n"
        "def slow(*given): time.sleep(0.1); append(*given)\n"
        "reshard.append_member = slow; sys.exit(main(sys.argv[1:]))"
    )
    started = [sys.executable, "-c", program, *command, "--out", str(out), "--processes", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for shards in (1, 4):
        process = subprocess.Popen(started, env=environment, stderr=subprocess.DEVNULL)
        while len(list(out.glob("*.tar"))) < shards and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        there = {path.name: path.read_bytes() for path in out.glob("*.tar")}
        assert shards <= len(there) < 8
        assert there.items() <= expected.items()
    assert main([*command, "--out", str(out), "--processes", "1"]) == 0
    assert files_of(out) == expected
