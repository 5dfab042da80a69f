from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from data_tools.__main__ import main
from vlp.data.image.decode import decode_image
from vlp.data.schema import captions_of
from vlp.data.shards.shard_reader import ShardIndex


def jpeg(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (24, 16), (value, 90, 200)).save(stream, "jpeg")
    return stream.getvalue()


def entry(name: str, split: str, *captions: str) -> dict:
    return {"filename": name, "split": split, "sentences": [{"raw": text} for text in captions]}


@pytest.fixture
def raw(tmp_path: Path) -> list[str]:
    """Nine photos over a folder and a tar, with every kind of trouble; the command's options."""
    folder = tmp_path / "raw"
    (folder / "images").mkdir(parents=True)
    for name, content in {
        "a.jpg": jpeg(0),
        "b.jpg": jpeg(20),
        "twin.jpg": jpeg(20),
        "cut.jpg": jpeg(30)[:-300],
        "text.jpg": b"not an image",
        "mute.jpg": jpeg(40),
    }.items():
        (folder / "images" / name).write_bytes(content)
    with tarfile.open(folder / "more.tar", "w") as archive:
        for name, content in {"./c.d.jpg": jpeg(50), "v.png": jpeg(60), "a.jpg": jpeg(99)}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    images = [
        entry("a.jpg", "train", " A dog . ", "Two dogs ."),
        entry("b.jpg", "train", "b"),
        entry("twin.jpg", "train", "b again"),
        entry("gone.jpg", "train", "nobody has it"),
        entry("cut.jpg", "train", "cut"),
        entry("text.jpg", "train", "text"),
        entry("mute.jpg", "train"),
        entry("c.d.jpg", "train", "dots"),
        entry("a.jpg", "train", "once more"),
        entry("v.png", "val", "held out"),
    ]
    (folder / "one.json").write_text(json.dumps({"dataset": "toy", "images": images[:5]}))
    (folder / "two.json").write_text(json.dumps({"dataset": "toy", "images": images[5:]}))
    annotations = ["--annotations", str(folder / "one.json"), str(folder / "two.json")]
    photos = ["--images", str(folder / "images"), str(folder / "more.tar")]
    return ["flickr8k", *annotations, *photos, "--samples-per-shard", "2"]


FAILURES = {
    "duplicate key": {"count": 1, "ids": ["a"]},
    "missing image": {"count": 1, "ids": ["gone"]},
    "no text": {"count": 1, "ids": ["mute"]},
    "unreadable image": {"count": 2, "ids": ["cut", "text"]},
}


def test_images_and_captions_arrive(
    raw: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    assert main([*raw, "--out", str(out)]) == 0
    index = ShardIndex.open(out / "train")
    # Two of a shard are there; cut and text are, until they are read.
    assert [entry.samples for entry in index.shards] == [2, 1, 1]
    first = index.read(0, 0)
    assert (first.key, first.image, first.extension) == ("a", jpeg(0), "jpg")
    assert captions_of(first.annotation) == ["A dog .", "Two dogs ."]
    assert (first.annotation.source, first.annotation.image_id) == ("toy", "a")
    dotted = index.read(2, 0)
    assert (dotted.key, dotted.annotation.image_id) == ("c_d", "c.d")
    # By its bytes, whatever it was called.
    assert ShardIndex.open(out / "val").read(0, 0).extension == "jpg"
    manifest = json.loads((out / "train" / "manifest.json").read_text())
    assert manifest["failures"] == FAILURES
    assert manifest["title"] == "Flickr8k, train"
    assert "Flickr" in manifest["licence"]
    printed = capsys.readouterr().out
    for line in (
        "train: 4 samples",
        "val: 1 samples",
        "missing image: 1 (first: gone)",
        "unreadable image: 2",
        "manifest.json",
    ):
        assert line in printed


def test_images_that_are_nowhere_or_damaged(
    raw: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([*raw, "--images", str(tmp_path / "no"), "--out", str(tmp_path / "out")]) == 2
    assert "no such folder, tar or zip" in capsys.readouterr().err
    tar = tmp_path / "raw" / "more.tar"
    tar.write_bytes(tar.read_bytes()[:1200])
    assert main([*raw, "--out", str(tmp_path / "out")]) == 0
    manifest = json.loads((tmp_path / "out" / "val" / "manifest.json").read_text())
    assert len(manifest["problems"]) == 1
    assert "more.tar: " in manifest["problems"][0]
    assert manifest["failures"]["missing image"]["ids"] == ["v"]


@pytest.mark.nightly
def test_real_flickr8k(shared: Path, tmp_path: Path) -> None:
    data = shared / "data" / "flickr8k"
    arguments = ["flickr8k", "--annotations", str(data / "dataset_flickr8k.json")]
    arguments += ["--images", str(data / "images_sq160"), "--out", str(tmp_path)]
    assert main([*arguments, "--splits", "train", "val"]) == 0
    for split, count in (("train", 6000), ("val", 1000)):
        manifest = json.loads((tmp_path / split / "manifest.json").read_text())
        assert (manifest["samples"], manifest["captions"]) == (count, 5 * count)
        assert manifest["failures"] == {}
    index = ShardIndex.open(tmp_path / "train")
    assert len(index.shards) == 6
    raw = index.read(5, 999)
    assert decode_image(raw.image, raw.key).size == (160, 160)
    assert raw.annotation.source == "flickr8k"
