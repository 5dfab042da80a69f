import fcntl
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from shard_server import MB, content, file_of, manifest, serve

from vlp.config import ConfigError
from vlp.data.shards import remote
from vlp.data.shards.remote import OutageConfig, RemoteFolder, ShardCache, open_filesystem
from vlp.data.shards.sample_files import DataError, PausedDataError, UnreadableDataError
from vlp.data.shards.shard_reader import BadSample, ShardIndex

SHORT = OutageConfig(seconds=0.1, policy="skip")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.002)


@pytest.fixture
def server(make_shards):
    with serve(make_shards(count=25, per_shard=5)) as told:
        yield told


@pytest.fixture
def batches(make_data):
    def make(path, cache=None, **options):
        options = {"canonical_streams": 2, "shuffle_window": 4, "cache": cache} | options
        return make_data(path, batch=4, seed=3, **options).batches(stop_after=14)

    return make


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def original(server, number):
    return (server.folder / file_of(server, number).name).read_bytes()


def room_for(server, *numbers):
    return sum(file_of(server, number).bytes for number in numbers)


def held(cache):
    paths = sorted(path.name for path in cache.folder.glob("*/shard-*") if path.suffix != ".part")
    return [int(name.partition("-")[2][:6]) for name in paths]


def on_disk(folder):
    """Bytes of all files; what was only about to be fetched takes none."""
    return sum(path.stat().st_size for path in folder.glob("*/*"))


def read_all(index):
    return [
        index.read(shard, sample)._replace(where="")
        for shard, entry in enumerate(index.shards)
        for sample in range(entry.samples)
    ]


@pytest.mark.parametrize("protocol", ["http", "file", "memory"])
def test_url_and_folder_hold_equal_samples(server, tmp_path, protocol):
    url = {"http": server.url, "file": f"file://{server.folder}", "memory": "memory://bucket/s"}
    if protocol == "memory":
        for path in server.folder.iterdir():
            fsspec.filesystem("memory").pipe_file(f"/bucket/s/{path.name}", path.read_bytes())
    cache = ShardCache(tmp_path / "cache", MB)
    index = ShardIndex.open(url[protocol], cache)
    local = ShardIndex.open(server.folder)
    assert read_all(index) == read_all(local)
    assert all(np.array_equal(index.caption_ends(n), local.caption_ends(n)) for n in range(5))
    assert str(index.folder) == url[protocol]
    assert len(index) == 25
    assert held(cache) == [0, 1, 2, 3, 4]
    if protocol == "http":
        assert {server.asked[f"shard-{n:06d}.tar"] for n in range(5)} == {1}
    again = pickle.loads(pickle.dumps(index))
    assert again.read(3, 2)[:5] == local.read(3, 2)[:5]


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"captions": "all", "workers": 1}])
def test_training_from_a_url_is_training_from_the_folder(server, batches, tmp_path, options):
    limit = room_for(server, 0, 1, 2, 3) + 1000
    cache = {"folder": str(tmp_path / "cache"), "limit": limit}
    local = batches(server.folder, **options)
    remote = batches(server.url, cache, **options)
    for (expected, consumed), (actual, consumed_too) in zip(local, remote, strict=True):
        assert actual.valid.any()
        assert consumed == consumed_too
        assert_same(expected, actual)
    assert on_disk(tmp_path / "cache") <= limit


def test_eviction_is_lru_and_spares_files_in_use(server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_FULL_SECONDS", 0.5)
    cache = ShardCache(tmp_path / "cache", room_for(server, 0, 1, 2))
    for number in (0, 1, 2, 0):  # 1 is the one unused for longest now
        os.close(cache.open(file_of(server, number)))
        time.sleep(0.02)
    os.close(cache.open(file_of(server, 3)))
    assert held(cache) == [0, 2, 3]
    in_use = cache.open(file_of(server, 2))
    time.sleep(0.02)
    for number in (4, 0, 1):
        os.close(cache.open(file_of(server, number)))
        time.sleep(0.02)
        assert 2 in held(cache)
    more = [cache.open(file_of(server, number)) for number in (0, 1)]
    with pytest.raises(DataError, match=r"cache\.limit [\d,]+ bytes is too small: everything.*"):
        cache.open(file_of(server, 3))
    assert held(cache) == [0, 1, 2]
    assert cache.bytes_used() <= cache.limit
    # A reader that is asked for room closes what it holds.
    cache.on_full.append(lambda: os.close(more.pop()) if more else None)
    assert content(cache.open(file_of(server, 3))) == original(server, 3)
    assert content(in_use) == original(server, 2)


def test_unlisted_files_in_the_cache_folder_stay(server, tmp_path):
    files = [file_of(server, number) for number in range(3)]
    limit = max(file.bytes for file in files)
    cache = ShardCache(tmp_path / "cache", limit)
    os.close(cache.open(files[0]))
    source = cache.folder / Path(files[0].path).parent
    others = [
        cache.folder / "thesis" / "results.2024",
        cache.folder / "lock.5",
        source / f"mine.0123456789abcdef.{limit}",
        source / "mine.unknown.7.part",
        tmp_path / "outside.unknown.1",
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path, (1, 1))  # unused for longer than anything
    listed = json.loads((cache.folder / "fetched.json").read_text())
    listed += ["../outside.unknown.1", f"{source.name}/../thesis/results.2024", 7]
    (cache.folder / "fetched.json").write_text(json.dumps(listed))
    for file in files[1:]:
        os.close(cache.open(file))
        assert cache.bytes_used() == file.bytes
    assert [path.read_bytes() for path in others] == [b"mine"] * len(others)
    assert not cache.holds(files[0])


def test_an_index_closes_its_own_shards_for_room(server, tmp_path):
    cache = ShardCache(tmp_path / "cache", room_for(server, 0))
    index = ShardIndex.open(server.url, cache)
    started = time.monotonic()
    assert len({index.read(shard, 0).key for shard in range(5)}) == 5
    assert time.monotonic() - started < 10
    assert len(held(cache)) == 1


def _fetch_in_any_order(folder, limit, files, seed):
    cache = ShardCache(folder, limit)
    for file in random.Random(seed).sample(files * 2, 2 * len(files)):
        data = content(cache.open(file))
        assert len(data) == file.bytes
        assert data[:6] == b"shards"


def together(work, *arguments):
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=work, args=(*arguments, seed)) for seed in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4


def test_processes_share_a_large_and_a_small_cache(server, tmp_path):
    files = [file_of(server, number) for number in range(5)]
    together(_fetch_in_any_order, tmp_path / "large", MB, files)
    assert [server.asked[file.name] for file in files] == [1] * 5
    assert not list((tmp_path / "large").glob("*/*.part"))
    limit = room_for(server, 0, 1) + 100
    together(_fetch_in_any_order, tmp_path / "small", limit, files)
    assert on_disk(tmp_path / "small") <= limit


def test_files_renamed_during_a_count_are_counted(server, tmp_path, monkeypatch):
    """It takes its name between the looks at its two places; it stays in the list of the cache."""
    first, second = file_of(server, 0), file_of(server, 1)
    cache = ShardCache(tmp_path / "cache", room_for(server, 0, 1))
    os.close(cache.open(first))
    path = cache.folder / first.path
    part = path.with_name(path.name + ".part")
    places = (str(path), str(part))
    stat, looks = os.stat, 0

    def renamed_after_each_look(name, *arguments, **options):
        nonlocal looks
        try:
            return stat(name, *arguments, **options)
        finally:
            if str(name) in places:
                looks += 1
                with suppress(FileNotFoundError):
                    part.rename(path)

    path.rename(part)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", renamed_after_each_look)
        assert cache.bytes_used() >= first.bytes
    path.rename(part)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", renamed_after_each_look)
        os.close(cache.open(second))
    assert looks > 1
    assert cache.bytes_used() == room_for(server, 0, 1)


def test_files_renamed_during_an_eviction_are_counted(server, tmp_path, monkeypatch):
    read, fetched, missing = (file_of(server, number) for number in range(3))
    cache = ShardCache(tmp_path / "cache", room_for(server, 0, 1) + 100)
    handle = cache.open(read)
    os.close(cache.open(fetched))
    path = cache.folder / fetched.path
    part = path.with_name(path.name + ".part")
    path.rename(part)
    open_file = os.open

    def renamed_before(name, *arguments, **options):
        if str(name) == str(part):
            with suppress(FileNotFoundError):
                part.rename(path)
        return open_file(name, *arguments, **options)

    monkeypatch.setattr(os, "open", renamed_before)
    os.close(cache.open(missing))
    assert held(cache) == [0, 2]
    assert on_disk(cache.folder) <= cache.limit
    os.close(handle)


def test_waiting_processes_do_not_wait_for_readers(server, tmp_path, monkeypatch):
    """It becomes whole, and is read by another, just before its lock would be waited for."""
    file = file_of(server, 1)
    cache = ShardCache(tmp_path / "cache", MB)
    path = cache.folder / file.path
    readers = []

    def lock(handle, how):
        if not readers:
            part = path.with_name(path.name + ".part")
            part.write_bytes((server.folder / file.name).read_bytes())
            part.rename(path)
            readers.append(os.open(path, os.O_RDONLY))
            fcntl.flock(readers[0], fcntl.LOCK_SH)
        fcntl.flock(handle, how)

    monkeypatch.setattr(remote, "flock", lock)
    contents = []
    other = threading.Thread(target=lambda: contents.append(content(cache.open(file))), daemon=True)
    other.start()
    other.join(20)
    waits = other.is_alive()
    os.close(readers[0])
    assert not waits
    assert contents == [path.read_bytes()]
    assert server.asked[file.name] == 0
    assert not list(cache.folder.glob("*/*.part"))


KILLED = """
import os, sys
from vlp.data.shards.remote import CachedFile, RemoteFolder, ShardCache
url, name, size, folder = sys.argv[1:]
ShardCache(folder, 10**6).open(CachedFile(RemoteFolder(url), name, int(size)))
"""


def test_killed_downloads_are_not_read(server, tmp_path):
    file, folder = file_of(server, 1), tmp_path / "cache"
    server.stalls[file.name] = 1
    command = [sys.executable, "-c", KILLED, server.url, file.name, str(file.bytes), str(folder)]
    child = subprocess.Popen(command)
    wait_until(lambda: any(part.stat().st_size for part in folder.glob("*/*.part")))
    child.send_signal(signal.SIGKILL)
    child.wait()
    server.go.set()
    cache = ShardCache(folder, MB)
    assert held(cache) == []
    [part] = folder.glob("*/*.part")
    assert 0 < part.stat().st_size < file.bytes
    assert cache.bytes_used() == file.bytes  # counted in full, as if it were going on
    assert content(cache.open(file)) == original(server, 1)
    assert not part.exists()


def test_leftovers_of_killed_downloads_are_evicted(server, tmp_path):
    cache = ShardCache(tmp_path / "cache", room_for(server, 0, 1))
    left = cache.folder / (file_of(server, 2).path + ".part")
    left.parent.mkdir()
    left.write_bytes(b"half")
    (cache.folder / "fetched.json").write_text(json.dumps([file_of(server, 2).path]))
    os.utime(left, (0, 0))
    for number in (0, 1):
        os.close(cache.open(file_of(server, number)))
    assert not left.exists()
    assert held(cache) == [0, 1]


def test_truncated_cache_files_are_downloaded_again(server, tmp_path):
    cache, file = ShardCache(tmp_path / "cache", MB), file_of(server, 0)
    os.close(cache.open(file))
    os.truncate(cache.folder / file.path, 100)
    assert content(cache.open(file)) == original(server, 0)
    assert server.asked[file.name] == 2


def test_shards_of_one_name_with_other_content_are_other_files(server, tmp_path):
    manifest(server)
    cache = ShardCache(tmp_path / "cache", MB)
    assert ShardIndex.open(server.url, cache).read(0, 0).image != b""
    path = server.folder / "shard-000000.tar"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"number 0", b"number 9"))
    manifest(server)
    captions = ShardIndex.open(server.url, cache).read(0, 0).annotation.captions
    assert "number 9" in captions[0]
    path.write_bytes(data + bytes(10240))
    manifest(server)
    with pytest.raises(BadSample, match=r"corrupt shard.*received .* bytes, the index says"):
        ShardIndex.open(server.url, cache, SHORT).read(0, 0)


def test_prefetch_downloads_and_raises_nothing(server, tmp_path):
    cache = ShardCache(tmp_path / "cache", MB)
    index = ShardIndex.open(server.url, cache, OutageConfig(seconds=0.5, policy="skip"))
    server.fails["shard-000001.tar"] = 1000
    for number in (3, 1, 4):
        index.prefetch(number)
    wait_until(lambda: held(cache) == [3, 4])
    assert index.read(3, 0).key == "shards_0015"
    with pytest.raises(BadSample, match="missing shard"):
        index.read(1, 0)
    requests = server.asked["shard-000001.tar"]
    assert requests > 2
    with pytest.raises(BadSample, match="missing shard"):
        index.read(1, 1)
    assert server.asked["shard-000001.tar"] == requests  # the background's tries were enough
    assert server.asked["shard-000003.tar"] == 1


def test_rows_are_prefetched_and_replace_header_scans(server, tmp_path):
    [rows] = server.folder.glob("samples-*.npy")
    cache = ShardCache(tmp_path / "cache", MB)
    index = ShardIndex.open(server.url, cache)
    assert index.read(0, 1).key == "shards_0001"
    name = f"{rows.name}.unknown.{rows.stat().st_size}"
    wait_until(lambda: list(cache.folder.glob(f"*/{name}")))
    scanned = len(index._scans)
    assert [index.read(shard, 2).key for shard in (3, 4)] == ["shards_0017", "shards_0022"]
    assert len(index._scans) == scanned
    assert server.asked[rows.name] == 1
    small = ShardIndex.open(server.url, ShardCache(tmp_path / "small", 30_000))
    assert [small.read(shard, 2).key for shard in (3, 4)] == ["shards_0017", "shards_0022"]
    assert len(small._scans) == 2
    assert server.asked[rows.name] == 1
    rows.unlink()
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "other", MB))
    with pytest.raises(ConfigError, match=r"samples-\w+\.npy: missing shard"):
        index.caption_ends(0)
    assert read_all(index) == read_all(ShardIndex.open(server.folder))


def test_invalid_remote_folders_are_refused(server, batches, tmp_path):
    cache = ShardCache(tmp_path / "cache", MB)
    with pytest.raises(ConfigError, match=r"need a cache.*data\.cache=\{folder"):
        ShardIndex.open(server.url, None)
    with pytest.raises(ConfigError, match="unknown protocol 'gopher'"):
        ShardIndex.open("gopher://host/shards", cache)
    with pytest.raises(ConfigError, match=r"s3://bucket/index\.npz: .* locate credentials"):
        ShardIndex.open("s3://bucket", cache)
    with pytest.raises(ConfigError, match=r"index\.npz: cannot be fetched.*tried \d+ times"):
        ShardIndex.open("http://127.0.0.1:9/shards", cache, SHORT)
    small = {"folder": str(tmp_path / "cache"), "limit": room_for(server, 0)}
    with pytest.raises(ConfigError, match=r"cache\.limit [\d,]+ bytes is too small: one rank"):
        batches(server.url, small)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache\.folder .*file"):
        ShardCache(tmp_path / "file" / "cache", MB)
    tiny = ShardCache(tmp_path / "cache", 100)
    with pytest.raises(DataError, match=r"100 bytes cannot hold .*shard-000000\.tar"):
        ShardIndex.open(server.url, tiny).read(0, 0)
    (server.folder / "index.npz").unlink()
    with pytest.raises(ConfigError, match=r"has no index\.npz; .*data\.epoch_samples"):
        ShardIndex.open(server.url, cache)


def test_full_disk_raises_data_error(server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB))
    monkeypatch.setattr(RemoteFolder, "fetch", full)
    with pytest.raises(DataError, match=r"cache\.folder.*No space left.*limit 1,000,000"):
        index.read(0, 0)


def test_cache_folders_of_others_or_writable_by_all_are_refused(tmp_path, monkeypatch):
    ShardCache(tmp_path / "made" / "cache", 1)
    assert (tmp_path / "made" / "cache").stat().st_mode & 0o777 == 0o700
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted").chmod(0o777)
    with pytest.raises(ConfigError, match="all users may write into it; give a folder of your own"):
        ShardCache(tmp_path / "planted", 1)
    (tmp_path / "planted").chmod(0o755)
    ShardCache(tmp_path / "planted", 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
    if os.getuid() != 0:  # what root owns is as good as one's own
        with pytest.raises(ConfigError, match="belongs to another user"):
            ShardCache(tmp_path / "planted", 1)


WORD = "a/b@c&d=e %2F"


def test_environment_variables_in_paths_are_not_quoted(tmp_path, monkeypatch):
    folder = tmp_path / "a b" / "c%d"
    folder.mkdir(parents=True)
    digest = "ab" * 32
    (folder / "manifest.json").write_text(
        f'{{"shards": [{{"name": "0.tar", "sha256": "{digest}"}}]}}'
    )
    monkeypatch.setenv("D", str(folder))
    names = np.array([b"0.tar"])
    assert RemoteFolder("file://${D}").digests(names) == {"0.tar": digest}
    assert open_filesystem("memory://${D}/x")[1] == f"{folder}/x"
    monkeypatch.setenv("D", "shards")
    with serve(folder) as server:
        url = server.url.replace("shards", "${D}")
        assert RemoteFolder(url).digests(names) == {"0.tar": digest}


def test_environment_variables_in_credentials_are_quoted(monkeypatch):
    monkeypatch.setenv("WORD", WORD)
    monkeypatch.setenv("D", "a/b")
    files, path = open_filesystem("https://me:${WORD}@host/${D}/x?token=${WORD}")
    assert path == "https://host/a/b/x"
    assert files.kwargs["params"] == [("token", WORD)]
    assert files.client_kwargs["auth"].password == WORD


SHARD = "shard-000001.tar"
POLICIES = {"fail": UnreadableDataError, "pause": PausedDataError, "skip": BadSample}


@pytest.mark.parametrize("trouble", ["fails", "halves", "stalls", "others"])
def test_transient_failures_are_retried(server, tmp_path, trouble, monkeypatch):
    manifest(server)
    if trouble == "stalls":
        monkeypatch.setattr(remote, "_READ_SECONDS", 1.0)  # longer than a busy machine takes
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB))
    getattr(server, trouble)[SHARD] = 3
    assert index.read(1, 0)[:5] == ShardIndex.open(server.folder).read(1, 0)[:5]
    assert server.asked[SHARD] == 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("status", [404, 403, 500, 503, 429])
def test_lasting_failures_follow_the_policy(server, tmp_path, status, policy):
    outages = OutageConfig(seconds=0.1, policy=policy)
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB), outages)
    server.status, server.fails[SHARD] = status, 1000
    requests = []
    # A pause would end a run again and again for what no later start finds.
    kind = UnreadableDataError if policy == "pause" and status <= 404 else POLICIES[policy]
    for sample in range(3):
        with pytest.raises(kind) as error:
            index.read(1, sample)
        assert type(error.value) is kind
        assert f"missing shard: {server.url}/{SHARD} (" in str(error.value)
        requests.append(server.asked[SHARD])
    assert len(set(requests)) == 1  # it is not tried again for each sample
    assert requests[0] > 1 if status > 404 else requests[0] == 1
    assert index.read(2, 0).key == "shards_0010"


@pytest.mark.parametrize("policy", POLICIES)
def test_shards_that_differ_from_the_manifest_are_refused(server, tmp_path, policy):
    manifest(server, 3)
    outages = OutageConfig(seconds=0.1, policy=policy)
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB), outages)
    assert index.read(2, 0).key == "shards_0010"
    with pytest.raises(POLICIES[policy], match=r"corrupt shard.*shard-000003\.tar.*SHA-256"):
        index.read(3, 0)
    manifest(server)
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB), outages)
    assert index.read(3, 0).key == "shards_0015"
    for text in ("", "[]", '{"shards": [{"sha256": "1"}]}', '{"shards": 3}'):
        (server.folder / "manifest.json").write_text(text)
        with pytest.raises(ConfigError, match=r"manifest\.json: not a manifest"):
            ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB))


@pytest.mark.parametrize("policy", ["fail", "pause"])
def test_errors_of_workers_name_shard_and_remedy(server, batches, tmp_path, policy):
    options = {"outages": {"seconds": 0.1, "policy": policy}, "workers": 1}
    cache = {"folder": str(tmp_path / "cache"), "limit": MB}
    stream = batches(server.url, cache, **options)
    server.down_until = time.monotonic() + 60
    with pytest.raises(POLICIES[policy]) as error:
        list(stream)
    assert str(error.value).startswith(f"missing shard: {server.url}/shard-")
    assert "--resume" not in str(error.value)  # the command names its remedy
    assert "Traceback" not in str(error.value)


def test_a_slow_download_does_not_block_prefetching(make_shards, tmp_path):
    with serve(make_shards(count=25, per_shard=5)) as server:
        slow, *others = (file_of(server, number) for number in range(5))
        server.stalls[slow.name] = 1
        cache = ShardCache(tmp_path / "cache", MB)
        reading = threading.Thread(target=lambda: content(cache.open(slow)), daemon=True)
        reading.start()
        wait_until(lambda: server.asked[slow.name])
        for file in (*[slow] * 5, *others):
            cache.prefetch(file)
        wait_until(lambda: all(map(cache.holds, others)))
        assert not cache.holds(slow)
        server.go.set()
        reading.join(20)
        assert cache.holds(slow)
    assert server.asked[slow.name] == 1
