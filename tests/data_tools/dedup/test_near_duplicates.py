from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
from hypothesis import given, settings
from hypothesis import strategies as st
from made_shards import encoded, jpeg, photo
from PIL import Image

from data_tools.dedup import hashes as near
from data_tools.dedup.hashes import fine_distance, hash_image, near_pairs
from vlp.data.shards.sample_files import BadSample


def hashes(seed: int, count: int) -> np.ndarray:
    """Some at random, some a few bits beside others, some equal."""
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 2**64, count, dtype=np.uint64)
    for place in range(count // 2):
        bits = rng.integers(0, 64, rng.integers(0, 9)).astype(np.uint64)
        for bit in bits:
            made[place] = made[place + count // 2] ^ (np.uint64(1) << bit)
    return made


def near_by_hand(first: np.ndarray, second: np.ndarray, distance: int) -> set[tuple[int, int]]:
    return {
        (i, j)
        for i, a in enumerate(first)
        for j, b in enumerate(second)
        if (int(a) ^ int(b)).bit_count() <= distance
    }


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(0, 8), st.sampled_from([7, 2**18]))
def test_all_near_pairs_are_found_once(seed: int, count: int, distance: int, most: int) -> None:
    made = hashes(seed, count)
    others = hashes(seed + 1, count // 3)
    others[: count // 6] = made[: count // 6]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near, "_COMPARED_AT_ONCE", most)
        for asked, expected in (
            (None, {(i, j) for i, j in near_by_hand(made, made, distance) if i < j}),
            (others, near_by_hand(others, made, distance)),
        ):
            found = [pair for pairs in near_pairs(made, distance, asked) for pair in zip(*pairs)]
            assert set(found) == expected
            assert len(found) == len(expected)


def test_the_hash_is_the_sign_of_the_lowest_cosines() -> None:
    image = photo(3, (32, 32)).convert("L")
    waves = scipy.fft.dctn(np.asarray(image, dtype=float), norm="ortho")
    found = hash_image(encoded(image, "png"))
    assert found is not None
    for block, words in ((waves[:8, :8], [found[0]]), (waves[:16, :16], found[1].tolist())):
        above = np.unpackbits(np.array(words, dtype="<u8").view(np.uint8))
        assert (above == (block > np.median(block)).reshape(-1)).all()


def test_copies_are_near_and_other_images_are_not() -> None:
    for seed in range(20):
        original = photo(seed, (320, 240))
        turned = Image.Exif()
        turned[0x0112] = 6
        copies = [
            encoded(original, "png"),
            encoded(original, "webp", quality=60),
            encoded(original.resize((160, 120)), quality=40),
            encoded(original.resize((200, 200)), quality=70),
            encoded(original.convert("L")),
            encoded(original.rotate(90, expand=True), exif=turned),  # type: ignore[arg-type]
        ]
        first = hash_image(encoded(original))
        other = hash_image(jpeg(seed + 100))
        assert first is not None
        assert other is not None
        for copy in copies:
            found = hash_image(copy)
            assert found is not None
            assert (first[0] ^ found[0]).bit_count() <= 6
            assert fine_distance(first[1], found[1]) <= 48
        assert fine_distance(first[1], other[1]) > 80


def test_images_without_a_hash() -> None:
    assert hash_image(encoded(Image.new("RGB", (64, 64), "red"), "png")) is None
    for bad in (b"", b"no image", jpeg(0)[:-100]):
        with pytest.raises(BadSample, match="here"):
            hash_image(bad, "here")
