import os
import tarfile
from collections import Counter
from itertools import islice, pairwise

import pytest
import torch
from shard_server import serve

from vlp.config import ConfigError
from vlp.data.pretrain import DataError, ListedShards
from vlp.data.shards import remote as outages_module
from vlp.data.stream.rng import identity
from vlp.data.stream.sampler import EndlessSampler


@pytest.fixture
def stream(make_data):
    def make(*paths, start=(0, 0, 1), stop_after=6, max_skipped_share=0.5, seed=1, **options):
        options = {"epoch_samples": 40, "shuffle_window": 7} | options
        data = make_data(*paths, seed=seed, **options)
        data.max_skipped_share = max_skipped_share
        assert data.samples_in_epoch(0) == 40
        assert data.batches_in_epoch(3) == 5
        return list(data.batches(*start, stop_after))

    return make


def ids(stream):
    return [number for batch, _ in stream for number in batch.sample_ids.tolist()]


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for first, second in zip(one, other)
        for a, b in zip(first[0], second[0])
    )


def without_index(folder):
    for path in [*folder.glob("*.json"), *folder.glob("*.npy")]:
        path.unlink()
    return folder


def test_everything_comes_in_the_long_run_and_batches_are_full(make_shards, stream):
    folder = without_index(make_shards(count=23))
    found = stream(str(folder), stop_after=25)
    assert [consumed for _, consumed in found] == list(range(8, 201, 8))
    assert all(batch.valid.all() for batch, _ in found)
    counts = Counter(ids(found))
    assert len(counts) == 23
    # About 9 visits each, by whole shards: far from once an epoch, and no sample is left out.
    assert max(counts.values()) < 30
    # What comes twice is drawn afresh.
    uniform = torch.cat([batch.uniform for batch, _ in found])
    assert len(uniform.unique(dim=0)) == 200
    texts = torch.cat([batch.mlm_ids for batch, _ in found])
    assert len(texts.unique(dim=0)) > 80


def test_neighbours_of_a_shard_are_mixed(make_shards, stream):
    folder = str(without_index(make_shards(count=40, per_shard=40)))
    in_order = ids(stream(folder, shuffle_window=1, stop_after=5))
    mixed = ids(stream(folder, shuffle_window=20, stop_after=5))
    assert len(set(in_order)) == 40
    assert mixed != in_order
    place = {number: n for n, number in enumerate(in_order)}
    steps = [place[b] - place[a] for a, b in pairwise(mixed)]
    assert sum(step == 1 for step in steps) < 10


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_start_gives_the_same_stream_and_another_another(make_shards, stream, workers):
    folder = str(without_index(make_shards()))
    first = stream(folder, workers=workers)
    assert equal(first, stream(folder, workers=workers))
    for other in ({"seed": 2}, {"start": (48, 0, 1)}):
        assert not equal(first, stream(folder, workers=workers, **other))


def test_ranks_and_workers_read_different_things(make_shards, stream):
    folder = str(without_index(make_shards(count=60, per_shard=2)))
    ranks = [stream(folder, start=(0, rank, 2), workers=2) for rank in range(2)]
    assert {len(batch.valid) for rank in ranks for batch, _ in rank} == {4}
    assert [consumed for _, consumed in ranks[0]] == [consumed for _, consumed in ranks[1]]
    assert ids(ranks[0]) != ids(ranks[1])
    # A worker's batches come in turn: the first of each are of different shards.
    assert ids(ranks[0][:1]) != ids(ranks[0][1:2])
    uniform = torch.cat([batch.uniform for rank in ranks for batch, _ in rank])
    assert len(uniform.unique(dim=0)) == len(uniform)


def test_weights_say_how_often_a_source_comes(make_shards, stream):
    often = without_index(make_shards("often", 20, 2))
    seldom = without_index(make_shards("seldom", 20, 2))
    found = ids(stream((str(often), 3.0), (str(seldom), 1.0), stop_after=25))
    assert len(ListedShards(str(often)).shards) == 10
    first = {identity("sample", 0, shard, number, 0) for shard in range(10) for number in range(2)}
    share = sum(number in first for number in found) / len(found)
    assert 0.6 < share < 0.9  # 0.75; 100 shards are drawn, one deviation is 0.04


def test_patterns_lists_and_urls(make_shards, stream, tmp_path):
    folder = without_index(make_shards(count=20))
    expected = stream(str(folder))
    assert equal(expected, stream(f"{folder}/shard-{{000000..000003}}.tar"))
    (tmp_path / "list.txt").write_text(
        f"{folder}/shard-{{000000..000001}}.tar\n\n{folder}/shard-000002.tar\n"
        f"{folder}/shard-000003.tar\n",
        encoding="utf-8-sig",
    )
    assert equal(expected, stream(str(tmp_path / "list.txt")))
    with serve(folder) as server:
        url = f"{server.url}/shard-{{000000..000003}}.tar"
        before = len(os.listdir("/proc/self/fd"))
        cache = {"folder": str(tmp_path / "cache"), "limit": "1MB"}
        assert equal(expected, stream(url, cache=cache))
        assert os.listdir(tmp_path / "cache") == []
        assert equal(expected[:2], stream(url, workers=1, stop_after=2))
        assert len(os.listdir("/proc/self/fd")) <= before + 8
        server.wants = "user:secret", "token=secret"
        whole = url.replace("://", "://user:secret@") + "?token=secret"
        assert equal(expected[:2], stream(whole, stop_after=2))
        missing = whole.replace("000003", "000005")
        found = stream(missing, stop_after=9, outages={"policy": "skip"})
        skips = [skip for batch, _ in found for skip in batch.skipped]
        assert any("shard-000004.tar?***" in skip.where for skip in skips)
        assert "secret" not in str(skips)


def test_bad_samples_and_shards_are_counted(make_shards, stream, monkeypatch):
    monkeypatch.setattr(outages_module, "_FIRST_WAIT", 0.001)
    folder = without_index(make_shards(count=25, per_shard=5))
    cut = folder / "shard-000001.tar"
    cut.write_bytes(cut.read_bytes()[:9000])
    (folder / "shard-000002.tar").write_bytes(b"")
    with tarfile.open(folder / "shard-000003.tar", "w"):
        pass
    found = stream(str(folder), stop_after=12, max_skipped_share=0.9)
    kinds = Counter(skip.kind for batch, _ in found for skip in batch.skipped)
    assert set(kinds) == {"corrupt shard"}
    assert all(len(batch.valid) == 8 for batch, _ in found)
    assert sum(int((~batch.valid).sum()) for batch, _ in found) == sum(kinds.values())
    with serve(folder) as server:
        server.fails["shard-000000.tar"] = 10_000
        url = f"{server.url}/shard-00000{{0,4,7}}.tar"
        outages = {"seconds": 0.05, "policy": "skip"}
        found = stream(url, stop_after=12, max_skipped_share=0.9, outages=outages)
        for workers in (0, 1):
            with pytest.raises(DataError, match=r"^missing shard: .*policy=skip$"):
                stream(url, stop_after=12, outages={"seconds": 0.05}, workers=workers)
    skipped = [skip for batch, _ in found for skip in batch.skipped]
    assert {skip.kind for skip in skipped} == {"missing shard"}
    assert {skip.where.split(" ")[0][-8:] for skip in skipped} == {"0000.tar", "0007.tar"}


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_but_bad_shards_is_an_error_not_a_hang(tmp_path, stream, workers):
    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(DataError, match=r"^16 shards in a row gave nothing.*corrupt shard: .*tar"):
        stream(str(tmp_path), max_skipped_share=1.0, workers=workers)


def test_endless_order():
    sampler = EndlessSampler(25, 10)
    assert sampler.samples_in_epoch(0) == 30
    steps = list(islice(sampler.steps(20, 10), 5))
    assert [(step.epoch, step.consumed) for step in steps] == [
        (0, 30), (1, 40), (1, 50), (1, 60), (2, 70),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="3 ranks cannot share a batch of 10"):
        sampler.share(0, 0, 3)
