"""Data tools and reports on stores: every result is that of the same command on folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from shard_server import serve

from data_tools.__main__ import main
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.cache import ShardCache
from vlp.data.shards.shard_index import ShardIndex, ShardWriter
from vlp.data.staging import STAGING, StagedPlace, staged


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STAGING, str(tmp_path / "staging"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "staging"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    with ShardWriter(folder, 3) as writer:
        for number in range(7):
            writer.write(f"k{number}", b"image", "png", Annotation(captions=[f"dog {number}"]))
    return folder


@contextmanager
def s3_bucket() -> Iterator[Any]:
    """Yield s3fs on a server with an empty bucket `bucket`, which fsspec and its children use."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with patch.dict(os.environ, settings):
            files = s3fs.S3FileSystem(use_listings_cache=False)
            files.mkdir("bucket")
            yield files
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    with s3_bucket() as files:
        yield files


@contextmanager
def interrupted(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with suppress(KeyboardInterrupt), staged(values) as (own, _):
        yield own
        raise KeyboardInterrupt


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_data_tools_read_and_write_s3(
    store: Any, shards: Path, tmp_path: Path, room: Path, capsys: pytest.CaptureFixture
) -> None:
    store.put(str(shards), "bucket/made", recursive=True)
    arguments = ["--samples-per-shard", "2", "--processes", "1", "--shuffle", "3"]
    assert main(["reshard", "s3://bucket/made", "--out", "s3://bucket/new", *arguments]) == 0
    assert main(["reshard", str(shards), "--out", str(tmp_path / "new"), *arguments]) == 0
    store.get("bucket/new", str(tmp_path / "got"), recursive=True)
    got, made = files_of(tmp_path / "got"), files_of(tmp_path / "new")
    settings = got.pop("reshard.json"), made.pop("reshard.json")
    assert got == made
    assert all(settings)
    said = capsys.readouterr().err
    assert "s3://bucket/made: 5 files fetched" in said
    assert "s3://bucket/new: 7 files put" in said
    assert not any(room.iterdir()), "copies go with the command"
    assert {path.name for path in tmp_path.iterdir()} == {"shards", "new", "got", "staging"}


def test_the_index_is_put_last(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[str] = []
    plain = MemoryFileSystem.put_file

    def told(self: Any, local: str, remote: str, *more: Any, **options: Any) -> Any:
        put.append(remote.rpartition("/")[2])
        return plain(self, local, remote, *more, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", told)
    arguments = ["--samples-per-shard", "2", "--processes", "1"]
    assert main(["reshard", str(shards), "--out", "memory://last/x", *arguments]) == 0
    assert put[-1] == "index.npz"
    assert any(name.endswith(".tar") for name in put)


def test_a_tool_that_writes_beside_what_it_reads_does_so_in_the_store(
    store: Any, shards: Path
) -> None:
    store.put(str(shards), "bucket/bare", recursive=True)
    index = store.cat_file("bucket/bare/index.npz")
    store.rm_file("bucket/bare/index.npz")
    assert main(["index", "s3://bucket/bare", "--processes", "1"]) == 0
    assert store.cat_file("bucket/bare/index.npz") == index


def test_samples_of_s3_are_those_of_the_folder(store: Any, shards: Path, tmp_path: Path) -> None:
    store.put(str(shards), "bucket/read", recursive=True)
    index = ShardIndex.open("s3://bucket/read", ShardCache(tmp_path / "cache", 10**6))
    local = ShardIndex.open(shards)
    places = [(shard, sample) for shard in range(2) for sample in range(3)]
    assert [index.read(*place) for place in places] == [local.read(*place) for place in places]


def test_data_tools_read_a_web_server(shards: Path, tmp_path: Path) -> None:
    with serve(shards) as server:
        arguments = ["--processes", "1", "--out", str(tmp_path / "stats.json")]
        assert main(["stats", server.url, *arguments]) == 0
        there = (tmp_path / "stats.json").read_text()
        assert main(["stats", str(shards), *arguments]) == 0
        assert there.count("dog") == (tmp_path / "stats.json").read_text().count("dog")
        asked = server.asked["shard-000000.tar"]
        assert asked == 1


def test_nothing_is_written_to_a_web_server(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with serve(shards) as server:
        (shards / "shard-000002.tar").rename(tmp_path / "aside.tar")
        assert main(["stats", str(shards), "--out", f"{server.url}/x.json"]) == 2
    assert "nothing can be written to a web server" in capsys.readouterr().err


def test_an_interrupted_output_goes_on_and_a_failed_one_puts_nothing(
    store: Any, tmp_path: Path, room: Path
) -> None:
    with interrupted({"out": Path("s3://bucket/cut")}) as own:
        own["out"].mkdir()
        (own["out"] / "first").write_text("1")
    assert not store.exists("bucket/cut")
    with staged({"out": Path("s3://bucket/cut")}) as (own, put):
        assert (own["out"] / "first").read_text() == "1"
        (own["out"] / "second").write_text("2")
        put()
    assert store.cat_file("bucket/cut/first") + store.cat_file("bucket/cut/second") == b"12"
    with staged({"out": "s3://bucket/cut"}) as (own, put):
        assert isinstance(own["out"], str)
        Path(own["out"], "first").unlink()
        put()
    assert store.ls("bucket/cut", refresh=True) == ["bucket/cut/second"]


def test_an_input_is_fetched_anew_where_it_has_changed(store: Any, room: Path) -> None:
    store.pipe_file("bucket/list/a", b"old")
    with interrupted({"images": ["s3://bucket/list"]}) as own:
        kept = own["images"][0]
        Path(kept, "b").write_text("not of the store")
    store.pipe_file("bucket/list/a", b"newer")
    with staged({"images": ["s3://bucket/list"]}) as (own, _):
        assert own["images"] == [kept]
        assert {p.name: p.read_text() for p in Path(kept).iterdir()} == {"a": "newer"}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("zz://bucket/x", "the protocol 'zz' is not known"),
        ("s3://bucket/nowhere", "nothing is there"),
    ],
)
def test_what_cannot_be_had_is_said(store: Any, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said), staged({"folder": Path(url)}):
        pass


def test_a_file_is_a_place_too(store: Any) -> None:
    store.pipe_file("bucket/words.txt", b"one\ntwo\n")
    place = StagedPlace("s3://bucket/words.txt", is_output=False)
    place.fetch()
    assert place.path.name == "words.txt"
    assert place.path.read_text() == "one\ntwo\n"
    place.put()


def test_a_file_url_is_the_path_itself(shards: Path) -> None:
    with staged({"folder": Path(f"file://{shards}"), "n": 3, "out": None}) as (own, put):
        assert own == {"folder": shards, "n": 3, "out": None}
        assert len(ShardIndex.open(own["folder"])) == 7
        put()
