from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from made_shards import encoded, jpeg, listed, photo, run, write

from data_tools.dedup import hashes as image_hash
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter

Sample = tuple[str, bytes, Annotation, bytes | None]


def shards(folder: Path, *samples: Sample) -> Path:
    with ShardWriter(folder, 3) as writer:
        for key, image, annotation, second in samples:
            writer.write(key, image, "jpg", annotation, second)
    return folder


def named(source: str, image_id: str) -> Annotation:
    return Annotation(caption="a caption", source=source, image_id=image_id)


@pytest.fixture
def pretraining(tmp_path: Path) -> Path:
    small = encoded(photo(4).resize((60, 45)), quality=60)
    return shards(
        tmp_path / "pretraining",
        ("named", jpeg(50), named("coco", "7"), None),
        ("other", jpeg(51), named("vg", "7"), None),
        ("bytes", jpeg(3), named("vg", "1"), None),
        ("looks", small, named("vg", "2"), None),
        ("second", jpeg(52), named("nlvr2", "1"), jpeg(5)),
        ("cut", jpeg(53)[:-200], named("vg", "3"), None),
        ("all", jpeg(6), named("coco", "6"), None),
    )


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    return shards(
        tmp_path / "evaluation",
        ("e1", jpeg(1), named("coco", "7"), None),
        ("e2", jpeg(2), Annotation(statement="two", label=True), jpeg(3)),
        ("e4", jpeg(4), Annotation(caption="four"), None),
        ("e5", jpeg(5), Annotation(caption="five"), None),
        ("e6", jpeg(6), named("coco", "6"), None),
    )


def test_each_way_is_found(
    pretraining: Path, evaluation: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "list.txt"
    command = ("overlap", "--pretraining", pretraining, "--evaluation", evaluation)
    assert run(*command, "--out", out) == 0
    assert listed(out) == ["named", "bytes", "looks", "second", "all"]
    text = out.read_text()
    shard = evaluation / "shard-000000.tar"
    assert f"# e1 of {shard}: the same image_id\nnamed\n" in text
    assert f"# e2 of {shard}: the same bytes, looks alike\nbytes\n" in text
    assert f"# e4 of {shard}: looks alike\nlooks\n" in text
    assert ": the same image_id, the same bytes, looks alike\nall\n" in text
    printed = capsys.readouterr().out
    assert "5 of 7 pretraining samples" in printed
    assert f"{evaluation}: 5 of 6 images are shown" in printed
    assert "the same image_id: 2, by 2 samples" in printed
    assert "the same bytes: 3, by 3 samples" in printed
    assert "looks alike: 4, by 4 samples" in printed
    assert "1 images cannot be decoded" in printed

    assert run(*command, "--out", out, "--exact") == 0
    assert listed(out) == ["named", "bytes", "second", "all"]


def test_evaluation_sets_are_counted_apart(
    pretraining: Path, evaluation: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    again = shards(tmp_path / "again", ("x", jpeg(6), named("coco", "6"), None))
    clean = shards(tmp_path / "clean", ("x", jpeg(99), named("coco", "99"), None))
    sets = ("--evaluation", evaluation, again, clean)
    assert run("overlap", "--pretraining", pretraining, *sets, "--out", tmp_path / "list.txt") == 0
    printed = capsys.readouterr().out
    assert f"{again}: 1 of 1 images" in printed
    assert f"{clean}: 0 of 1 images" in printed
    assert listed(tmp_path / "list.txt").count("all") == 1


def test_nothing_shared(tmp_path: Path, evaluation: Path, capsys: pytest.CaptureFixture) -> None:
    clean = write(tmp_path / "clean", {f"k{n}": jpeg(200 + n) for n in range(5)})
    out = tmp_path / "list.txt"
    command = ("overlap", "--pretraining", clean, "--evaluation", evaluation)
    assert run(*command, "--out", out) == 0
    assert listed(out) == []
    assert "0 of 5 pretraining samples" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(
    pretraining: Path, evaluation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    hash_image: Callable[[bytes, str], object] = image_hash.hash_image

    def stopped(data: bytes, where: str) -> object:
        nonlocal calls
        calls += 1
        if calls == 11:
            raise KeyboardInterrupt
        return hash_image(data, where)

    monkeypatch.setattr(image_hash, "hash_image", stopped)
    command = ("overlap", "--pretraining", pretraining, "--evaluation", evaluation)
    out = tmp_path / "list.txt"
    assert run(*command, "--out", out) == 130
    assert not out.exists()
    assert run(*command, "--out", out) == 0
    assert len(listed(out)) == 5
    assert calls == 11 + 14 - 9  # of three shards, nine images, the hashes were there
