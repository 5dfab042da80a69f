import os
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_shards import encoded, images_of, jpeg, listed, photo, run, write, write_tar
from PIL import Image

from data_tools.builder.samples import TakeDown
from data_tools.dedup import hashes as image_hash
from data_tools.dedup.hashes import (
    RECORD,
    differing_bits,
    duplicate_images,
    fine_distance,
    hash_image,
    near_pairs,
)
from data_tools.originals import Originals
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter

TWINS = "2851198725_37b6027625", "3050606344_af711c726c"
"""Two images of Flickr8k with the same bytes."""


def copies(image):
    image = image.convert("RGB")
    width, height = image.size
    return [
        encoded(image, quality=40),
        encoded(image, "png"),
        encoded(image.resize((width // 2, height // 2), Image.Resampling.LANCZOS), quality=75),
        encoded(image.resize((256, 256), Image.Resampling.BICUBIC), "webp", quality=80),
    ]


def test_real_images_and_their_copies(shared, tmp_path):
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
    assert TakeDown.read(out, first).lines == {later_twin}  # keys of other folders are theirs
    assert TakeDown.read(out, tmp_path / "new").lines == expected | {later_twin}

    assert run("dedup", first, tmp_path / "second", "--out", out, "--exact") == 0
    assert listed(out) == [later_twin]


def test_what_is_left_alone(tmp_path, capsys):
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
    (folder / "1.tar").write_bytes((folder / "0.tar").read_bytes()[:-30_000])
    for _ in range(2):
        assert run("dedup", folder, "--out", out) == 0
        assert "careful: 1 shards are damaged" in capsys.readouterr().out


def test_hashes_are_kept_and_taken_again(tmp_path, monkeypatch):
    folder = write(tmp_path / "shards", {f"k{n}": jpeg(n % 7) for n in range(12)})
    out = tmp_path / "list.txt"
    calls = []
    hash_image = image_hash.hash_image

    def stopped(data, where):
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


def by_hand(images, distance):
    """One by one: dropped if it is near an earlier one that is kept."""
    kept = []
    for place in range(len(images)):
        one, others = images[place : place + 1], images[kept]
        near = differing_bits(one["coarse"], others["coarse"]) <= distance
        near &= fine_distance(one["fine"], others["fine"]) <= 48
        if not (near | (one["bytes"] == others["bytes"])).any():
            kept.append(place)
    return set(range(len(images))) - set(kept)


@pytest.mark.parametrize("seed", range(5))
def test_the_earlier_one_is_kept(seed):
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
    assert (drops.originals < drops.dropped).all()
    assert not set(drops.originals.tolist()) & set(drops.dropped.tolist())


def hashes(seed, count):
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 2**64, count, dtype=np.uint64)
    for place in range(count // 2):
        bits = rng.integers(0, 64, rng.integers(0, 9)).astype(np.uint64)
        for bit in bits:
            made[place] = made[place + count // 2] ^ (np.uint64(1) << bit)
    return made


def near_by_hand(first, second, distance):
    return {
        (i, j)
        for i, a in enumerate(first)
        for j, b in enumerate(second)
        if (int(a) ^ int(b)).bit_count() <= distance
    }


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(0, 8), st.sampled_from([7, 2**18]))
def test_all_near_pairs_are_found_once(seed, count, distance, most):
    made = hashes(seed, count)
    others = hashes(seed + 1, count // 3)
    others[: count // 6] = made[: count // 6]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_hash, "_CHUNK", most)
        for asked, expected in (
            (None, {(i, j) for i, j in near_by_hand(made, made, distance) if i < j}),
            (others, near_by_hand(others, made, distance)),
        ):
            found = [pair for pairs in near_pairs(made, distance, asked) for pair in zip(*pairs)]
            assert set(found) == expected
            assert len(found) == len(expected)


def test_the_hash_is_the_sign_of_the_lowest_cosines():
    image = photo(3, (32, 32)).convert("L")
    cosines = np.cos(np.pi * np.arange(32)[:, None] * (2 * np.arange(32) + 1) / 64)
    cosines[0] /= np.sqrt(2)
    waves = cosines @ np.asarray(image, dtype=float) @ cosines.T
    found = hash_image(encoded(image, "png"))
    assert found is not None
    for block, words in ((waves[:8, :8], [found[0]]), (waves[:16, :16], found[1].tolist())):
        above = np.unpackbits(np.array(words, dtype="<u8").view(np.uint8))
        assert (above == (block > np.median(block)).reshape(-1)).all()


def test_turned_copies_are_near_and_other_images_are_not():
    for seed in range(20):
        original, turned = photo(seed, (320, 240)), Image.Exif()
        turned[0x0112] = 6
        first, other = hash_image(encoded(original)), hash_image(jpeg(seed + 100))
        copy = hash_image(encoded(original.rotate(90, expand=True), exif=turned))
        assert (first[0] ^ copy[0]).bit_count() <= 6
        assert fine_distance(first[1], copy[1]) <= 48
        assert fine_distance(first[1], other[1]) > 80


def shards(folder, *samples):
    with ShardWriter(folder, 3) as writer:
        for key, image, annotation, second in samples:
            writer.write(key, image, "jpg", annotation, second)
    return folder


def named(source, image_id):
    return Annotation(caption="a caption", source=source, image_id=image_id)


@pytest.fixture
def pretraining(tmp_path):
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
def evaluation(tmp_path):
    return shards(
        tmp_path / "evaluation",
        ("e1", jpeg(1), named("coco", "7"), None),
        ("e2", jpeg(2), Annotation(statement="two", label=True), jpeg(3)),
        ("e4", jpeg(4), Annotation(caption="four"), None),
        ("e5", jpeg(5), Annotation(caption="five"), None),
        ("e6", jpeg(6), named("coco", "6"), None),
    )


def test_each_way_is_found(pretraining, evaluation, tmp_path, capsys):
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
