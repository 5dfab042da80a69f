from collections import Counter

import numpy as np
import pytest
from broken_images import photo, png_of
from broken_shards import BYTES, TARS, full_annotation, plain_tar, splice_json

from vlp.data.config import AugmentConfig
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import KINDS, BadSample, DataError
from vlp.data.shards.shard_reader import ShardIndex, index_folder
from vlp.data.stream.sampler import Request, SampleIndex

# Pillow warns of sizes that are refused, and of what it finds beside the pixels.
pytestmark = pytest.mark.filterwarnings("ignore:Image size", "ignore:Corrupt EXIF")

PLAIN = AugmentConfig(randaugment=False, crop_scale=(1.0, 1.0), hflip=False)
ENCODED = {
    "jpg": photo("jpeg"),
    "png": photo("png"),
    "webp": photo("webp"),
    "progressive": photo("jpeg", progressive=True),
    "grey": photo("jpeg", mode="L"),
    "cmyk": photo("jpeg", mode="CMYK"),
    "palette": photo("png", mode="P"),
    "alpha": photo("png", mode="RGBA"),
    "gif": photo("gif", mode="P"),
    "bmp": photo("bmp"),
}

COUNT = 24  # mutants of one kind; the nightly test reads 10,000


def caption(number):
    return f"a red dog number {number}"


def annotation(number):
    text = caption(number)
    return full_annotation(number, [text, f"{text} again"], url="http://nowhere")


def sample(number):
    kind = ("jpg", "png", "webp")[number % 3]
    files = {kind: ENCODED[kind]}
    if number % 4 == 3:
        return f"k{number}", files | {"txt": caption(number).encode()}
    return f"k{number}", files | {"json": annotation(number)}


def slots(data):
    [index] = data.indices
    for shard, entry in enumerate(index.shards):
        for position in range(entry.samples):
            yield entry.name, data.samples[Request(0, SampleIndex(0, shard, position, 0))]


def outcomes(data):
    counts = Counter()
    for shard, slot in slots(data):
        assert slot.valid == (slot.skip is None)
        assert slot.pixels is None or slot.pixels.isfinite().all()
        if slot.skip is None:
            counts["good"] += 1
            continue
        assert slot.skip.kind in KINDS, slot.skip
        assert shard in slot.skip.where
        assert slot.skip.where.encode()  # can be printed and written
        assert slot.pixels is None
        counts[slot.skip.kind] += 1
    return counts


def shard(first):
    return plain_tar(sample(number) for number in range(first, first + 3))


@pytest.mark.parametrize("damage", TARS, ids=lambda damage: damage.__name__)
def test_tars_damaged_before_they_are_indexed(tmp_path, make_data, damage):
    for number in range(COUNT):
        rng = np.random.default_rng((TARS.index(damage), number))
        (tmp_path / f"{number:03d}.tar").write_bytes(damage(rng, shard(number)))
    problems = index_folder(tmp_path)
    names = {f"{number:03d}.tar" for number in range(COUNT)}
    assert all(problem.split(":")[0] in names for problem in problems)
    counts = outcomes(make_data(tmp_path, augment=PLAIN))
    assert counts["missing shard"] == 0
    assert counts["good"] >= COUNT / 2


@pytest.mark.parametrize("damage", TARS, ids=lambda damage: damage.__name__)
def test_tars_damaged_after_they_were_indexed(tmp_path, make_data, damage):
    for number in range(COUNT):
        (tmp_path / f"{number:03d}.tar").write_bytes(shard(number))
    index_folder(tmp_path)
    for number, path in enumerate(sorted(tmp_path.glob("*.tar"))):
        rng = np.random.default_rng((100 + TARS.index(damage), number))
        path.write_bytes(damage(rng, path.read_bytes()))
    counts = outcomes(make_data(tmp_path, augment=PLAIN))
    assert counts.total() == 3 * COUNT  # every sample of the index is good or counted
    assert counts["good"] >= COUNT / 2


def test_truncated_tars_lose_only_samples_after_the_cut(tmp_path, make_data):
    whole = shard(0)
    lengths = sorted({*range(0, len(whole), 512), *range(7, len(whole), 512)})
    for length in lengths:
        (tmp_path / f"{length:06d}.tar").write_bytes(whole)
    index_folder(tmp_path)
    for length in lengths:
        (tmp_path / f"{length:06d}.tar").write_bytes(whole[:length])
    good = Counter(
        name for name, slot in slots(make_data(tmp_path, augment=PLAIN)) if slot.skip is None
    )
    parts = [plain_tar([sample(number)])[:-1024] for number in range(3)]
    ends = np.cumsum([len(part) for part in parts])
    contents = ends - [len(part) - len(part.rstrip(b"\0")) for part in parts]
    for length in lengths:
        counts = good[f"{length:06d}.tar"]
        # What fills up the last block of a sample may be missing or not.
        assert (ends <= length).sum() <= counts <= (contents <= length).sum()


@pytest.mark.parametrize("augment", [AugmentConfig(), PLAIN], ids=["augmented", "plain"])
@pytest.mark.parametrize("kind", ENCODED)
def test_damaged_images(tmp_path, make_data, kind, augment):
    mutants = list(damaged(BYTES, ENCODED[kind], 5 * COUNT, seed=len(kind)))
    text = annotation(0)
    (tmp_path / "0.tar").write_bytes(
        plain_tar(
            (f"k{number}", {"jpg": data, "json": text}) for number, data in enumerate(mutants)
        )
    )
    index_folder(tmp_path)
    counts = outcomes(make_data(tmp_path, augment=augment))
    assert counts.total() == len(mutants)
    assert set(counts) <= {"good", "unreadable image", "image too large"}
    assert min(counts["good"], counts["unreadable image"]) > 0.05 * len(mutants)


@pytest.mark.parametrize("name", ["values", "bytes"])
def test_damaged_annotations(tmp_path, make_data, name):
    damages = (splice_json,) if name == "values" else BYTES
    mutants = list(damaged(damages, annotation(0), 12 * COUNT, seed=1))
    (tmp_path / "0.tar").write_bytes(
        plain_tar(
            (f"k{number}", {"png": ENCODED["png"], "json": data})
            for number, data in enumerate(mutants)
        )
    )
    index_folder(tmp_path)
    data = make_data(tmp_path, augment=PLAIN)
    counts = outcomes(data)
    assert counts.total() == len(mutants)
    assert set(counts) <= {"good", "bad annotation", "no text"}
    assert min(counts["good"], counts["bad annotation"]) > 0.01 * len(mutants)
    # Whatever was accepted can be written, and read again as the same.
    [index] = data.indices
    for number in range(len(mutants)):
        try:
            content = index.read_annotation(0, number)
        except BadSample:
            continue
        again = Annotation.model_validate_json(content.to_json())
        assert again.to_json() == content.to_json()


def damaged(damages, data, count, seed):
    """Mutants of one file; every fifth is damaged twice, by bytes the second time."""
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        mutant = damages[int(rng.integers(len(damages)))](rng, data)
        yield BYTES[number % len(BYTES)](rng, mutant) if number % 5 == 4 and mutant else mutant


def test_bad_samples_below_the_maximum_share_are_counted_once(tmp_path, make_data):
    files = [
        dict(sample(0)[1]),
        {"png": ENCODED["png"][:300], "json": annotation(1)},
        {"png": png_of(9000, 8000), "json": annotation(2)},
        {"json": annotation(3)},
        {"png": ENCODED["png"]},
        {"png": ENCODED["png"], "json": b"{"},
        {"png": ENCODED["png"], "txt": b"\xff"},
        {"txt": b"a text that is called an image".ljust(99), "jpg": b"a red dog"},
        {"jpg": ENCODED["png"], "txt": b"a red dog"},
        dict(sample(0)[1]),
    ]
    names = [*(f"k{number}" for number in range(9)), "k0"]
    for shard_number in range(4):
        (tmp_path / f"{shard_number}.tar").write_bytes(plain_tar(zip(names, files)))
    index_folder(tmp_path)
    assert ShardIndex.open(tmp_path).shards[0].uncaptioned == 4  # none, or none that can be read
    (tmp_path / "2.tar").write_bytes((tmp_path / "2.tar").read_bytes()[:900])
    (tmp_path / "3.tar").unlink()
    expected = {
        "unreadable image": 4,
        "image too large": 2,
        "missing image": 2,
        "no text": 2,
        "bad annotation": 4,
        "duplicate key": 2,
        "corrupt shard": 10,
        "missing shard": 10,
    }
    assert set(expected) == set(KINDS)
    skip = {"policy": "skip"}
    bad = sum(expected.values())
    data = make_data(tmp_path, augment=PLAIN, outages=skip)
    data.max_skipped_share = bad / 40
    batches = [batch for batch, _ in data.batches(stop_after=data.batches_in_epoch(0))]
    skipped = [skip for batch in batches for skip in batch.skipped]
    assert Counter(skip.kind for skip in skipped) == expected
    places = [skip.where for skip in skipped if skip.kind != "missing shard"]
    assert len(set(places)) == len(places)
    assert sum(int(batch.valid.sum()) for batch in batches) == 40 - bad == 4
    data.max_skipped_share = (bad - 1) / 40
    with pytest.raises(
        DataError, match=rf"{bad} of 40 samples of epoch 0 are bad, .*the last one: "
    ):
        list(data.batches(stop_after=data.batches_in_epoch(0)))
