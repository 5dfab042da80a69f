from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from made_shards import encoded, images_of, jpeg, listed, run, write, write_tar
from PIL import Image

from data_tools.builder.samples import TakeDown
from data_tools.dedup import hashes as image_hash
from data_tools.dedup.hashes import RECORD, differing_bits, duplicate_images, fine_distance
from data_tools.originals import Originals
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter

TWINS = "2851198725_37b6027625", "3050606344_af711c726c"
"""Two images of Flickr8k with the same bytes."""


def copies(image: Image.Image) -> list[bytes]:
    image = image.convert("RGB")
    width, height = image.size
    return [
        encoded(image, quality=40),
        encoded(image, "png"),
        encoded(image.resize((width // 2, height // 2), Image.Resampling.LANCZOS), quality=75),
        encoded(image.resize((256, 256), Image.Resampling.BICUBIC), "webp", quality=80),
    ]


def test_real_images_and_their_copies(shared: Path, tmp_path: Path) -> None:
    originals = images_of(shared / "data" / "coco_mini" / "val2017_short256.tar", 60)
    flickr = shared / "data" / "flickr8k" / "images_sq160"
    originals |= images_of(flickr / "shard-000.tar", 60)
    place = Originals([flickr])
    for key in TWINS:
        found = place.find(f"{key}.jpg")
        assert found is not None
        originals[key] = found.read()
    first = write(tmp_path / "first", originals, 50)
    with ShardWriter(tmp_path / "second", 20) as writer:
        for key, data in list(originals.items())[::9]:
            for number, copy in enumerate(copies(Image.open(BytesIO(data)))):
                kind = ("jpg", "png", "jpg", "webp")[number]
                writer.write(f"{key}-{number}", copy, kind, Annotation(caption="copy"))
    out = tmp_path / "list.txt"
    assert run("dedup", first, tmp_path / "second", "--out", out) == 0
    expected = {f"{key}-{number}" for key in list(originals)[::9] for number in range(4)}
    later_twin = [key for key in originals if key in TWINS][1]
    assert set(listed(out)) == expected | {later_twin}
    assert TakeDown.read(out).lines == expected | {later_twin}  # as the builders read it

    assert run("dedup", first, tmp_path / "second", "--out", out, "--exact") == 0
    assert listed(out) == [later_twin]


def test_what_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    red = encoded(Image.new("RGB", (64, 64), "red"), "png")
    blue = encoded(Image.new("RGB", (64, 64), "blue"), "png")
    folder = tmp_path / "shards"
    write_tar(
        folder / "0.tar",
        [
            ("red.png", red),
            ("blue.png", blue),
            ("red2.png", red),
            ("a.jpg", jpeg(1)),
            ("a.1.jpg", jpeg(2)),
            ("b.jpg", jpeg(1)),
            ("b.1.jpg", jpeg(2)),
            ("cut.jpg", jpeg(3)[:-200]),
            ("cut2.jpg", jpeg(3)[:-200]),
            ("none.txt", b"no image"),
        ],
    )
    out = tmp_path / "list.txt"
    assert run("dedup", folder, "--out", out) == 0
    assert listed(out) == ["red2"]
    printed = capsys.readouterr().out
    assert "2 images cannot be decoded" in printed
    assert "3 images of one colour" in printed


def test_hashes_are_kept_and_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "shards", {f"k{n}": jpeg(n % 7) for n in range(12)})
    out = tmp_path / "list.txt"
    calls: list[str] = []
    hash_image = image_hash.hash_image

    def stopped(data: bytes, where: str) -> object:
        calls.append(where)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return hash_image(data, where)

    monkeypatch.setattr(image_hash, "hash_image", stopped)
    assert run("dedup", folder, "--out", out) == 130
    assert not out.exists()
    assert run("dedup", folder, "--out", out) == 0
    assert len(calls) == 10 + 4  # two shards of four were finished
    assert listed(out) == ["k7", "k8", "k9", "k10", "k11"]
    text = out.read_text()
    assert run("dedup", folder, "--out", out) == 0
    assert len(calls) == 14
    os.utime(folder / "shard-000000.tar", (1, 1))  # another file, for all we know
    assert run("dedup", folder, "--out", out) == 0
    assert len(calls) == 18
    assert out.read_text() == text


def by_hand(images: np.ndarray, distance: int) -> set[int]:
    """One by one: dropped if it is near an earlier one that is kept."""
    kept: list[int] = []
    for place in range(len(images)):
        one, others = images[place : place + 1], images[kept]
        near = differing_bits(one["coarse"], others["coarse"]) <= distance
        near &= fine_distance(one["fine"], others["fine"]) <= 48
        if not (near | (one["bytes"] == others["bytes"])).any():
            kept.append(place)
    return set(range(len(images))) - set(kept)


@pytest.mark.parametrize("seed", range(5))
def test_the_earlier_one_is_kept(seed: int) -> None:
    """In chains too: one that looks like a dropped image alone stays."""
    rng = np.random.default_rng(seed)
    images = np.zeros(300, RECORD)
    images["coarse"] = rng.integers(0, 2**64, 300, dtype=np.uint64)
    images["fine"] = rng.integers(0, 2**64, (300, 4), dtype=np.uint64)
    images["bytes"] = rng.integers(0, 2**64, 300, dtype=np.uint64)
    for place in range(40, 300):
        earlier = rng.integers(place - 40, place)
        kind = rng.integers(4)
        if kind == 0:
            images[place] = images[earlier]
        if kind in (1, 2):  # of the latter, only these 64 bits are the same
            images["coarse"][place] = images["coarse"][earlier]
        if kind == 1:
            images["fine"][place] = images["fine"][earlier]
            for bit in rng.integers(0, 64, 4):
                images["coarse"][place] ^= np.uint64(1) << np.uint64(bit)
    drops = duplicate_images(images, 6)
    assert set(drops.dropped.tolist()) == by_hand(images, 6)
    assert (drops.kept < drops.dropped).all()
    assert not set(drops.kept.tolist()) & set(drops.dropped.tolist())
