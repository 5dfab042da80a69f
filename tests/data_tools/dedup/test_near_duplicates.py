from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
from hypothesis import given, settings
from hypothesis import strategies as st
from made_shards import encoded, jpeg, photo
from PIL import Image

from data_tools.dedup import near_duplicates
from data_tools.dedup.near_duplicates import (
    NearIndex,
    best_k,
    block_masks,
    least_cost,
    near_pairs,
    pairs_of_sorting,
    sortings,
)
from data_tools.dedup.perceptual_hash import differing_bits, fine_distance, hash_image
from data_tools.scan.repeated_ids import RepeatedIds, number_of, numbers_of
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


def near_by_hand(first: np.ndarray, second: np.ndarray, distance: int) -> set[tuple[int, int, int]]:
    return {
        (i, j, (int(a) ^ int(b)).bit_count())
        for i, a in enumerate(first)
        for j, b in enumerate(second)
        if (int(a) ^ int(b)).bit_count() <= distance
    }


@settings(max_examples=30)
@given(
    st.integers(0, 2**32), st.integers(0, 60), st.integers(0, 8), st.sampled_from([7, 20, 2**24])
)
def test_all_near_pairs_are_found_once(seed: int, count: int, distance: int, most: int) -> None:
    made = hashes(seed, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_duplicates, "_MOST_AT_ONCE", most)
        patch.setattr(near_duplicates, "_COMPARED_AT_ONCE", most // 2)
        patch.setattr(near_duplicates, "_LOOKED_AT_AT_ONCE", most // 2)
        parts = {task.part.parts for task in sortings(distance, count, 1)}
        assert all(part * most >= count for part in parts)
        found = [each for pairs in near_pairs(made, distance) for each in zip(*pairs)]
    expected = {(i, j, d) for i, j, d in near_by_hand(made, made, distance) if i < j}
    assert set(found) == expected
    assert len(found) == len(expected)
    others = hashes(seed + 1, count // 3)
    others[: count // 6] = made[: count // 6]
    pairs = list(zip(*NearIndex(made, distance).near(others)))
    assert set(pairs) == near_by_hand(others, made, distance)
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("count", [30, 300])
def test_any_number_of_blocks_finds_the_same(k: int, count: int) -> None:
    made = hashes(k, count)
    found = [
        each
        for task in sortings(6, count, k)
        for pairs in pairs_of_sorting(made, 6, task)
        for each in zip(*pairs)
    ]
    assert sorted(found) == sorted(p for p in near_by_hand(made, made, 6) if p[0] < p[1])


@pytest.mark.parametrize("count", [10, 10**5, 10**9])
@pytest.mark.parametrize("distance", [0, 3, 6, 16])
def test_near_hashes_always_agree_in_some_blocks(count: int, distance: int) -> None:
    masks = block_masks(distance, least_cost(distance, count)[1])
    rng = np.random.default_rng(0)
    for _ in range(200):
        bits = rng.choice(64, distance, replace=False)
        different = sum(1 << int(bit) for bit in bits)
        assert any(different & int(mask) == 0 for mask in masks)


def test_pairs_grow_slower_than_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        nonlocal compared
        compared += len(first)
        return differing_bits(first, second)

    monkeypatch.setattr("data_tools.dedup.near_duplicates.differing_bits", counted)
    rng = np.random.default_rng(0)
    list(near_pairs(rng.integers(0, 2**64, 30_000, dtype=np.uint64), 6))
    assert compared < 30_000**2 / 2 / 50


def test_hashes_that_often_agree_are_cut_into_more_blocks() -> None:
    """Bits of images depend on each other; how much is seen in a sample."""
    random, other = np.random.default_rng(0).integers(0, 2**64, (2, 20_000), dtype=np.uint64)
    for count in (20_000, 200_000, 10**9):
        assert best_k(random, 6, count) == least_cost(6, count)[1]
    mostly_zero = random & other
    assert best_k(mostly_zero, 6, 200_000) > best_k(random, 6, 200_000)


def test_few_hashes_have_a_number_of_blocks() -> None:
    for count in (0, 1, 2, 63):
        assert best_k(np.zeros(count, np.uint64), 6) >= 1


def test_bits_are_counted() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.integers(0, 2**64, (2, 50), dtype=np.uint64)
    by_hand = [(int(a) ^ int(b)).bit_count() for a, b in zip(first, second)]
    assert differing_bits(first, second).tolist() == by_hand
    assert differing_bits(np.uint64([2**64 - 1]), np.uint64([0])).tolist() == [64]


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


@settings(max_examples=20)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 30))
def test_repeats_in_memory_and_on_disk(values: list[int], limit: int) -> None:
    names = [f"name {value}" for value in values]
    repeats = RepeatedIds(limit)
    for start in range(0, len(names), 7):
        repeats.add(numbers_of(names[start : start + 7]))
    found = repeats.result()
    assert found.distinct == len(set(names))
    assert sorted(found.values.tolist()) == sorted(
        {number_of(name) for name in names if names.count(name) > 1}
    )
    assert repeats.result().distinct == 0
