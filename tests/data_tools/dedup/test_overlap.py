from __future__ import annotations

from pathlib import Path

import pytest
from made_shards import encoded, jpeg, listed, photo, run

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
