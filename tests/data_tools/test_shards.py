from made_shards import jpeg, write

from data_tools.executor import Executor
from data_tools.shards import ShardReader, scan, shards_of


def test_shards_are_read_in_order(tmp_path):
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


def _count(shard):
    with ShardReader(shard.path) as reader:  # type: ignore[attr-defined]
        return len(reader)
