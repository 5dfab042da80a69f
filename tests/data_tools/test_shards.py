from __future__ import annotations

from pathlib import Path

import pytest
from made_shards import cut, jpeg, write, write_tar

from data_tools.executor import Executor
from data_tools.shards import ShardReader, scan, shards_of
from vlp.data.shards.sample_files import BadSample


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    first = write(tmp_path / "b", {f"k{n}": jpeg(n) for n in range(5)}, 2)
    second = write(tmp_path / "a", {"x": jpeg(9)})
    shards = shards_of([first, second])
    names = ["shard-000000.tar", "shard-000001.tar", "shard-000002.tar", "shard-000000.tar"]
    assert [shard.name for shard in shards] == names
    assert [shard.folder for shard in shards] == [first] * 3 + [second]
    counts = [count for _, count in scan(_count, shards, Executor(2), "count")]
    assert counts == [2, 2, 1, 1]
    with ShardReader(shards[0].path) as reader:
        sample = reader.read(reader.samples[1])
        assert (sample.key, sample.image) == ("k1", jpeg(1))
        assert reader.annotation(reader.samples[1]) == sample.annotation


def test_damaged_and_missing_shards(tmp_path: Path) -> None:
    folder = write(tmp_path / "b", {f"k{n}": jpeg(n) for n in range(3)})
    path = folder / "shard-000000.tar"
    with ShardReader(path) as reader:
        path.write_bytes(path.read_bytes()[:700])
        with pytest.raises(BadSample, match="cut off"):
            reader.read(reader.samples[0])
    write_tar(path, [("a.jpg", jpeg(1)), ("b.jpg", jpeg(2))])
    cut(path)
    with ShardReader(path) as reader:
        assert len(reader) == 1
        assert reader.problem
    with ShardReader(tmp_path / "gone.tar") as reader:
        assert (len(reader), reader.missing) == (0, True)


def _count(shard: object) -> int:
    with ShardReader(shard.path) as reader:  # type: ignore[attr-defined]
        return len(reader)
