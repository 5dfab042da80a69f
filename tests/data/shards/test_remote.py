"""Shards behind a URL: environment in URLs, outages, and shards that are not in the cache yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from shard_server import MB, ShardServer, batches, content, file_of, manifest, serve

from vlp.config import ConfigError
from vlp.data.config import DataConfig
from vlp.data.pretrain import PretrainData
from vlp.data.shards import remote as outages_module
from vlp.data.shards.remote import (
    FETCHED_AHEAD,
    OutageConfig,
    RemoteFolder,
    ShardCache,
    connected,
)
from vlp.data.shards.sample_files import DataError, PausedDataError
from vlp.data.shards.shard_reader import BadSample, ShardIndex
from vlp.data.stream.batch import Inputs

WORD = "a/b@c&d=e %2F"


def test_a_path_of_the_environment_is_inserted_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b" / "c%d"
    folder.mkdir(parents=True)
    digest = "ab" * 32
    (folder / "manifest.json").write_text(
        f'{{"shards": [{{"name": "0.tar", "sha256": "{digest}"}}]}}'
    )
    monkeypatch.setenv("D", str(folder))
    names = np.array([b"0.tar"])
    assert RemoteFolder("file://${D}").digests(names) == {"0.tar": digest}
    assert connected("memory://${D}/x")[1] == f"{folder}/x"
    monkeypatch.setenv("D", "shards")
    with serve(folder) as server:
        url = server.url.replace("shards", "${D}")
        assert RemoteFolder(url).digests(names) == {"0.tar": digest}


def test_secrets_of_the_environment_may_hold_any_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORD", WORD)
    monkeypatch.setenv("D", "a/b")
    files, path = connected("https://me:${WORD}@host/${D}/x?token=${WORD}")
    assert path == "https://host/a/b/x"
    assert files.kwargs["params"] == [("token", WORD)]
    assert files.client_kwargs["auth"].password == WORD


SHARD = "shard-000001.tar"
Policy = Literal["fail", "pause", "skip"]
POLICIES: dict[Policy, type[Exception]] = {
    "fail": DataError,
    "pause": PausedDataError,
    "skip": BadSample,
}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages_module, "_FIRST_WAIT", 0.002)


@pytest.fixture
def server(make_shards: Callable[..., Path]) -> Iterator[ShardServer]:
    """Five shards of five samples each."""
    with serve(make_shards(count=25, per_shard=5)) as told:
        yield told


@pytest.mark.parametrize("trouble", ["fails", "halves", "stalls", "others"])
def test_trouble_that_passes_is_sat_out(
    server: ShardServer, tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(server)
    monkeypatch.setattr(outages_module, "_SILENT_SECONDS", 0.2)
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB))
    getattr(server, trouble)[SHARD] = 3
    assert index.read(1, 0)[:5] == ShardIndex.open(server.folder).read(1, 0)[:5]
    assert server.asked[SHARD] == 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("status", [404, 403, 500, 503, 429])
def test_trouble_that_stays_ends_as_the_policy_says(
    server: ShardServer, tmp_path: Path, status: int, policy: Policy
) -> None:
    outages = OutageConfig(seconds=0.1, policy=policy)
    index = ShardIndex.open(server.url, ShardCache(tmp_path / "cache", MB), outages)
    server.status, server.fails[SHARD] = status, 1000
    asked = []
    # A pause would end a run again and again for what no later start finds.
    kind = DataError if policy == "pause" and status <= 404 else POLICIES[policy]
    for sample in range(3):
        with pytest.raises(kind) as error:
            index.read(1, sample)
        assert type(error.value) is kind
        assert f"missing shard: {server.url}/{SHARD} (" in str(error.value)
        asked.append(server.asked[SHARD])
    assert len(set(asked)) == 1  # it is not tried again for each sample
    assert asked[0] > 2 if status > 404 else asked[0] == 1
    assert index.read(2, 0).key == "shards_0010"


@pytest.mark.parametrize("policy", POLICIES)
def test_other_bytes_than_the_manifest_says_are_never_read(
    server: ShardServer, tmp_path: Path, policy: Policy
) -> None:
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


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_that_is_away_for_a_while_costs_no_sample(
    server: ShardServer, vocabulary: Path, tmp_path: Path, workers: int
) -> None:
    cache = {"folder": str(tmp_path / "cache"), "limit": MB}
    local = list(batches(str(server.folder), vocabulary, None, workers=workers))
    stream = batches(server.url, vocabulary, cache, workers=workers)
    server.status, server.down_until = 503, time.monotonic() + 2
    for (expected, _), (found, _) in zip(local, stream, strict=True):
        assert not found.skipped
        for one, other in zip(expected, found):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert any(count < 0 for count in server.fails.values())


@pytest.mark.parametrize("policy", ["fail", "pause"])
def test_a_worker_says_why_it_cannot_go_on(
    server: ShardServer, vocabulary: Path, tmp_path: Path, policy: Policy
) -> None:
    options: dict[str, Any] = {"outages": {"seconds": 0.1, "policy": policy}, "workers": 1}
    cache = {"folder": str(tmp_path / "cache"), "limit": MB}
    stream = batches(server.url, vocabulary, cache, **options)
    server.down_until = time.monotonic() + 60
    with pytest.raises(POLICIES[policy]) as error:
        list(stream)
    assert str(error.value).startswith(f"missing shard: {server.url}/shard-")
    assert "--resume" in str(error.value)
    assert "Traceback" not in str(error.value)


MakeShards = Callable[..., Path]


@pytest.mark.nightly
@pytest.mark.parametrize("window", [20, 60])
def test_cold_shards_keep_every_connection_busy(
    make_shards: MakeShards, vocabulary: Path, tmp_path: Path, window: int
) -> None:
    shards, seconds = 12, 0.5
    with serve(make_shards(count=10 * shards, per_shard=10)) as server:
        server.seconds = seconds
        config = DataConfig(
            sources=({"path": server.url},),  # type: ignore[arg-type]
            vocabulary=str(vocabulary),
            canonical_streams=2,
            shuffle_window=window,
            workers=0,
            cache={"folder": str(tmp_path / "cache"), "limit": MB},  # type: ignore[arg-type]
        )
        data = PretrainData(config, Inputs(16, (4, 4), 10, 90), 4, 3)
        started = time.monotonic()
        read = sum(int(batch.valid.sum()) for batch, _ in data.batches(stop_after=10 * shards // 4))
        taken = time.monotonic() - started
        asked = [times for name, times in server.asked.items() if name.endswith(".tar")]
    assert read == 10 * shards
    assert asked == [1] * shards
    assert taken < 1.3 * shards * seconds / FETCHED_AHEAD


def test_what_somebody_fetches_keeps_no_other_shard_waiting(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    with serve(make_shards(count=25, per_shard=5)) as server:
        slow, *others = (file_of(server, number) for number in range(5))
        server.stalls[slow.name] = 1
        cache = ShardCache(tmp_path / "cache", MB)
        reading = threading.Thread(target=lambda: content(cache.open(slow)), daemon=True)
        reading.start()
        deadline = time.monotonic() + 20
        while not server.asked[slow.name]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for file in (*[slow] * 5, *others):
            cache.prefetch(file)
        while not all(map(cache.holds, others)):
            assert time.monotonic() < deadline, "they wait for the first one"
            time.sleep(0.01)
        assert not cache.holds(slow)
        server.go.set()
        reading.join(20)
        assert cache.holds(slow)
    assert server.asked[slow.name] == 1
