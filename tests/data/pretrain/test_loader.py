import io
import json
import multiprocessing
import os
import shutil
import tarfile
from collections import Counter
from itertools import islice, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_shards import encoded, photo
from PIL import Image
from shard_server import serve

from vlp.config import ConfigError
from vlp.data.config import AugmentConfig
from vlp.data.image.transforms import Preprocessing
from vlp.data.pretrain import DataError, ShardList
from vlp.data.schema import Annotation, captions_of
from vlp.data.shards import remote
from vlp.data.shards.sample_files import SkippedSample
from vlp.data.shards.shard_reader import ShardIndex, ShardWriter, index_folder
from vlp.data.stream import loader
from vlp.data.stream.batch import Batch
from vlp.data.stream.loader import SkippedShareWatch
from vlp.data.stream.rng import make_rng, stable_hash
from vlp.data.stream.sampler import EndlessSampler, Request, SampleIndex, Source, TrainingSampler

PLAIN = AugmentConfig(randaugment=False, crop_scale=(1.0, 1.0), hflip=False)


def assert_same(first, second):
    for name, left, right in zip(Batch._fields, first, second):
        if name in ("skipped", "statistics") or left is None:
            assert left == right
        else:
            assert left.dtype == right.dtype, name
            assert torch.equal(left, right), name


def joined(parts):
    *tensors, skipped, statistics = zip(*parts)
    whole = (None if field[0] is None else torch.cat(field) for field in tensors)
    return Batch(*whole, tuple(sum(skipped, ())), statistics[0])


@pytest.mark.parametrize(
    ("texts", "equal"),
    [
        (("Two dogs\u2019 den \u2013 \u201chere\u201d.", 'two dogs\' den - "here"'), True),
        (("a " * 20 + "b", "a " * 20 + "c"), True),
        (("a " * 7, "a " * 7 + "."), True),
        (("\u0177", "\u0436"), True),
        (("a red dog", "a red cat"), False),
    ],
    ids=["marks", "cut", "full", "unknown", "others"],
)
def test_ids_of_equal_images_and_captions(texts, equal, tmp_path, make_data):
    with ShardWriter(tmp_path / "web", 3) as writer:
        for number, text in enumerate((*texts, "a blue house")):
            image = encoded(photo(number % 2))
            writer.write(str(number), image, "jpg", Annotation(captions=[text]))
    [(batch, _)] = make_data(tmp_path / "web", batch=3, canonical_streams=1).batches(stop_after=1)
    assert len(batch.image_ids.unique()) == 2
    assert len(batch.caption_ids.unique()) == (2 if equal else 3)


def test_fields_shapes_and_values(make_shards, make_data):
    folder = make_shards(count=8, per_shard=8)
    data = make_data(folder, augment=PLAIN)
    [(batch, consumed)] = data.batches(stop_after=1)
    assert consumed == 8
    shapes = dict.fromkeys(("image_ids", "caption_ids", "valid", "sample_ids"), (8,))
    shapes |= {"pixels": (8, 3, 16, 16), "mim_mask": (8, 4, 4), "uniform": (8, 2)}
    shapes |= {"word_patches": (8, 10, 16)}
    dtypes = dict.fromkeys(("attention_mask", "word_mask", "mim_mask", "valid"), torch.bool)
    dtypes |= {"pixels": torch.uint8, "uniform": torch.float64, "word_patches": torch.int8}
    for name, field in zip(Batch._fields[:-2], batch):
        assert tuple(field.shape) == shapes.get(name, (8, 10)), name
        assert field.dtype == dtypes.get(name, torch.int64), name
    there = batch.to("cpu")
    torch.testing.assert_close(there.pixels, batch.pixels / 127.5 - 1)
    assert there.to("cpu").pixels.equal(there.pixels)  # once is enough
    assert batch.valid.all()
    assert (batch.mim_mask.sum((1, 2)) == 8).all()
    assert ((batch.mlm_labels != -100).sum(1) >= 1).all()
    masked = batch.mlm_labels != -100
    assert (masked & ~batch.word_mask).sum() == 0
    assert torch.equal(batch.mlm_labels[masked], batch.text_ids[masked])
    assert torch.equal(batch.mlm_ids[~masked], batch.text_ids[~masked])
    assert (batch.uniform >= 0).all()
    assert len(batch.uniform.unique()) == 16
    # Every row is the image and one of the captions of the sample that its image id names.
    index = ShardIndex.open(folder)
    prepare = Preprocessing(16)
    by_id = {stable_hash("picture", "shards", str(n)): index.read(0, n) for n in range(8)}
    assert set(batch.image_ids.tolist()) == set(by_id)
    for row, image_id in enumerate(batch.image_ids.tolist()):
        raw = by_id[image_id]
        assert torch.equal(batch.to("cpu").pixels[row], prepare(Image.open(io.BytesIO(raw.image))))
        texts = data.tokenizer(captions_of(raw.annotation)).text_ids
        assert (texts == batch.text_ids[row]).all(1).any()


@pytest.mark.parametrize(("workers", "shuffle"), [(0, "windows"), (2, "windows"), (0, "sliding")])
def test_batches_are_independent_of_ranks_and_workers(make_shards, make_data, workers, shuffle):
    """The same global batches, value by value, before a stop and after it, each sample once."""
    folders = make_shards("a", 13, per_shard=4), (make_shards("b", 6), 0.5)
    data = make_data(*folders, shuffle=shuffle)
    per_epoch = data.batches_in_epoch(0)
    whole = list(data.batches(stop_after=2 * per_epoch))
    ends = [0, *(after for _, after in whole)]
    assert [data.batches_left(after, 2) for after in ends] == [*range(2 * per_epoch, -1, -1)]
    for wrong in ({"samples_consumed": 1}, {"world_size": 3}):
        with pytest.raises(ConfigError):
            data.batches(**wrong)

    def run(world_size, consumed, batches):
        data = make_data(*folders, workers=workers, shuffle=shuffle)
        shares = [list(data.batches(consumed, r, world_size, batches)) for r in range(world_size)]
        received = []
        for together in zip(*shares, strict=True):
            (after,) = {after for _, after in together}
            received.append((joined(batch for batch, _ in together), after))
        return received

    @settings(max_examples=8 if workers == 0 else 2, deadline=None)
    @given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, len(whole) - 1))
    def check(ranks, later, stopped):
        received = run(ranks, 0, stopped)
        received += run(later, received[-1][1] if received else 0, len(whole) - stopped)
        for (batch, after), (expected, expected_after) in zip(received, whole, strict=True):
            assert_same(batch, expected)
            assert after == expected_after
        once = joined(batch for batch, _ in received[:per_epoch])
        ids = once.sample_ids[once.valid].tolist()
        assert len(ids) == len(set(ids)) == 13 + 3

    check()


def test_epochs_read_each_sample_once_with_new_random_numbers(make_shards, make_data):
    data = make_data(make_shards(count=23))
    per_epoch = data.batches_in_epoch(0)
    assert data.samples_in_epoch(0) == 23
    batches = [batch for batch, _ in data.batches(stop_after=2 * per_epoch)]
    epochs = [joined(batches[:per_epoch]), joined(batches[per_epoch:])]
    rows = []
    for epoch in epochs:
        ids = epoch.sample_ids[epoch.valid].tolist()
        assert len(ids) == len(set(ids)) == 23
        rows.append({n: row for row, n in enumerate(epoch.sample_ids.tolist()) if n != -1})
    assert rows[0].keys() == rows[1].keys()
    same_text = 0
    for sample, row in rows[0].items():
        other = rows[1][sample]
        assert epochs[0].image_ids[row] == epochs[1].image_ids[other]
        assert not torch.equal(epochs[0].pixels[row], epochs[1].pixels[other])
        assert not torch.equal(epochs[0].uniform[row], epochs[1].uniform[other])
        same_text += int(torch.equal(epochs[0].text_ids[row], epochs[1].text_ids[other]))
    assert 3 < same_text < 20  # one of two captions, drawn afresh on each visit


def test_weights_and_images_shared_by_sources(tmp_path, make_shards, make_data):
    common = make_shards("a", 6)
    data = make_data(
        (common, 2.0), common, (make_shards("b", 8), 0.5), canonical_streams=2, batch=2
    )
    batch = joined(batch for batch, _ in data.batches(stop_after=data.batches_in_epoch(0)))
    images = Counter(batch.image_ids[batch.valid].tolist())
    assert sorted(images.values()) == [1] * 4 + [3] * 6
    samples = Counter(batch.sample_ids[batch.valid].tolist())
    assert sorted(samples.values()) == [1] * (6 + 4) + [2] * 6
    # The two visits of one epoch are two random draws.
    twice = next(sample for sample, count in samples.items() if count == 2)
    first, second = batch.uniform[batch.sample_ids == twice]
    assert not torch.equal(first, second)


def test_captions_all_makes_a_sample_of_every_caption(make_shards, make_data):
    folder = make_shards(count=7, per_shard=3, captions=3)
    data = make_data(folder, captions="all")
    assert data.samples_in_epoch(0) == 21
    batch = joined(batch for batch, _ in data.batches(stop_after=data.batches_in_epoch(0)))
    assert batch.valid.sum() == 21
    assert len(set(batch.sample_ids[batch.valid].tolist())) == 21
    assert set(Counter(batch.image_ids[batch.valid].tolist()).values()) == {3}
    index = ShardIndex.open(folder)
    expected = Counter(
        tuple(row)
        for shard, entry in enumerate(index.shards)
        for sample in range(entry.samples)
        for row in data.tokenizer(
            captions_of(index.read_annotation(shard, sample))
        ).text_ids.tolist()
    )
    assert Counter(map(tuple, batch.text_ids[batch.valid].tolist())) == expected


def test_disabled_objectives_mask_nothing(make_shards, make_data):
    folder = make_shards()
    inputs = make_data(folder).samples.inputs
    inputs = inputs._replace(word_masking=None, patch_masking=None)
    [(batch, _)] = make_data(folder, inputs=inputs).batches(stop_after=1)
    assert torch.equal(batch.mlm_ids, batch.text_ids)
    assert (batch.mlm_labels == -100).all()
    assert not batch.mim_mask.any()
    # Leaving objectives out changes no other draw.
    [(full, _)] = make_data(folder).batches(stop_after=1)
    for name in ("pixels", "text_ids", "uniform", "sample_ids"):
        assert torch.equal(getattr(batch, name), getattr(full, name))


def test_slots_beyond_the_end_are_empty(make_shards, make_data):
    data = make_data(make_shards(count=5))
    [(batch, consumed)] = data.batches(stop_after=1)
    assert consumed == 5
    empty = ~batch.valid
    assert empty.sum() == 3
    assert batch.skipped == ()
    assert (batch.pixels[empty] == 128).all()  # grey, about zero once normalised
    assert not batch.word_mask[empty].any()
    assert batch.attention_mask[empty].sum(1).tolist() == [2, 2, 2]
    ids = batch.text_ids[empty][:, :2].unique(dim=0).tolist()
    assert ids == [[data.tokenizer.cls_id, data.tokenizer.sep_id]]
    assert (batch.mlm_labels[empty] == -100).all()
    assert set(batch.image_ids[empty].tolist()) == {-1}


def test_getitems_equals_getitem(tmp_path, make_shards, make_data):
    good = ShardIndex.open(make_shards(count=30, per_shard=30, captions=1))
    folder = tmp_path / "mixed"
    with ShardWriter(folder, 30) as writer:
        for number in range(30):
            raw = good.read(0, number)
            stream = io.BytesIO()
            Image.open(io.BytesIO(raw.image)).convert("RGB").resize((64, 48)).save(stream, "jpeg")
            data = stream.getvalue()
            cut = {3: b"no image", 7: data[:-50], 20: data[:40]}.get(number, data)
            writer.write(raw.key, cut, "jpg", raw.annotation)
    augment = AugmentConfig(randaugment=True, crop_scale=(0.5, 1.0))
    samples = make_data(folder, augment=augment).samples
    requests = [Request(0, SampleIndex(0, 0, number, 0)) for number in range(30)]
    requests.insert(5, Request(0, None))
    together = samples.collate(samples.__getitems__(requests))
    alone = samples.collate([samples[request] for request in requests])
    # Pillow's messages name the address of an object.
    assert_same(together, alone._replace(skipped=together.skipped))
    assert [kind for kind, _ in alone.skipped] == [kind for kind, _ in together.skipped]
    assert together.valid.sum() == 27
    assert [kind for kind, _ in together.skipped] == ["unreadable image"] * 3
    for row, request in enumerate(requests):
        if request.sample_index is not None and together.valid[row]:
            raw = ShardIndex.open(folder).read(0, request.sample_index.position)
            rng = make_rng(5, 0, f"0:0:{request.sample_index.position}:None:0", "augment")
            image = Image.open(io.BytesIO(raw.image))
            levels = samples.transform.prepare(image, rng, captions_of(raw.annotation)[0])()
            assert torch.equal(together.pixels[row], levels)


@pytest.mark.parametrize("workers", [0, 1])
def test_mostly_bad_data_raises_and_stops_workers(tmp_path, make_data, workers):
    with ShardWriter(tmp_path / "bad", 50) as writer:
        for number in range(40):
            writer.write(f"k{number}", b"x", "png", Annotation(caption="a dog"))
    data = make_data(tmp_path / "bad", workers=workers)
    with pytest.raises(DataError, match=r"24 of 40 samples.*more than 50%.*unreadable image"):
        list(data.batches())
    assert multiprocessing.active_children() == []
    # Allowed to be bad to the last one: still not an endless run on nothing.
    data = make_data(tmp_path / "bad", workers=workers)
    data.max_skipped_share = 1.0
    with pytest.raises(DataError, match="nothing is left of epoch 0: all of its 40"):
        list(data.batches())
    assert multiprocessing.active_children() == []


def test_workers_end_when_the_loop_is_left(make_shards, make_data):
    batches = make_data(make_shards(), workers=2).batches()
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert multiprocessing.active_children() == []


def changed(first, second):
    return set(dict(first.fingerprint.items() ^ second.fingerprint.items()))


def test_fingerprints_are_of_content(make_shards, make_data, vocabulary, tmp_path):
    left, right = make_shards(count=21, per_shard=5), make_shards("two", count=12, per_shard=4)
    before = make_data(left, right)
    assert set(before.fingerprint) == {"source 0", "source 1", "vocabulary"}
    moved = shutil.copytree(right, tmp_path / "moved")
    assert not changed(before, make_data(left, moved))

    last = sorted(moved.glob("*.tar"))[-1]
    last.unlink()
    index_folder(moved)
    assert changed(before, make_data(left, moved)) == {"source 1"}

    other = shutil.copytree(vocabulary, tmp_path / "vocabulary")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    pieces = tokenizer["model"]["vocab"]
    words = [word for word in pieces if word.isalpha()][:2]
    pieces[words[0]], pieces[words[1]] = pieces[words[1]], pieces[words[0]]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert changed(before, make_data(left, right, vocabulary=str(other))) == {"vocabulary"}


def test_fingerprints_of_shard_lists_hash_file_names(make_shards, make_data, tmp_path):
    folder = make_shards(count=12, per_shard=4)
    more = {"epoch_samples": 24}
    before = make_data(folder, **more)
    assert not changed(before, make_data(shutil.copytree(folder, tmp_path / "moved"), **more))
    sorted(folder.glob("*.tar"))[0].unlink()
    assert changed(before, make_data(folder, **more)) == {"source 0"}


def share(good, bad):
    valid = torch.tensor([True] * good + [False] * bad)
    skipped = tuple(SkippedSample("unreadable image", f"a.tar, k{n}") for n in range(bad))
    return SimpleNamespace(valid=valid, skipped=skipped)


def watch(samples, most):
    return SkippedShareWatch(
        TrainingSampler([Source([samples])], 2, 4, 0), most, rank=1, world_size=2
    )


def test_max_skipped_share_of_an_epoch():
    watched = watch(40, 0.25)  # this rank has 20 samples of each epoch
    for epoch in range(3):
        watched.update(epoch, share(2, 3))
        watched.update(epoch, share(3, 2))
    with pytest.raises(DataError, match=r"6 of 20 samples of epoch 2 .* unreadable.*a\.tar, k0"):
        watched.update(2, share(7, 1))


def test_an_epoch_without_a_good_sample_raises():
    resumed = watch(40, 1.0)
    resumed.update(0, share(0, 1))  # the last of the 20 of epoch 0
    resumed.update(1, share(0, 20))
    with pytest.raises(DataError, match="nothing is left of epoch 1: all of its 20 samples"):
        resumed.update(2, share(1, 0))


def test_many_bad_samples_in_a_row_raise(monkeypatch):
    monkeypatch.setattr(loader, "_MAX_IN_A_ROW", 100)
    watched = watch(10**9, 0.5)
    for _ in range(12):
        watched.update(0, share(0, 8))
    watched.update(0, share(1, 7))  # one good sample, and the count starts anew
    for _ in range(12):
        watched.update(0, share(0, 8))
    with pytest.raises(DataError, match=r"104 samples in a row are bad; the last one"):
        watched.update(0, share(0, 8))


@pytest.fixture
def stream(make_data):
    def make(*paths, start=(0, 0, 1), stop_after=6, max_skipped_share=0.5, seed=1, **options):
        options = {"epoch_samples": 40, "shuffle_window": 7} | options
        data = make_data(*paths, seed=seed, **options)
        data.max_skipped_share = max_skipped_share
        assert data.samples_in_epoch(0) == 40
        assert data.batches_in_epoch(3) == 5
        return list(data.batches(*start, stop_after))

    return make


def ids(stream):
    return [number for batch, _ in stream for number in batch.sample_ids.tolist()]


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for first, second in zip(one, other)
        for a, b in zip(first[0], second[0])
    )


def without_index(folder):
    for path in [*folder.glob("*.json"), *folder.glob("*.npy")]:
        path.unlink()
    return folder


def test_resampling_reads_every_sample_in_full_batches(make_shards, stream):
    folder = without_index(make_shards(count=23))
    batches = stream(str(folder), stop_after=25)
    assert [consumed for _, consumed in batches] == list(range(8, 201, 8))
    assert all(batch.valid.all() for batch, _ in batches)
    counts = Counter(ids(batches))
    assert len(counts) == 23
    # About 9 visits each, by whole shards: far from once an epoch, and no sample is left out.
    assert max(counts.values()) < 30
    # What comes twice is drawn afresh.
    uniform = torch.cat([batch.uniform for batch, _ in batches])
    assert len(uniform.unique(dim=0)) == 200
    texts = torch.cat([batch.mlm_ids for batch, _ in batches])
    assert len(texts.unique(dim=0)) > 80


def test_resampled_samples_are_shuffled(make_shards, stream):
    folder = str(without_index(make_shards(count=40, per_shard=40)))
    in_order = ids(stream(folder, shuffle_window=1, stop_after=5))
    mixed = ids(stream(folder, shuffle_window=20, stop_after=5))
    assert len(set(in_order)) == 40
    assert mixed != in_order
    place = {number: n for n, number in enumerate(in_order)}
    steps = [place[b] - place[a] for a, b in pairwise(mixed)]
    assert sum(step == 1 for step in steps) < 10


@pytest.mark.parametrize("workers", [0, 2])
def test_resampling_depends_on_the_start(make_shards, stream, workers):
    folder = str(without_index(make_shards()))
    first = stream(folder, workers=workers)
    assert equal(first, stream(folder, workers=workers))
    for other in ({"seed": 2}, {"start": (48, 0, 1)}):
        assert not equal(first, stream(folder, workers=workers, **other))


def test_ranks_and_workers_read_different_things(make_shards, stream):
    folder = str(without_index(make_shards(count=60, per_shard=2)))
    ranks = [stream(folder, start=(0, rank, 2), workers=2) for rank in range(2)]
    assert {len(batch.valid) for rank in ranks for batch, _ in rank} == {4}
    assert [consumed for _, consumed in ranks[0]] == [consumed for _, consumed in ranks[1]]
    assert ids(ranks[0]) != ids(ranks[1])
    # A worker's batches come in turn: the first of each are of different shards.
    assert ids(ranks[0][:1]) != ids(ranks[0][1:2])
    uniform = torch.cat([batch.uniform for rank in ranks for batch, _ in rank])
    assert len(uniform.unique(dim=0)) == len(uniform)


def test_weights_of_resampled_sources(make_shards, stream):
    often = without_index(make_shards("often", 20, 2))
    seldom = without_index(make_shards("seldom", 20, 2))
    numbers = ids(stream((str(often), 3.0), (str(seldom), 1.0), stop_after=25))
    assert len(ShardList(str(often)).shards) == 10
    first = {
        stable_hash("sample", 0, shard, number, 0) for shard in range(10) for number in range(2)
    }
    share = sum(number in first for number in numbers) / len(numbers)
    assert 0.6 < share < 0.9  # 0.75; 100 shards are drawn, one deviation is 0.04


def test_patterns_lists_and_urls(make_shards, stream, tmp_path):
    folder = without_index(make_shards(count=20))
    expected = stream(str(folder))
    assert equal(expected, stream(f"{folder}/shard-{{000000..000003}}.tar"))
    (tmp_path / "list.txt").write_text(
        f"{folder}/shard-{{000000..000001}}.tar\n\n{folder}/shard-000002.tar\n"
        f"{folder}/shard-000003.tar\n",
        encoding="utf-8-sig",
    )
    assert equal(expected, stream(str(tmp_path / "list.txt")))
    with serve(folder) as server:
        url = f"{server.url}/shard-{{000000..000003}}.tar"
        before = len(os.listdir("/proc/self/fd"))
        cache = {"folder": str(tmp_path / "cache"), "limit": "1MB"}
        assert equal(expected, stream(url, cache=cache))
        assert os.listdir(tmp_path / "cache") == []
        assert equal(expected[:2], stream(url, workers=1, stop_after=2))
        assert len(os.listdir("/proc/self/fd")) <= before + 8
        server.wants = "user:secret", "token=secret"
        whole = url.replace("://", "://user:secret@") + "?token=secret"
        assert equal(expected[:2], stream(whole, stop_after=2))
        missing = whole.replace("000003", "000005")
        batches = stream(missing, stop_after=9, outages={"policy": "skip"})
        skips = [skip for batch, _ in batches for skip in batch.skipped]
        assert any("shard-000004.tar?***" in skip.where for skip in skips)
        assert "secret" not in str(skips)


def test_bad_samples_and_shards_are_counted(make_shards, stream, monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.001)
    folder = without_index(make_shards(count=25, per_shard=5))
    cut = folder / "shard-000001.tar"
    cut.write_bytes(cut.read_bytes()[:9000])
    (folder / "shard-000002.tar").write_bytes(b"")
    with tarfile.open(folder / "shard-000003.tar", "w"):
        pass
    batches = stream(str(folder), stop_after=12, max_skipped_share=0.9)
    kinds = Counter(skip.kind for batch, _ in batches for skip in batch.skipped)
    assert set(kinds) == {"corrupt shard"}
    assert all(len(batch.valid) == 8 for batch, _ in batches)
    assert sum(int((~batch.valid).sum()) for batch, _ in batches) == sum(kinds.values())
    with serve(folder) as server:
        server.fails["shard-000000.tar"] = 10_000
        url = f"{server.url}/shard-00000{{0,4,7}}.tar"
        outages = {"seconds": 0.05, "policy": "skip"}
        batches = stream(url, stop_after=12, max_skipped_share=0.9, outages=outages)
        for workers in (0, 1):
            with pytest.raises(DataError, match=r"^missing shard: "):
                stream(url, stop_after=12, outages={"seconds": 0.05}, workers=workers)
    skipped = [skip for batch, _ in batches for skip in batch.skipped]
    assert {skip.kind for skip in skipped} == {"missing shard"}
    assert {skip.where.split(" ")[0][-8:] for skip in skipped} == {"0000.tar", "0007.tar"}


@pytest.mark.parametrize("workers", [0, 1])
def test_only_bad_shards_raise_data_error(tmp_path, stream, workers):
    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(DataError, match=r"^16 shards in a row hold no.*corrupt shard: .*tar"):
        stream(str(tmp_path), max_skipped_share=1.0, workers=workers)


def test_endless_order():
    sampler = EndlessSampler(25, 10)
    assert sampler.samples_in_epoch(0) == 30
    steps = list(islice(sampler.global_batches(20, 10), 5))
    assert [(step.epoch, step.consumed) for step in steps] == [
        (0, 30), (1, 40), (1, 50), (1, 60), (2, 70),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="3 ranks cannot share a batch of 10"):
        sampler.samples_of_rank(0, 0, 3)
