import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from made_shards import encoded, photo
from raw_images import files_of
from test_work_sharding import launch
from tests_support import TINY_MODEL

from data_tools.__main__ import main
from vlp.config import ConfigError, load_config
from vlp.data.config import AugmentConfig
from vlp.data.features.store import (
    BAD,
    FLIPPED,
    HEADER_NAME,
    PLAIN,
    FeatureHeader,
    StoredFeatures,
    TowerKey,
)
from vlp.data.image.decode import decode_image
from vlp.data.image.transforms import Preprocessing, TrainTransform
from vlp.data.pretrain import PretrainData
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import DataError
from vlp.data.shards.shard_reader import ShardIndex, ShardWriter, index_folder
from vlp.data.stream.batch import Batch
from vlp.data.stream.rng import make_rng
from vlp.models.vlp import VLPModel
from vlp.training.config import PretrainConfig


def data_of(config, *overrides, seed=0):
    settings = load_config(config, PretrainConfig, overrides)
    return PretrainData(settings.data, settings.inputs, settings.training.batch, seed)


@pytest.fixture
def shards(tmp_path):
    """Captions with and without a side, two images that cannot be read, and one without text."""
    with ShardWriter(tmp_path / "shards", 7) as writer:
        for number in range(33):
            image = os.urandom(99) if number == 3 else encoded(photo(number))
            image = image[: len(image) // 2] if number == 20 else image  # its header is good
            side = ["a dog left", "the right cat", "a cat"][number % 3]
            captions = [] if number == 11 else [f"{side} number {number}"]
            writer.write(f"k{number}", image, "jpg", Annotation(captions=captions))
    return tmp_path / "shards"


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_pixels_differ(shards, configuration, tmp_path, workers):
    config = configuration(shards, captions="all", workers=workers)
    out = make_features(config, tmp_path / "out", "--views", 3)
    plain, cached = data_of(config), data_of(config, f"data.features={out}")
    stored = StoredFeatures(out).require(Preprocessing(16), cached.indices)[0]
    views, skipped = set(), []
    for (first, consumed), (other, also) in zip(plain.batches(stop_after=9), cached.batches()):
        assert consumed == also
        for name, left, right in zip(Batch._fields, first, other):
            if isinstance(left, torch.Tensor) and name != "pixels":
                assert torch.equal(left, right), name
        places = [
            [(skip.kind, skip.where.split(" (")[0]) for skip in batch.skipped]
            for batch in (first, other)
        ]
        assert places[0] == places[1]
        skipped += places[1]
        assert other.pixels.dtype == torch.float16
        assert other.pixels.shape == (8, 17, 16)
        assert not other.pixels[~other.valid].any()
        there = other.to("cpu")
        assert torch.equal(there.pixels, other.pixels.float())
        assert torch.equal(there.to("cpu").pixels, there.pixels)
        for row, number in zip(other.pixels[other.valid], other.sample_ids[other.valid].tolist()):
            views.add((number, row.numpy().tobytes()))
    assert {kind for kind, _ in skipped} == {"unreadable image", "no text"}
    assert len({where for _, where in skipped}) == 3
    numbers = {
        stored.read(shard, sample, view).numpy().tobytes()
        for shard, entry in enumerate(cached.indices[0].shards)
        for sample in range(entry.samples)
        for view in range(3)
    }
    assert {row for _, row in views} <= numbers
    assert len({number for number, _ in views}) < len(views)  # several views of an image came


def test_a_resumed_run_sees_the_same(shards, configuration, tmp_path):
    config = configuration(shards)
    out = make_features(config, tmp_path / "out", "--views", 4)
    data = data_of(config, f"data.features={out}")
    run = list(data.batches(stop_after=8))
    again = data_of(config, f"data.features={out}").batches(run[2][1], stop_after=5)
    for (batch, consumed), (other, also) in zip(run[3:], again, strict=True):
        assert consumed == also
        assert torch.equal(batch.pixels, other.pixels)
    halves = [list(data.batches(rank=rank, world_size=2, stop_after=4)) for rank in (0, 1)]
    for number, (batch, _) in enumerate(run[:4]):
        both = torch.cat([half[number][0].pixels for half in halves])
        assert torch.equal(both, batch.pixels)


def test_captions_with_a_side_get_no_flipped_view(shards, configuration, tmp_path):
    config = configuration(shards)
    out = make_features(config, tmp_path / "out", "--views", 6)
    data = data_of(config, f"data.features={out}")
    [stored] = data.samples.features
    codes = {}
    for shard, entry in enumerate(data.indices[0].shards):
        rows = np.load(out / "0" / entry.name.replace(".tar", ".views.npy"))
        for sample in range(entry.samples):
            for view in range(6):
                row = stored.read(shard, sample, view).numpy().tobytes()
                codes.setdefault(row, set()).add(int(rows[sample, view]))
    flipped = {True: 0, False: 0}
    samples = (data.indices[0].read(*divmod(number, 7)) for number in range(33))
    numbers = [data.samples._image_id(0, sample) for sample in samples]
    for batch, _ in data.batches(stop_after=40):
        for row, image in zip(batch.pixels[batch.valid], batch.image_ids[batch.valid].tolist()):
            has_side = numbers.index(image) % 3 != 2
            flipped[has_side] += codes[row.numpy().tobytes()] == {FLIPPED}
    assert flipped[True] == 0
    assert flipped[False] > 10


def test_images_that_are_not_augmented_have_their_plain_view(shards, configuration, tmp_path):
    config = configuration(shards, captions="all")
    out = make_features(config, tmp_path / "out", "--views", 3)
    augment = "data.augment={randaugment: false, crop_scale: [1, 1], hflip: false}"
    stored = StoredFeatures(out).require(Preprocessing(16), data_of(config).indices)[0]
    batch = next(data_of(config, f"data.features={out}", augment).batches())[0]
    shards = enumerate(stored._shards)
    plain = torch.stack([stored.read(s, n, 0) for s, (_, count) in shards for n in range(count)])
    rows = batch.pixels[batch.valid]
    assert len(rows)
    assert all((row == plain).flatten(1).all(1).any() for row in rows)
    assert stored.views(0, 0, data_of(config).indices[0].read(0, 0).image, True, "") == [0]


def test_features_of_other_settings_are_refused(shards, configuration, tmp_path):
    config = configuration(shards)
    out = make_features(config, tmp_path / "out", "--views", 2)
    other = tmp_path / "other"
    with ShardWriter(other, 4) as writer:
        writer.write("k", encoded(photo(0)), "jpg", Annotation(captions=["a dog"]))
    for override, message in (
        ("model.image.image_size=20", "image_size is 16 there, 20 here"),
        ("data.augment.hflip=false", r"augment\.hflip is True there, False here"),
        (f"data.sources=[{{path: {other}}}]", "holds no features of"),
    ):
        with pytest.raises(ConfigError, match=message):
            data_of(config, f"data.features={out}", override)
    features = StoredFeatures(out)
    with pytest.raises(ConfigError, match=r"weights is '\w+' there, 'f+' here"):
        features.header.require_tower(out, TowerKey(features.header.tower, 64 * "f"))
    with pytest.raises(ConfigError, match=r"tower\.layers is 1 there, 2 here"):
        features.header.require_tower(out, TowerKey(features.header.tower | {"layers": 2}, "f"))


def test_missing_and_damaged_features_are_refused(shards, configuration, tmp_path):
    config = configuration(shards)
    out = make_features(config, tmp_path / "out")
    file = out / "0" / "shard-000001.npy"
    content = file.read_bytes()
    for damage in (lambda: file.unlink(), lambda: file.write_bytes(content[:-2])):
        damage()
        with pytest.raises(ConfigError, match=r"1 of 5 shards, .*shard-000001"):
            data_of(config, f"data.features={out}")
    file.write_bytes(content)
    header = out / HEADER_NAME
    good = json.loads(header.read_text())
    for text in ("{", json.dumps(good | {"weights": "x"}), json.dumps(good | {"version": 2})):
        header.write_text(text)
        with pytest.raises(ConfigError, match=r"no header of features \(.*\); delete"):
            data_of(config, f"data.features={out}")
    header.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        data_of(config, f"data.features={out}")
    # A shard that was rewritten with the same lengths: its index is as before.
    make_features(config, tmp_path / "again")
    shard = shards / "shard-000002.tar"
    content, image = shard.read_bytes(), ShardIndex.open(shards).read(2, 1).image
    shard.write_bytes(content.replace(image, image[:-9] + os.urandom(9)))
    index_folder(shards)
    with pytest.raises(DataError, match=r"k15: the image changed.* delete .*shard-000002\.npy"):
        list(data_of(config, f"data.features={tmp_path / 'again'}").batches(stop_after=5))


def test_sources_may_be_fewer_and_in_another_order(make_shards, configuration, tmp_path):
    first, second = make_shards("first"), make_shards("second", count=9)
    config = configuration(first, second)
    out = make_features(config, tmp_path / "out")
    features = StoredFeatures(out)
    here = [ShardIndex.open(folder) for folder in (second, first)]
    sources = features.require(Preprocessing(16), here)
    assert [source.number for source in sources] == [1, 0]
    assert [source.number for source in features.require(Preprocessing(16), here[:1])] == [1]


ROOT = Path(__file__).resolve().parents[2]


def make_features(config, out, *options):
    arguments = ["features", "--config", config, "--out", out, "--batch", 6, *options]
    assert main([*map(str, arguments)]) == 0
    return out


def tower_of(config):
    settings = load_config(config, PretrainConfig)
    torch.manual_seed(settings.training.seed)
    return VLPModel(settings.model).eval().image_encoder


def arrays(folder):
    names = sorted(path.stem for path in (folder / "0").glob("*.npy") if "." not in path.stem)
    return [(np.load(folder / "0" / f"{n}.npy"), np.load(folder / "0" / f"{n}.views.npy"))
            for n in names]  # fmt: skip


@pytest.mark.parametrize(("dtype", "bits"), [("float16", np.float16), ("bfloat16", np.uint16)])
def test_features_are_the_towers_rounded(make_shards, configuration, tmp_path, dtype, bits):
    folder = make_shards(count=13)
    config = configuration(folder)
    out = make_features(config, tmp_path / "out", "--views", 3, "--dtype", dtype)
    tower, index, prepare = tower_of(config), ShardIndex.open(folder), Preprocessing(16)
    transform = TrainTransform(AugmentConfig(randaugment=False), prepare)
    header = FeatureHeader.read(out)
    assert (header.views, header.tokens, header.width, header.seed) == (3, 17, 16, 0)
    for shard, (features, codes) in enumerate(arrays(out)):
        count = index.shards[shard].samples
        assert features.shape == (count, 3, 17, 16)
        assert features.dtype == bits
        views = torch.empty(count, 3, 3, 16, 16)
        for sample in range(count):
            raw = index.read(shard, sample)
            image = decode_image(raw.image, "")
            views[sample, 0] = prepare(image)
            for view in (1, 2):
                name = f"{header.sources[0].index}:{index.shards[shard].name}:{sample}"
                rng = make_rng(0, view, name, "features")
                levels, flipped = transform.view(image, rng, may_flip=True)
                views[sample, view] = prepare.normalise(levels)
                assert codes[sample, view] == (FLIPPED if flipped else PLAIN)
        for start in range(0, count, 2):  # 6 views of a pass
            with torch.no_grad():
                expected = tower(views[start : start + 2].flatten(0, 1))
            stored = torch.from_numpy(features[start : start + 2].view(np.int16))
            stored = stored.view(getattr(torch, dtype)).flatten(0, 1)
            assert torch.equal(stored, expected.to(stored.dtype))
    assert (np.concatenate([codes for _, codes in arrays(out)])[:, 0] == PLAIN).all()
    assert {0, 1} == set(np.concatenate([codes[:, 1] for _, codes in arrays(out)]))


def test_the_first_view_is_averaged_with_its_flip(make_shards, configuration, tmp_path):
    folder = make_shards(count=5)
    config = configuration(folder)
    options = ("--views", 2, "model.image.average_hflip=true")
    [(averaged, _), *_] = arrays(make_features(config, tmp_path / "averaged", *options))
    [(plain, _), *_] = arrays(make_features(config, tmp_path / "plain", *options[:2]))
    assert np.allclose(averaged[:, 1], plain[:, 1], atol=1e-3)
    tower, index = tower_of(config), ShardIndex.open(folder)
    image = Preprocessing(16)(decode_image(index.read(0, 0).image, ""))
    with torch.no_grad():
        straight, flipped = tower(torch.stack([image, image.flip(-1)]))
    back = flipped[1:].unflatten(0, (4, 4)).flip(1).flatten(0, 1)
    expected = (straight + torch.cat([flipped[:1], back])) / 2
    assert np.allclose(averaged[0, 0], expected.numpy(), atol=5e-3)
    assert not np.allclose(averaged[0, 0], plain[0, 0], atol=5e-3)


@pytest.mark.nightly
def test_features_do_not_depend_on_workers_and_ranks(make_shards, configuration, tmp_path):
    config = configuration(make_shards(count=23))
    alone = files_of(make_features(config, tmp_path / "alone", "--views", 2))
    workers = make_features(config, tmp_path / "workers", "--views", 2, "data.workers=2")
    assert files_of(workers) == alone
    command = ["-m", "data_tools", "features", "--config", config, "--batch", 6, "--views", 2]
    ranks = launch(2, [*map(str, command), "--out", str(tmp_path / "ranks")])
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert files_of(tmp_path / "ranks") == alone


@pytest.mark.nightly
def test_a_killed_command_resumes_at_missing_shards(make_shards, configuration, tmp_path):
    config = configuration(make_shards(count=300, per_shard=10))
    whole = files_of(make_features(config, tmp_path / "whole", "--views", 4))
    out = tmp_path / "out"
    command = ["features", "--config", config, "--out", out, "--batch", 6, "--views", 4]
    running = subprocess.Popen(
        [sys.executable, "-m", "data_tools", *map(str, command)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while running.poll() is None and len(list(out.glob("0/*.npy"))) < 8:
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    running.wait()
    done = {path: path.stat().st_mtime_ns for path in out.glob("0/shard-*[0-9].npy")}
    assert 0 < len(done) < 30
    make_features(config, out, "--views", 4)
    assert files_of(out) == whole
    assert all(path.stat().st_mtime_ns == time for path, time in done.items())


@pytest.mark.nightly
def test_a_second_command_is_refused_by_all_ranks(make_shards, configuration, tmp_path):
    config, out = configuration(make_shards(count=300, per_shard=10)), tmp_path / "out"
    command = ["features", "--config", str(config), "--out", str(out), "--batch", "6"]
    first = subprocess.Popen([sys.executable, "-m", "data_tools", *command], cwd=ROOT)
    while first.poll() is None and not list(out.glob("0/*.npy")):
        time.sleep(0.002)
    first.send_signal(signal.SIGSTOP)
    try:
        before = files_of(out)
        second = launch(2, ["-m", "data_tools", *command])
        after = files_of(out)
    finally:
        first.send_signal(signal.SIGCONT)
    refused = f"vlp data features: {out}: is being written by process {first.pid} on "
    assert [rank.returncode for rank in second] == [2, 2]
    assert all(refused in rank.stderr for rank in second)
    assert after == before
    assert first.wait() == 0
    assert not list(out.glob(".lock*"))


def test_other_settings_do_not_resume(make_shards, configuration, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    config = configuration(make_shards(count=5))
    out = make_features(config, tmp_path / "out")
    before = files_of(out)
    options = ["features", "--config", str(config), "--out", str(out)]
    for change, field in (
        (["--views", "2"], "augment"),
        (["--precision", "bf16"], "precision"),
        (["training.seed=1"], "weights"),
        (["model.image.layers=2"], "tower.layers"),
    ):
        assert main([*options, *change]) == 2
        assert f"{field} is " in capsys.readouterr().err
    assert files_of(out) == before
    (out / HEADER_NAME).unlink()
    assert main(options) == 2
    assert "holds files of another kind; name another folder" in capsys.readouterr().err


def test_bad_samples_have_no_features(configuration, tmp_path, capsys):
    folder = tmp_path / "shards"
    with ShardWriter(folder, 4) as writer:
        for number in range(6):
            image = os.urandom(99) if number in (1, 4) else encoded(photo(number))
            writer.write(f"k{number}", image, "jpg", Annotation(captions=["a dog"]))
    out = make_features(configuration(folder), tmp_path / "out", "--views", 2)
    assert "2 images cannot be read" in capsys.readouterr().out
    kinds = FeatureHeader.read(out).kinds
    (features, codes), (_, last) = arrays(out)
    assert codes[:, 0].tolist() == [PLAIN, BAD + kinds.index("unreadable image"), PLAIN, PLAIN]
    assert last[:, 0].tolist() == [BAD + kinds.index("unreadable image"), PLAIN]
    assert (features[1] == 0).all()
    assert (features[[0, 2, 3]] != 0).any((1, 2, 3)).all()


def test_overflow_of_float16_is_refused(make_shards, configuration, tmp_path, capsys, monkeypatch):
    from vlp.models.image_encoder import ImageEncoder

    tower = ImageEncoder.tower
    monkeypatch.setattr(ImageEncoder, "tower", lambda *arguments: 1e5 * tower(*arguments))
    config = configuration(make_shards(count=5))
    assert main(["features", "--config", str(config), "--out", str(tmp_path / "out")]) == 2
    assert "which float16 cannot hold; use --dtype bfloat16" in capsys.readouterr().err
    make_features(config, tmp_path / "wide", "--dtype", "bfloat16")


FLIPS = {"randaugment": False, "crop_scale": [0.5, 1.0], "hflip": True}


@pytest.fixture
def configuration(tmp_path, vocabulary):
    def write(*folders, augment=FLIPS, **data):
        model = TINY_MODEL | {"text": TINY_MODEL["text"] | {"vocab_size": 90}}
        contrastive, itm = {"token": {"group": 4}}, {"group": 4}
        values = {
            "model": model,
            "data": {
                "sources": [{"path": str(folder)} for folder in folders],
                "vocabulary": str(vocabulary),
                "canonical_streams": 4,
                "shuffle_window": 6,
                "workers": 0,
                "augment": augment,
                **data,
            },
            "objectives": {"contrastive": contrastive, "itm": itm, "mim": None, "teacher": None},
            "training": {"batch": 8, "steps": 3, "precision": "float32"},
        }
        path = tmp_path / "pretrain.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write
